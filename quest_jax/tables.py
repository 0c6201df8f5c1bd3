"""Tables in Markdown, and the places in a document that commands write them to."""

import pathlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import rich.table
from rich.text import Text


class Table(NamedTuple):
    """A title, headings, and rows of texts, for a terminal or a document; the first column flush left."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def for_terminal(self) -> rich.table.Table:
        """To be printed by a :class:`rich.console.Console`."""
        shown = rich.table.Table(title=Text(self.title), title_justify="left")
        for i, heading in enumerate(self.headings):
            shown.add_column(heading, justify="right" if i else "left", no_wrap=not i, overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def for_document(self) -> str:
        """In GitHub's Markdown, under its title."""
        return f"**{self.title}**\n\n{markdown_table(self.headings, self.rows)}\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A table in GitHub's Markdown, the columns ``left`` flush left, the others right; ends without a newline."""
    lines = [headings, ["---" if i in left else "---:" for i in range(len(headings))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_place(path: pathlib.Path, begin: str, end: str) -> None:
    """Checks that :func:`write_place` has a place to write to.

    Raises:
      ValueError: the file exists and has no such place, or its folder does not exist.
    """
    if not path.exists():
        if not path.parent.is_dir():
            raise ValueError(f"{path}: expected a file in a folder that exists.")
        return
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"{path}: expected the lines {begin} and {end} once each, in this order, to write between them; add them "
            "or name a file that does not exist."
        )


def write_place(path: pathlib.Path, begin: str, end: str, content: str) -> None:
    """Writes ``content`` between the two lines, and leaves the rest of the file as it is; makes a new file.

    Raises:
      ValueError: see :func:`check_place`.
    """
    check_place(path, begin, end)
    before = after = ""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        before, after = text[: text.index(begin)], text[text.index(end) + len(end) :]
    path.write_text(f"{before}{begin}\n\n{content}\n{end}{after or '\n'}", encoding="utf-8")
