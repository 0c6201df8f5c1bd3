"""All methods there are: what the files of this folder list in ``METHODS``."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

import quest_jax.policies
from quest_jax.policies.method import Method

COLUMNS = ("method", "phase", "kind", "reads, of the cache", "source")


@functools.cache
def methods() -> Mapping[str, Method]:
    """Returns every method by its name, in the order of the files' names.

    Raises:
      ValueError: two methods of one name, or a ``METHODS`` that holds something else.
      ImportError: what a file imports is not there.
    """
    found: dict[str, Method] = {}
    files: dict[str, str] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(quest_jax.policies.__path__)):
        for method in _methods_of(file):
            if method.name in found:
                raise ValueError(
                    f"quest_jax/policies: {files[method.name]}.py and {file}.py both have a method {method.name!r}; "
                    "rename one."
                )
            found[method.name], files[method.name] = method, file
    return MappingProxyType(found)


def _methods_of(file: str) -> tuple[Method, ...]:
    try:
        listed = getattr(importlib.import_module(f"quest_jax.policies.{file}"), "METHODS", ())
    except ImportError as error:
        raise ImportError(f"quest_jax/policies/{file}.py: {error}") from error
    if not isinstance(listed, tuple | list) or not all(isinstance(one, Method) for one in listed):
        raise ValueError(
            f"quest_jax/policies/{file}.py: expected METHODS to be a tuple of quest_jax.policies.method.Method, such "
            f"as (Method(...),), got {listed!r}."
        )
    return tuple(listed)


def find(name: str) -> Method:
    """Returns the method of this name.

    Raises:
      ValueError: there is none; the message names them all.
    """
    known = methods()
    if name not in known:
        raise ValueError(f"methods: expected one of {', '.join(known)}, got {name!r}.")
    return known[name]


def rows() -> list[tuple[str, ...]]:
    """One row a method, of ``COLUMNS``."""
    return [(one.name, ", ".join(one.phases), one.kind, one.reads, one.source) for one in methods().values()]


def markdown() -> str:
    """The table as it stands in the README."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", *rest) for name, *rest in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
