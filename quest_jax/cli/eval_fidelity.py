"""``quest-jax eval fidelity``: the attention that methods keep."""

import dataclasses
import json
import pathlib

from quest_jax import __version__
from quest_jax.cli.common import Dtype, identity, load_both
from quest_jax.cli.methods_of import policies_for


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Measure what methods keep of dense attention while decoding prose, and the bytes they read for it.

    Layer by layer, on the model's own queries, keys and values. `full`, `random`, `sink_window` and `oracle` are always
    among the rows.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      methods: names of `quest-jax methods` that decode, or `all`; all if none.
      budgets: tokens that a method reads per layer and KV head.
      basis: of `quest-jax calibrate loki`, for `loki`; without it that ranks by the basis of the text itself.
      tokens: length of the text, of Moby-Dick.
      queries: of the last tokens, decoded one by one.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      out: folder for the results, as JSON, Markdown and plots. A run that was interrupted goes on from what is in it.
    """

    model: str = "smollm2-135m"
    methods: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (256, 512, 1024)
    basis: pathlib.Path | None = None
    tokens: int = 3072
    queries: int = 64
    page_size: int = 16
    dtype: Dtype = "float32"
    out: pathlib.Path | None = None

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.evals import fidelity, fidelity_cells, mass, plots
        from quest_jax.evals.store import Store
        from quest_jax.inputs import as_size
        from quest_jax.progress import counting, stderr_console

        for name in ("tokens", "queries"):
            as_size(f"--{name}", getattr(self, name))
        if self.queries >= self.tokens:
            raise ValueError(
                f"--queries: expected fewer than the {self.tokens} tokens of --tokens, got {self.queries}."
            )
        policies = policies_for(self.methods or ("all",), self.budgets, self.page_size, self.basis)
        store = None if self.out is None else Store(self.out / "cells")
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        about = {"model": identity(self.model), "dtype": self.dtype, "tokens": self.tokens, "version": __version__}
        about |= {"basis": None if self.basis is None else identity(self.basis)}
        with counting("methods", console) as progress:
            found = fidelity_cells.measure(
                params, mass.prose(tokenizer, self.tokens), policies, store=store, settings=about,
                queries=self.queries, page_size=self.page_size, progress=progress,
            )  # fmt: skip
        texts = {name: [one] for name, one in found.items()}
        title = (
            f"decoding the last {self.queries} of {self.tokens} tokens of one text; layers from the third on, bytes "
            f"too; {self.model}, {self.dtype}, pages of {self.page_size}; 95 % bootstrap intervals over layers, seed 0"
        )
        table = fidelity_cells.table(texts, title)
        Console().print(table.for_terminal())
        if self.out is None:
            return 0
        content = about | {"queries": self.queries, "page_size": self.page_size, "rows": fidelity.as_json(found)}
        (self.out / "fidelity.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (self.out / "fidelity.md").write_text(table.for_document(), encoding="utf-8")
        try:
            plots.against_bytes(
                fidelity_cells.curves(texts, "mass"), self.out / "fidelity-mass.png",
                ylabel="attention on what was read; bars: quartiles over layers", title=title,
            )  # fmt: skip
            for budget in self.budgets:
                of_budget = {name: one for name, one in texts.items() if name.endswith(f" {budget}")}
                plots.by_layer(
                    fidelity_cells.by_layer(of_budget, "recall"), self.out / f"fidelity-recall-{budget}.png",
                    ylabel=f"recall of the {fidelity.TOP} most attended tokens", first_layer=fidelity.FIRST_LAYER,
                    title=title,
                )  # fmt: skip
        except ImportError as error:
            console.print(f"no plots: {error}", highlight=False, markup=False)
        return 0
