"""What all benches share: the files they write, and the checks of their sizes."""

import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quest_jax.bench.rows import Section

FILES = ("json", "markdown", "plot")


@dataclasses.dataclass(frozen=True)
class Files:
    """Options of every bench.

    Attributes:
      json: file to write the rows to.
      markdown: file to write the tables to, between the two comments that mark their place in it; a new file otherwise.
      plot: PNG file for time against length, log-log; needs matplotlib.
    """

    json: pathlib.Path | None = None
    markdown: pathlib.Path | None = None
    plot: pathlib.Path | None = None

    def check_files(self, key: str) -> None:
        """Raises for a file that could not be written, before anything is timed."""
        if self.json is not None and (self.json.is_dir() or not self.json.parent.is_dir()):
            raise ValueError(f"--json: expected a file in a folder that exists, got {self.json}.")
        if self.markdown is not None:
            from quest_jax.bench.report import check_markdown

            check_markdown(self.markdown, key)
        if self.plot is not None:
            from quest_jax.bench.plot import check_plot

            check_plot(self.plot)
            if all(len(set(getattr(self, name, ()))) < 2 for name in ("lengths", "steps", "prompts")):
                raise ValueError("--plot: expected two lengths or more for a line, got one.")

    def report(self, name: str, dtype: str, rounds: int, measure: "Callable[[], Sequence[Section]]") -> int:
        """Measures, prints the tables, and writes the files; returns the exit code."""
        key = f"{name} {dtype}"
        self.check_files(key)
        from rich.console import Console

        from quest_jax.bench import report
        from quest_jax.bench.machine import measure_machine
        from quest_jax.bench.plot import write_plot

        console = Console()
        if not console.is_terminal:
            console = Console(width=200)  # whole lines for a file or a pipe
        machine = measure_machine()
        sections = [section for section in measure() if section.rows or section.note]
        found = report.Report(command_line(name, self), key, machine, rounds, sections)
        console.print(found.line, highlight=False)
        for section in found.sections:
            shown = report.table(section, machine["read_gb_s"]) if section.rows else section.title
            console.print(shown, markup=False)
            if section.note:
                console.print(section.note, markup=False, highlight=False)
        if self.json is not None:
            report.write_json(self.json, found)
        if self.markdown is not None:
            report.write_markdown(self.markdown, found)
        if self.plot is not None:
            write_plot(self.plot, found)
        return 0


def command_line(name: str, options: Files) -> str:
    """The command that gives the same report: the options that are not the defaults, without the files."""
    words = ["quest-jax", "bench", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in FILES or value == field.default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        words += [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
    return shlex.join(words)


def check_lengths(name: str, lengths: Sequence[int], multiple: int) -> None:
    """Raises ValueError for a length that is no multiple."""
    if wrong := [length for length in lengths if length < multiple or length % multiple]:
        raise ValueError(f"{name}: expected multiples of {multiple}, got {wrong[0]}.")


def check_least(name: str, value: int, least: int) -> None:
    """Raises ValueError for a value below ``least``."""
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}.")
