"""The filters, tests and functions a chat template may use, each with its price.

Left out are those whose one purpose is to make text longer (``center``, ``wordwrap``, ``lipsum`` and so on).
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterator, Sized
from typing import Any

import jinja2.filters
import jinja2.tests
import markupsafe
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from quest_jax.tokenizer.work_limit import STEP, metered, pay, pay_content, pay_length, unpack

_MAX_INDENT = 16
_MAX_TIME_FORMAT = 100
# Their cost does not depend on what is inside the items.
_SHALLOW_FILTERS = "count d default first items last length list map reject rejectattr reverse select selectattr"
_DEEP_FILTERS = "abs capitalize dictsort float int lower max min sort string title trim unique upper"
_SHALLOW_TESTS = (
    "boolean callable defined divisibleby even false float integer iterable mapping none number odd sameas sequence "
    "string true undefined"
).split()


def make_filters() -> dict[str, Callable[..., Any]]:
    """Filters by name."""
    sources = jinja2.filters.FILTERS
    shallow = {name: _paid(sources[name], _pay_lengths) for name in _SHALLOW_FILTERS.split()}
    deep = {name: _paid(sources[name], _pay_contents) for name in _DEEP_FILTERS.split()}
    prices = {"join": pay_join, "replace": pay_replace, "indent": _pay_indent}
    sized = {name: _paid(sources[name], price) for name, price in prices.items()}
    own = {"tojson": _to_json, "escape": _escape, "e": _escape, "safe": _paid(str, _pay_contents)}
    return shallow | deep | sized | own


def make_tests() -> dict[str, Callable[..., Any]]:
    """Tests by name."""
    # The value is not unpacked: a test must not use up the iterator it looks at.
    return {
        name: _paid(test, _pay_lengths if name in _SHALLOW_TESTS else _pay_contents, unpacked=False)
        for name, test in jinja2.tests.TESTS.items()
    }


def make_globals() -> dict[str, Callable[..., Any]]:
    """Functions by name."""
    return {
        "dict": _make_dict,
        "namespace": _make_namespace,
        "raise_exception": _raise_exception,
        "range": safe_range,
        "strftime_now": _strftime_now,
    }


def pay_join(items: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    """The price of joining ``items``."""
    pay_content(items)
    pay_content(separator)
    pay(len(items) * len(str(separator)))


def pay_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    """The price of replacing every ``old`` in ``text``."""
    pay_content((text, old, new))
    pay(str(text).count(str(old)) * len(str(new)))


def _pay_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    pay_content((text, width))
    pay((str(text).count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))


def _pay_lengths(value: Any, *args: Any, **named: Any) -> None:
    pay_length(value)
    pay_content((args, named))


def _pay_contents(*values: Any, **named: Any) -> None:
    pay_content((values, named))


def _pay_names(value: Any, *args: Any, **named: Any) -> None:
    """``map(attribute="a.b.c")`` looks three names up in every item."""
    if isinstance(value, Sized) and not isinstance(value, str):
        names = sum(len(name) for name in (*args, *named.values()) if isinstance(name, str))
        pay(len(value) * names)


def _paid(function: Callable[..., Any], price: Callable[..., None], unpacked: bool = True) -> Callable[..., Any]:
    start = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja puts its environment or context in front

    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        values = [unpack(value) for value in args[start:]] if unpacked else args[start:]
        price(*values, **kwargs)
        _pay_names(*values, **kwargs)
        result = function(*args[:start], *values, **kwargs)
        return metered(result) if isinstance(result, Iterator) else result

    return paid


def _escape(value: Any) -> str:
    pay_content(value)
    return str(markupsafe.escape(str(value)))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Like the ``tojson`` of transformers: jinja's own would escape ``<``, ``>`` and ``&`` for HTML."""
    value = unpack(value)
    pay_content((value, separators))
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_INDENT:
        raise SecurityError(f"tojson: expected an indent of at most {_MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    for part in encoder.iterencode(value):
        pay(STEP + len(part))
        parts.append(part)
    return "".join(parts)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    args = tuple(unpack(arg) for arg in args)
    pay_content(args)
    return dict(*args, **kwargs)


class _PlainNamespace(Namespace):
    """A namespace whose names cannot be those Python itself looks for."""

    def __init__(self, *args: Any, **kwargs: Any):
        values = _make_dict(*args, **kwargs)
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError("namespace: expected names without a leading underscore")
        super().__setitem__(name, value)


def _make_namespace(*args: Any, **kwargs: Any) -> Namespace:
    return _PlainNamespace(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    pay_content(message)
    raise TemplateError(str(message))


def _strftime_now(form: Any) -> str:
    if not isinstance(form, str) or len(form) > _MAX_TIME_FORMAT:
        raise SecurityError(f"strftime_now: expected a format of at most {_MAX_TIME_FORMAT} characters")
    return datetime.datetime.now().strftime(form)
