"""``quest-jax bench``: breakdown, calibrate."""

import dataclasses

from quest_jax.cli.bench_files import check_least, check_lengths


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Show where a decode step of a SmolLM2-shaped model goes, by leaving out one part after the other.

    Attributes:
      length: tokens in the cache.
      budget: tokens that Quest reads.
      rounds: timed runs of each variant, interleaved.
    """

    length: int = 8128
    budget: int = 1024
    rounds: int = 15

    def run(self) -> int:
        """Prints the table."""
        check_least("--budget", self.budget, 16)
        check_least("--length", self.length, self.budget)
        check_least("--rounds", self.rounds, 1)
        from rich.console import Console

        from quest_jax.bench import breakdown

        step, parts = breakdown.run(self.length, self.budget, self.rounds)
        Console().print(breakdown.table(step, parts, self.length, self.budget))
        return 0


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Measure the three constants by which a budget decides between dense attention and Quest on this machine.

    The library's own constants are those of one machine; where these differ much, pass the break-even as
    Quest(budget, dense_below=...).

    Attributes:
      lengths: context lengths in tokens, multiples of 512.
      budgets: tokens that Quest reads.
      rounds: timed runs of each candidate, interleaved.
    """

    lengths: tuple[int, ...] = (4096, 8192, 16384)
    budgets: tuple[int, ...] = (512, 1024, 2048)
    rounds: int = 25

    def run(self) -> int:
        """Prints the constants, and the times that they stand for beside the measured ones."""
        check_lengths("--lengths", self.lengths, 512)
        for budget in self.budgets:
            check_least("--budgets", budget, 16)
        if not self.budgets or len(self.lengths) < 2 or min(self.budgets) >= min(self.lengths):
            raise ValueError(
                "calibrate: expected two --lengths or more, and a budget below the shortest, got "
                f"{list(self.lengths)} and {list(self.budgets)}."
            )
        check_least("--rounds", self.rounds, 1)
        from rich.console import Console

        from quest_jax.bench import calibrate
        from quest_jax.progress import stderr_console

        measured = calibrate.measure(self.lengths, self.budgets, self.rounds, stderr_console().print)
        model, base = calibrate.fit(measured)
        console = Console()
        console.print(f"CostModel(stream={model.stream:.2g}, listed={model.listed:.2g}, fixed={model.fixed:.2g})")
        console.print(calibrate.table(measured, model, base))
        return 0
