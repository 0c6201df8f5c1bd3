"""``quest-jax eval layers``: how many tokens each layer needs."""

import dataclasses
import json
import math
import pathlib

from quest_jax.cli.common import Dtype, load_both


@dataclasses.dataclass(frozen=True)
class Layers:
    """Measure how many tokens each layer needs, if it knew which: the experiment behind Quest's two dense layers.

    One layer at a time reads the tokens that get most of its attention, the others read all; the smallest budget with
    which the perplexity of prose, decoded token by token, rises by no more than `gap`. Beside it the same of the mean
    negative log-likelihood, and of the divergence from the model's next-token distributions, which luck cannot lower.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the text, of Moby-Dick.
      decoded: of the last tokens, predicted one by one.
      budgets: tokens that the layer reads per KV head; the powers of two below the text if none.
      gap: of the perplexity; of the others, in nats.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      json: write every number to this file too.
      plot: PNG file for what each layer needs; needs matplotlib.
    """

    model: str = "smollm2-135m"
    tokens: int = 2048
    decoded: int = 64
    budgets: tuple[int, ...] = ()
    gap: float = 0.01
    page_size: int = 16
    dtype: Dtype = "float32"
    json: pathlib.Path | None = None
    plot: pathlib.Path | None = None

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.evals import mass, oracle_sparsity, plots
        from quest_jax.progress import counting, stderr_console

        oracle_sparsity.check(self.tokens, self.decoded, self.budgets)
        if not math.isfinite(self.gap):
            raise ValueError(f"--gap: expected a finite number, got {self.gap}.")
        if self.plot is not None:
            from quest_jax.bench.plot import check_plot

            check_plot(self.plot)
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        with counting("layers", console) as progress:
            found = oracle_sparsity.run(
                params, mass.prose(tokenizer, self.tokens), budgets=self.budgets, decoded=self.decoded,
                page_size=self.page_size, progress=progress,
            )  # fmt: skip
        if self.json is not None:
            about = {"model": self.model, "dtype": self.dtype, "page_size": self.page_size}
            text = json.dumps(about | oracle_sparsity.as_json(found, self.gap), indent=1)
            self.json.write_text(text + "\n", encoding="utf-8")
        if self.plot is not None:
            measures = oracle_sparsity.Measure.__args__
            curves = {f"{one} {self.gap:g}": [float(n) for n in found.needed(self.gap, one)] for one in measures}
            plots.by_layer(
                curves, self.plot, ylabel="tokens that the layer needs", title=oracle_sparsity.about(found), log=True
            )
        output = Console()
        if not output.is_terminal:
            output = Console(width=200)  # whole lines for a file or a pipe
        output.print(oracle_sparsity.table(found, self.gap))
        return 0
