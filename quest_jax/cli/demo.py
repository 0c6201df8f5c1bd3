"""``quest-jax demo``."""

import dataclasses

from quest_jax.cli.common import Dtype, Weights, keep_programs


@dataclasses.dataclass(frozen=True)
class Demo:
    """Hide a fact in a long text and ask for it: dense, with Quest at several budgets, and read by QuoKA.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the document.
      depth: where the fact stands in it, 0 start, 1 end.
      answer: the word to hide, as the password of the vault.
      budgets: tokens that Quest reads per layer and KV head; a half, a quarter and an eighth of the document if none.
      prefill_budget: past tokens that QuoKA reads for each chunk of the document; a quarter of the document if none.
      max_new_tokens: length of the answer.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      weights: round the matrices to integers of 8 or 4 bits.
      no_compilation_cache: compile everything anew, and keep no compiled program for the next run; see generate.
    """

    model: str = "smollm2-135m"
    tokens: int = 4096
    depth: float = 0.5
    answer: str = "accordion"
    budgets: tuple[int, ...] = ()
    prefill_budget: int | None = None
    max_new_tokens: int = 8
    page_size: int = 16
    dtype: Dtype = "float32"
    weights: Weights | None = None
    no_compilation_cache: bool = False

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.demo import run_demo
        from quest_jax.evals.needle import Fact
        from quest_jax.progress import stderr_console

        console = stderr_console()
        if not self.no_compilation_cache:
            keep_programs(console)
        run_demo(
            self.model, Fact(answer=self.answer), tokens=self.tokens, depth=self.depth, budgets=self.budgets,
            prefill_budget=self.prefill_budget, max_new_tokens=self.max_new_tokens, page_size=self.page_size,
            dtype=self.dtype, weights=self.weights, out=Console(), err=console,
        )  # fmt: skip
        return 0
