"""``quest-jax methods``."""

import dataclasses
import pathlib
import re

# What a document has around the table.
BEGIN, END = "<!-- methods: written by quest-jax methods --write -->", "<!-- methods: end -->"


@dataclasses.dataclass(frozen=True)
class Methods:
    """List the methods that choose what attention reads: phase, kind, bytes, source.

    Attributes:
      markdown: print the table in Markdown.
      write: put it into this document, between the lines <!-- methods: ... --> that README.md has.
    """

    markdown: bool = False
    write: pathlib.Path | None = None

    def run(self) -> int:
        """Prints the table, or writes it."""
        from rich.console import Console
        from rich.table import Table

        from quest_jax.policies import registry

        if self.write is not None:
            from quest_jax.tables import write_place

            write_place(self.write, BEGIN, END, registry.markdown())
            return 0
        if self.markdown:
            print(registry.markdown(), end="")
            return 0
        table = Table(title="methods", title_justify="left")
        for name in registry.COLUMNS:
            table.add_column(name, overflow="fold", no_wrap=name == "method")
        for row in registry.rows():
            table.add_row(*(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text) for text in row))  # without the addresses
        console = Console()
        console.print(table)
        console.print(
            "B tokens of budget, L in the cache, S of a page, T of a chunk, G query heads of a KV head, D channels of "
            "a key; as a share of the cached keys and values.",
            highlight=False,
        )
        return 0
