"""What moved between two reports."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

from quest_jax.bench.machine import KEYS
from quest_jax.bench.rows import Row

Key = tuple[str, int, str, str, int | None]


class Saved(NamedTuple):
    """A report that was read.

    Attributes:
      path: of the file.
      machine: as the bench described it.
      rows: by (shape, length, dtype, method, budget).
    """

    path: pathlib.Path
    machine: dict[str, Any]
    rows: Mapping[Key, Row]


def read_report(path: pathlib.Path) -> Saved:
    """Reads what ``--json`` wrote.

    Raises:
      OSError: no such file.
      ValueError: it is no such report, or has a row twice.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{path}: {_EXPECTED}, got no JSON: {error}.") from error
    machine = content.get("machine") if isinstance(content, dict) else None
    if not isinstance(machine, dict) or not machine.keys() >= set(KEYS):
        raise ValueError(f'{path}: {_EXPECTED}, found no "machine" with {", ".join(KEYS)}.')
    speed = machine["read_gb_s"]
    if isinstance(speed, bool) or not isinstance(speed, int | float):
        raise ValueError(f'{path}: {_EXPECTED}; in "machine" read_gb_s is {speed!r}.')
    if not isinstance(content.get("rows"), list):
        raise ValueError(f'{path}: {_EXPECTED}, found no list "rows".')
    rows: dict[Key, Row] = {}
    for number, fields in enumerate(content["rows"]):
        row = _row(path, number, fields)
        if _key(row) in rows:
            raise ValueError(f"{path}: expected every line once, got {_name(_key(row))} twice.")
        rows[_key(row)] = row
    return Saved(path, machine, rows)


def table(before: Saved, after: Saved) -> Table:
    """Lays out what both have, in the order of ``before``."""
    shown = Table(title=f"{before.path} -> {after.path}", title_justify="left")
    names = ("shape", "length", "dtype", "method", "before", "after", "change")
    for name in (*names, "ratio before", "ratio after", "change"):
        shown.add_column(name, justify="left" if name in ("shape", "dtype", "method") else "right")
    for key, old in before.rows.items():
        if (new := after.rows.get(key)) is not None:
            # Quartiles that overlap: the difference may be the machine's.
            noise = " ~" if old.ms_low <= new.ms_high and new.ms_low <= old.ms_high else ""
            shown.add_row(
                old.shape, f"{old.length}", old.dtype, old.method, f"{old.ms:.2f} ms", f"{new.ms:.2f} ms",
                f"{new.ms / old.ms - 1:+.0%}{noise}", f"{old.ratio:.2f}x", f"{new.ratio:.2f}x",
                f"{new.ratio / old.ratio - 1:+.0%}",
            )  # fmt: skip
    return shown


def only_in(one: Saved, other: Saved) -> list[str]:
    """Names the rows that ``other`` does not have."""
    return [_name(key) for key in one.rows if key not in other.rows]


_EXPECTED = "expected a report that quest-jax bench wrote with --json"
_NUMBERS = ("length", "ms", "ms_low", "ms_high", "cpu_ms", "ratio", "byte_model", "achieved")


def _row(path: pathlib.Path, number: int, fields: Any) -> Row:
    if not isinstance(fields, dict) or fields.keys() != set(Row._fields):
        got = sorted(fields) if isinstance(fields, dict) else fields
        raise ValueError(f"{path}: {_EXPECTED}; expected in row {number} the keys {', '.join(Row._fields)}, got {got}.")
    wrong = [name for name in _NUMBERS if isinstance(fields[name], bool) or not isinstance(fields[name], int | float)]
    wrong += [name for name in ("shape", "dtype", "method") if not isinstance(fields[name], str)]
    budget = fields["budget"]
    wrong += ["budget"] * (isinstance(budget, bool) or not isinstance(budget, int | None))
    wrong += [name for name in ("ms", "ratio") if name not in wrong and not fields[name] > 0]
    if wrong:
        raise ValueError(f"{path}: {_EXPECTED}; in row {number} {wrong[0]} is {fields[wrong[0]]!r}.")
    return Row(**fields)


def _key(row: Row) -> Key:
    return row.shape, row.length, row.dtype, row.method, row.budget


def _name(key: Key) -> str:
    shape, length, dtype, method, _ = key
    return f"{shape}, {length} tokens, {dtype}, {method}"
