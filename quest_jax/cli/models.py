"""``quest-jax models``."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Models:
    """List the families of models that load, and what was checked for each.

    Attributes:
      markdown: print the table as it stands in the README.
    """

    markdown: bool = False

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        from quest_jax import models_table

        if self.markdown:
            print(models_table.markdown(), end="")
            return 0
        table = Table(title="models that load", title_justify="left")
        for name in models_table.COLUMNS:
            table.add_column(name, overflow="fold")
        for row in models_table.rows():
            table.add_row(*row)
        console = Console()
        console.print(table)
        console.print(
            "Compared with transformers: tiny random checkpoints in float32, prompts whole and in chunks, decoding by "
            "token, dense and with Quest and QuoKA at budgets that hold everything. Real weights: smollm2-135m.",
            highlight=False,
        )
        return 0
