"""``quest-jax plan``."""

import dataclasses
import json
from typing import Any

from quest_jax.cli.common import Dtype, Weights


@dataclasses.dataclass(frozen=True)
class Plan:
    """Show the memory that a generation needs, by part, and what fits. Reads the model's config, not its weights.

    Attributes:
      model: "smollm2-135m", a .gguf file, a Hugging Face directory, repo id or config.json, or an orbax directory.
      batch: rows at a time.
      max_len: tokens of a row, prompt and answer.
      budget: tokens that Quest reads for each new token; leave it out for dense attention.
      prefill_budget: past tokens that QuoKA reads for each chunk of the prompt; likewise.
      page_size: tokens in a page of the cache.
      chunk: tokens of a prefill step.
      dtype: of the weights and the cache.
      weights: round the matrices to integers of 8 or 4 bits.
      json: print bytes as JSON instead of the table.
      measure: also run it, with a prompt of random tokens in a process of its own, and show the peak of its memory
        beside the plan. Needs the weights; a prompt of 32K takes minutes.
    """

    model: str = "smollm2-135m"
    batch: int = 1
    max_len: int = 8192
    budget: int | None = None
    prefill_budget: int | None = None
    page_size: int = 16
    chunk: int | None = None
    dtype: Dtype = "float32"
    weights: Weights | None = None
    json: bool = False
    measure: bool = False

    def run(self) -> int:
        """Prints the plan, and what was measured; the exit code is 0 whether it fits or not."""
        import quest_jax

        options: dict[str, Any] = dict(
            budget=self.budget, prefill_budget=self.prefill_budget, page_size=self.page_size, chunk=self.chunk
        )
        planned = quest_jax.plan(
            quest_jax.load_config(self.model),
            self.batch,
            self.max_len,
            dtype=self.dtype,
            weights=self.weights,
            **options,
        )
        measured = {}
        if self.measure:
            from quest_jax.bench import memory

            planned.check()
            measured = memory.measure(self.model, self.batch, self.max_len, self.dtype, self.weights, **options)
        if self.json:
            print(json.dumps(planned.bytes() | measured, indent=2))
            return 0
        print(planned)
        if measured:
            print(memory.report(planned, measured))
        return 0
