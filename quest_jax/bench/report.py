"""A report: the machine and sections of rows, as tables on a terminal, in Markdown, and as JSON."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from quest_jax.bench.machine import machine_line
from quest_jax.bench.rows import Row, Section
from quest_jax.tables import check_place, markdown_table, write_place


class Report(NamedTuple):
    """What one bench found.

    Attributes:
      command: the command line without the program's options for files.
      key: which bench and dtype, the name of its place in a Markdown file.
      machine: of :func:`~quest_jax.bench.machine.measure_machine`.
      rounds: timed runs of each candidate.
      sections: the tables.
    """

    command: str
    key: str
    machine: dict[str, Any]
    rounds: int
    sections: Sequence[Section]

    @property
    def line(self) -> str:
        """The machine, in a line."""
        return f"{machine_line(self.machine)}; medians of {self.rounds} interleaved runs, quartiles in brackets"

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section.rows]


LEFT = ("shape", "method")


def columns(rows: Sequence[Row], read_gb_s: float) -> dict[str, list[str]]:
    """Lays rows out, a list of texts a column; a column that says nothing of any row is left out.

    Args:
      rows: of one table.
      read_gb_s: the machine's read bandwidth.
    """
    by_bytes = any(row.gb_s is not None for row in rows)
    cells = {
        "shape": [row.shape for row in rows],
        "length": [f"{row.length}" for row in rows],
        "method": [row.method for row in rows],
        "time": [f"{_time(row.ms)} ({_number(row.ms_low)}-{_number(row.ms_high)})" for row in rows],
        "CPU": [_time(row.cpu_ms) for row in rows],
        "compile": ["" if row.compile_s is None else f"{row.compile_s:.1f} s" for row in rows],
        "read": [
            "" if row.gb_s is None else f"{row.gb_s:.1f} GB/s, {row.gb_s / read_gb_s:.0%}" for row in rows
        ],
        "ratio": [f"{row.ratio:.2f}x" for row in rows],
        "by bytes" if by_bytes else "by operations": [f"{row.byte_model:.2f}x" for row in rows],
        "achieved": [f"{row.achieved:.0%}" for row in rows],
    }  # fmt: skip
    return {name: texts for name, texts in cells.items() if any(texts)}


def table(section: Section, read_gb_s: float) -> Table:
    """Lays a section's rows out for a terminal; the note goes below."""
    shown = Table(title=Text(section.title), title_justify="left")
    cells = columns(section.rows, read_gb_s)
    for name in cells:
        shown.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for line in zip(*cells.values(), strict=True):
        shown.add_row(*line)
    return shown


def markdown(report: Report) -> str:
    """The same tables in GitHub's Markdown, under the command and the machine."""
    parts = [f"`{report.command}`", report.line]
    for section in report.sections:
        cells = columns(section.rows, report.machine["read_gb_s"])
        left = [i for i, name in enumerate(cells) if name in LEFT]
        parts.append(f"**{section.title}**")
        parts += [markdown_table([*cells], zip(*cells.values(), strict=True), left)] if section.rows else []
        parts += [section.note] if section.note else []
    return "\n\n".join(parts) + "\n"


def markers(key: str) -> tuple[str, str]:
    """The comments between which a Markdown file holds what a bench wrote."""
    return f"<!-- bench {key}: written by the command below -->", f"<!-- bench {key}: end -->"


def check_markdown(path: pathlib.Path, key: str) -> None:
    """Checks that :func:`write_markdown` has a place to write to.

    Raises:
      ValueError: see :func:`quest_jax.tables.check_place`.
    """
    check_place(path, *markers(key))


def write_markdown(path: pathlib.Path, report: Report) -> None:
    """Writes the tables between their two markers, and leaves the rest of the file as it is; makes a new file.

    Raises:
      ValueError: see :func:`check_markdown`.
    """
    write_place(path, *markers(report.key), markdown(report))


def write_json(path: pathlib.Path, report: Report) -> None:
    """Writes ``{"command", "machine", "rows"}``; a row has the fields of :class:`~quest_jax.bench.rows.Row`."""
    content = {
        "command": report.command,
        "machine": report.machine | {"rounds": report.rounds},
        "rows": [row._asdict() for row in report.rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _time(ms: float) -> str:
    return f"{_number(ms)} {'ms' if ms < 1e4 else 's'}"


def _number(ms: float) -> str:
    """Three digits, of milliseconds or from ten thousand of them on of seconds."""
    value = ms if ms < 1e4 else ms / 1e3
    return f"{value:.{max(0, 2 - len(str(int(value))) + (value < 1e4))}f}"
