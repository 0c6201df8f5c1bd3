"""``quest-jax eval``: mass, needle, metadata, weights; the others have files of their own."""

import dataclasses

from quest_jax.cli import eval_tasks
from quest_jax.cli.common import Dtype, load_both
from quest_jax.cli.common import Weights as Kind
from quest_jax.cli.eval_fidelity import Fidelity
from quest_jax.cli.eval_layers import Layers
from quest_jax.cli.eval_study import Study


@dataclasses.dataclass(frozen=True)
class Mass:
    """Measure the share of dense attention that QuoKA keeps on prose, token by token and by pages.

    Beside it: what the best list of as many tokens would keep (oracle).

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the text, of Moby-Dick.
      budgets: tokens that QuoKA reads per layer and KV head.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
    """

    model: str = "smollm2-135m"
    tokens: int = 3072
    budgets: tuple[int, ...] = (256, 512, 1024)
    page_size: int = 16
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax import QuoKA
        from quest_jax.evals import mass
        from quest_jax.policies.chunk_lists import ChunkListPolicy
        from quest_jax.policies.oracle import OracleChunk
        from quest_jax.progress import counting, stderr_console

        if not self.budgets or min(self.budgets) < self.page_size:
            raise ValueError(f"--budgets: expected at least a page, {self.page_size} tokens, got {list(self.budgets)}.")
        mass.starts_of(self.tokens, 128, max(self.budgets))
        policies: dict[str, QuoKA | ChunkListPolicy] = {
            f"QuoKA {budget}, {unit}s": QuoKA(budget, granularity=unit)
            for unit in ("token", "page")
            for budget in self.budgets
        }
        policies |= {f"oracle {budget}, tokens": OracleChunk(budget) for budget in self.budgets}
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        with counting("layers", console) as progress:
            ids = mass.prose(tokenizer, self.tokens)
            kept = mass.run(params, ids, policies, page_size=self.page_size, progress=progress)
        Console().print(mass.table(kept, self.tokens))
        return 0


@dataclasses.dataclass(frozen=True)
class Needle:
    """Measure which queries of a chunk should choose: QuoKA's against random, near, strided, last and all.

    Three facts in prose, one of them asked for; the share of its answer that each rule selects, in the groups of heads
    that look at it.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the prompts.
      budgets: tokens that are selected per layer and KV head.
      queries: of the last 128 tokens that choose.
      texts: documents, each asked three questions.
      seed: of the random queries.
      dtype: of the weights and the cache.
    """

    model: str = "smollm2-135m"
    tokens: int = 4096
    budgets: tuple[int, ...] = (256, 512)
    queries: int = 16
    texts: int = 2
    seed: int = 0
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.evals import queries
        from quest_jax.progress import counting, stderr_console

        if not self.budgets or min(self.budgets) < 1:
            raise ValueError(f"--budgets: expected at least 1 token, got {list(self.budgets)}.")
        if self.texts < 1 or not 1 <= self.queries <= 128:
            raise ValueError(
                f"expected --texts of at least 1 and 1 to 128 --queries, got {self.texts} and {self.queries}."
            )
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        prompts = [
            prompt for i in range(self.texts) for prompt in queries.make_prompts(tokenizer, self.tokens, 100 * i)
        ]
        with counting("prompts", console) as progress:
            found = queries.run(
                params, prompts, self.budgets, n_queries=self.queries, seed=self.seed, progress=progress
            )
        Console().print(queries.table(found, len(prompts)))
        return 0


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Measure what narrow metadata, and metadata on two levels, change in what Quest selects on prose.

    Against float32 on one level: the share of its pages that are selected too, the attention on the selected pages, and
    the bytes that scoring reads, in a layer and step, at the text's length and at 128K.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the text, of Moby-Dick.
      budgets: tokens that Quest reads per layer and KV head.
      queries: of the last tokens, that select as if they were decoded.
      block_pages: pages of a block of the second level.
      candidates: pages that two levels score for each page of the budget.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
    """

    model: str = "smollm2-135m"
    tokens: int = 8192
    budgets: tuple[int, ...] = (128, 256, 512)
    queries: int = 128
    block_pages: int = 16
    candidates: int = 8
    page_size: int = 16
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.evals import mass, metadata
        from quest_jax.progress import counting, stderr_console

        if not self.budgets or min(self.budgets) < self.page_size:
            raise ValueError(f"--budgets: expected at least a page, {self.page_size} tokens, got {list(self.budgets)}.")
        if self.queries < 1:
            raise ValueError(f"--queries: expected at least 1, got {self.queries}.")
        compared = [metadata.forms(budget, self.block_pages, self.candidates) for budget in self.budgets]
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        ids = mass.prose(tokenizer, self.tokens)
        with counting("layers", console) as progress:
            found = metadata.run(
                params, ids, compared, queries=self.queries, page_size=self.page_size, progress=progress
            )
        Console().print(metadata.table(found, compared, params, self.tokens, self.page_size))
        return 0


@dataclasses.dataclass(frozen=True)
class Weights:
    """Measure what weights in 8 and 4 bits change in a model's next tokens on prose.

    Differences of single logits, largest and root mean square; divergence of the distributions; how often the likeliest
    token is the same; and the mean negative log-likelihood of the text.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the text, of Moby-Dick.
      kinds: of quantised weights, int8 or int4.
      dtype: of the weights they are held against, and of the cache.
    """

    model: str = "smollm2-135m"
    tokens: int = 1024
    kinds: tuple[Kind, ...] = ("int8", "int4")
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.evals import mass, weights
        from quest_jax.progress import counting, stderr_console

        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        ids = mass.prose(tokenizer, self.tokens)
        with counting("models", console) as progress:
            nll, found = weights.run(params, ids, self.kinds, progress=progress)
        Console().print(weights.table(params, nll, found, self.tokens))
        return 0


COMMANDS = {
    **eval_tasks.COMMANDS, "fidelity": Fidelity, "layers": Layers, "mass": Mass, "needle": Needle,
    "metadata": Metadata, "weights": Weights, "study": Study,
}  # fmt: skip
