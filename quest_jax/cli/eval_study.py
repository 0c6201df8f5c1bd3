"""``quest-jax eval study``: every method at every budget, for ``docs/study.md``."""

import dataclasses
import pathlib

from quest_jax.cli.common import identity, keep_programs, load_both


@dataclasses.dataclass(frozen=True)
class Study:
    """Measure every method at every budget: attention kept, next tokens, facts and passkeys found.

    About 3 hours on 2 cores. What was found stays in a folder; a run that was interrupted goes on from there.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      out: folder for the results.
      parts: which of them, of decode, again, fidelity, pages, prefill, long, map, from-start; all if
        none.
      markdown: a document with the places that the tables are written to, as docs/study.md has them.
      plots: folder for the plots; needs matplotlib.
      small: a few tokens and budgets, to see that it runs.
    """

    model: str = "smollm2-135m"
    out: pathlib.Path = pathlib.Path("build/study")
    parts: tuple[str, ...] = ()
    markdown: pathlib.Path | None = None
    plots: pathlib.Path | None = None
    small: bool = False

    def run(self) -> int:
        """Prints the tables."""
        from rich.console import Console

        from quest_jax.evals import study, study_report
        from quest_jax.evals.store import Store
        from quest_jax.progress import counting, stderr_console

        parts = self.parts or study.PARTS
        study.check_parts(parts)
        if self.markdown is not None:
            study_report.check_places(self.markdown, parts)
        if self.plots is not None:
            study_report.check_plots(self.plots)
        sizes = study.SMALL if self.small else study.Sizes()
        store, console = Store(self.out / "cells"), stderr_console()
        keep_programs(console)
        params, tokenizer = load_both(self.model, "float32", console)
        with counting("study", console) as progress:
            found = study.run(
                params, tokenizer, store, sizes, model=identity(self.model), parts=parts, progress=progress,
                report=lambda part: console.print(part, highlight=False),
            )  # fmt: skip
        shown = Console()
        for table in study_report.tables(found).values():
            shown.print(table.for_terminal())
        if self.markdown is not None:
            study_report.write(self.markdown, found)
        if self.plots is not None:
            study_report.draw(self.plots, found)
        return 0
