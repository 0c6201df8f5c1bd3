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
      ValueError: two methods of one name.
    """
    found: dict[str, Method] = {}
    for module in sorted(pkgutil.iter_modules(quest_jax.policies.__path__), key=lambda module: module.name):
        for method in getattr(importlib.import_module(f"quest_jax.policies.{module.name}"), "METHODS", ()):
            if method.name in found:
                raise ValueError(f"{module.name}.py: a method {method.name!r} is in another file already; rename it.")
            found[method.name] = method
    return MappingProxyType(found)


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
