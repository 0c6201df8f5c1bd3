"""JSON of unknown origin: bounded in size, no duplicate keys, only finite numbers, and one kind of error."""

import json
import math
import os
import pathlib
from typing import Any

MAX_JSON_BYTES = 10_000_000
"""A config has a few kB, the header or index of the largest Llama (1138 tensors) about 150 kB."""
_MAX_DEPTH = 64


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON file whose top level is an object.

    Raises:
      FileNotFoundError: no such file.
      ValueError: larger than ``MAX_JSON_BYTES``, or anything :func:`parse_json` refuses.
    """
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: expected a JSON file of at most {MAX_JSON_BYTES} bytes, got one of {size}.")
        data = file.read()
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parses JSON text whose top level is an object; ``where`` names its origin in errors.

    Raises:
      ValueError: not UTF-8, not JSON, nested too deep, a duplicate key, NaN, infinity, a number beyond float64, or a
        top level that is no object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ValueError(f"{where}: expected JSON with little nesting, got more levels than can be read.") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors too
        raise ValueError(f"{where}: expected valid JSON, got: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object at the top level, got {type(value).__name__}.")
    _check_depth(value, where)
    return value


def _check_depth(value: Any, where: str) -> None:
    """What the parser can nest, comparing or printing it may not: each takes its own share of the stack a level."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(f"{where}: expected JSON of at most {_MAX_DEPTH} levels, got more.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {name!r} twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, which is beyond float64")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text}, which is not JSON")
