"""Typed access to the values of a parsed config file."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

_REQUIRED = object()
_LIMIT = 2**31
_SHOWN = 80


def shown(value: Any) -> str:
    """A value of a file, in an error: its ``repr``, cut, and never more work than that."""
    return _SHORT.repr(value)[:_SHOWN]


_SHORT = reprlib.Repr(maxlevel=4, maxdict=8, maxlist=16, maxtuple=16, maxstring=_SHOWN, maxlong=_SHOWN, maxother=_SHOWN)


class Fields:
    """Values by key, each checked for its type; ``null`` counts as absent.

    Every method takes the key and a default, and raises ValueError naming the file and the key when the value has
    another type, is out of range, or is absent without a default.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self.where = values, where

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """An integer in ``[0, 2**31)``; not a float and not a truth value."""
        value = self._get(key, default)
        if value is default or (type(value) is int and 0 <= value < _LIMIT):
            return value
        raise self.error(key, "an integer of at least 0 and below 2**31", value)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number, as float."""
        value = self._get(key, default)
        if value is default:
            return value
        if _finite(value):
            return float(value)
        raise self.error(key, "a finite number", value)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """True or False."""
        value = self._get(key, default)
        if value is default or isinstance(value, bool):
            return value
        raise self.error(key, "true or false", value)

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self._get(key, default)
        if value is default or isinstance(value, str):
            return value
        raise self.error(key, "a string", value)

    def ids(self, key: str) -> tuple[int, ...] | None:
        """Token ids, given as one integer or a list of them, without repetitions; None when absent."""
        value = self._get(key, None)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < _LIMIT for item in items):
            raise self.error(key, "a token id or a list of them", value)
        return tuple(dict.fromkeys(items))

    def sequence(self, key: str) -> list[Any] | None:
        """A list, or None when absent."""
        value = self._get(key, None)
        if value is None or isinstance(value, list):
            return value
        raise self.error(key, "a list", value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers in ``[0, 2**31)``; empty when absent."""
        values = self.sequence(key) or []
        if not all(type(value) is int and 0 <= value < _LIMIT for value in values):
            raise self.error(key, "a list of integers of at least 0", values)
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers, as floats; empty when absent."""
        values = self.sequence(key) or []
        if not all(_finite(value) for value in values):
            raise self.error(key, "a list of finite numbers", values)
        return tuple(float(value) for value in values)

    def layer_types(self, layers: int) -> list[Any] | None:
        """The kind of every layer, ``full_attention`` or ``sliding_attention``; None when absent."""
        kinds = self.sequence("layer_types")
        if kinds is not None and len(kinds) != layers:
            raise self.error("layer_types", f"one entry per layer ({layers})", kinds)
        if other := [kind for kind in kinds or () if kind not in ("full_attention", "sliding_attention")]:
            raise NotImplementedError(
                f"{self.where}: layer_types: expected full_attention or sliding_attention, got {shown(other[0])}."
            )
        return kinds

    def pattern(self, key: str, layers: int, default: int) -> int | tuple[bool, ...]:
        """A period, or a truth value for every layer."""
        value = self._get(key, default)
        if not isinstance(value, list):
            return self.integer(key, default)
        if len(value) != layers or not all(isinstance(flag, bool) for flag in value):
            raise self.error(key, f"a period or one truth value per layer ({layers})", value)
        return tuple(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: the key {key!r} is missing.")
        return default

    def error(self, key: str, expected: str, value: Any) -> ValueError:
        """The error for a value that is not what was expected."""
        return ValueError(f"{self.where}: {key}: expected {expected}, got {shown(value)}.")


def _finite(value: Any) -> bool:
    """Whether it is a number that float64 holds; of an integer beyond it Python itself cannot say."""
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))
