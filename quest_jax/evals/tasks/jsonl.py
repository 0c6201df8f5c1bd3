"""Files with one JSON object a line, as benchmarks publish their questions."""

import os
import pathlib
from collections.abc import Callable, Iterator

from quest_jax.weights.fields import Fields, shown
from quest_jax.weights.strict_json import MAX_JSON_BYTES, parse_json


def read_lines[T](path: str | os.PathLike[str], parse: Callable[[Fields], T]) -> list[T]:
    """What ``parse`` makes of every line that is not blank; all lines are checked, whichever are used.

    Raises:
      ValueError: no such file, nothing in it, or a line that is longer than ``MAX_JSON_BYTES``, is no JSON object, or
        is refused by ``parse``. The message names file and line.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: expected a file with one JSON object a line, got {_what_is(path)}.")
    found = [parse(fields) for fields in _lines(path)]
    if not found:
        raise ValueError(f"{path}: expected at least one JSON object, got an empty file.")
    return found


def text(fields: Fields, key: str, *default: str) -> str:
    """A string that a tokenizer takes: JSON can name half of a surrogate pair, which has no UTF-8."""
    return _with_utf8(fields, key, fields.text(key, *default))


def texts(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of such strings, at least one of them not blank."""
    values = fields.sequence(key)
    if not values or not all(isinstance(value, str) for value in values) or not any(map(str.strip, values)):
        raise fields.error(key, "a list of strings that are not all blank", values)
    return tuple(_with_utf8(fields, key, value) for value in values)


def _with_utf8(fields: Fields, key: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise fields.error(key, "text that has a UTF-8 form", value[error.start : error.end]) from error
    return value


def _lines(path: pathlib.Path) -> Iterator[Fields]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_JSON_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_JSON_BYTES:
                raise ValueError(f"{where}: expected at most {MAX_JSON_BYTES} bytes, got more.")
            if line.strip():
                yield Fields(parse_json(line, where), where)


def _what_is(path: pathlib.Path) -> str:
    return "a directory" if path.is_dir() else f"no such file {shown(path.name)}"
