"""``quest-jax bench long``: how the cost of a decode step grows with very long contexts."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from quest_jax.cli.bench_files import Files, check_least, check_lengths
from quest_jax.cli.common import Dtype

if TYPE_CHECKING:
    from quest_jax.bench.rows import Section


@dataclasses.dataclass(frozen=True)
class Long(Files):
    """Time decode attention of one layer at lengths where scoring every page costs more than attending to some.

    Dense, Quest, and Quest on two levels (blocks of 16 pages) over the same cache, up to a million tokens.

    Attributes:
      lengths: context lengths in tokens, multiples of 512.
      shapes: layers to time: 9/3 heads of 64, 32/8 of 128, 32/32 of 128.
      dtype: of keys and values.
      budget: tokens that Quest reads.
      rounds: timed runs of each candidate, interleaved.
    """

    lengths: tuple[int, ...] = (32768, 131072, 262144, 524288, 1048576)
    shapes: tuple[Literal["smollm2", "llama-3-8b", "mha"], ...] = ("llama-3-8b",)
    dtype: Dtype = "bfloat16"
    budget: int = 2048
    rounds: int = 9

    def run(self) -> int:
        """Prints the table, and writes the files."""
        check_lengths("--lengths", self.lengths, 512)
        check_least("--budget", self.budget, 16)
        check_least("--rounds", self.rounds, 1)
        return self.report("long", self.dtype, self.rounds, self._sections)

    def _sections(self) -> "list[Section]":
        from quest_jax.bench.decode import attention_rows
        from quest_jax.bench.rows import Section
        from quest_jax.progress import stderr_console

        progress, rows, notes = stderr_console(), [], []
        for shape in self.shapes:
            for length in self.lengths:
                progress.print(f"decode attention of {shape}, {length} tokens")
                try:
                    rows += attention_rows(
                        shape, length, self.dtype, self.budget, self.rounds, ("paged", "quest", "two-level")
                    )
                except MemoryError as error:
                    notes.append(f"Left out: {error}")
        title = f"decode attention, one layer, {self.dtype}, batch 1, budget {self.budget}, append included"
        return [Section(title, rows, " ".join(notes))]
