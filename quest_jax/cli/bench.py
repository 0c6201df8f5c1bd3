"""``quest-jax bench``: decode, prefill."""

import dataclasses
import json
import os
import pathlib
import platform


@dataclasses.dataclass(frozen=True)
class Decode:
    """Time decode attention of one layer, and whole decode steps of a SmolLM2-shaped model, dense and with Quest.

    Attributes:
      lengths: context lengths in tokens, multiples of 512.
      budget: tokens that Quest reads.
      rounds: timed runs of each candidate, interleaved.
    """

    lengths: tuple[int, ...] = (2048, 8192, 32768)
    budget: int = 1024
    rounds: int = 15

    def run(self) -> int:
        """Prints the tables."""
        _check_lengths("--lengths", self.lengths, 512)
        _check_least("--budget", self.budget, 16)
        _check_least("--rounds", self.rounds, 1)
        from rich.console import Console

        from quest_jax.bench.decode import attention_table, model_table

        console = Console()
        console.print(_machine_line(self.rounds), highlight=False)
        console.print(attention_table(list(self.lengths), self.budget, self.rounds))
        console.print(model_table(list(self.lengths), self.budget, self.rounds))
        return 0


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Time reading a prompt, dense and with QuoKA: the attention of its last chunk in one layer, and all of it.

    The operations model counts products with keys and values; whole prompts have the rest of the model besides.

    Attributes:
      lengths: context lengths in tokens, multiples of 1024.
      prompts: lengths of whole prompts of a SmolLM2-shaped model; minutes each beyond 8192.
      budget: past tokens that QuoKA reads.
      rounds: timed runs of each candidate, interleaved.
      prompt_rounds: the same for whole prompts.
      json: file to write the rows to.
    """

    lengths: tuple[int, ...] = (8192, 32768)
    prompts: tuple[int, ...] = (8192,)
    budget: int = 1024
    rounds: int = 15
    prompt_rounds: int = 3
    json: pathlib.Path | None = None

    def run(self) -> int:
        """Prints the tables, and writes the rows."""
        _check_lengths("--lengths", self.lengths, 1024)
        _check_lengths("--prompts", self.prompts, 1024)
        _check_least("--budget", self.budget, 1)
        _check_least("--rounds", self.rounds, 1)
        _check_least("--prompt-rounds", self.prompt_rounds, 1)
        if shorter := [length for length in self.lengths if length - 128 <= self.budget]:
            raise ValueError(
                f"--lengths: expected more than the budget of {self.budget} and a chunk of 128, got {shorter[0]}: both "
                "would be dense attention."
            )
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"--json: expected a file in a folder that exists, got {self.json}.")
        from rich.console import Console

        from quest_jax.bench import prefill
        from quest_jax.progress import stderr_console

        console, progress = Console(), stderr_console()
        console.print(_machine_line(self.rounds), highlight=False)
        rows = prefill.attention_rows(self.lengths, self.budget, self.rounds)
        if rows:
            console.print(prefill.table(rows, "attention of the last chunk of 128 tokens, one layer, float32, batch 1"))
        if self.prompts:
            more = prefill.prompt_rows(self.prompts, self.budget, self.prompt_rounds, progress.print)
            console.print(prefill.table(more, "time to the first token, SmolLM2-135M shape, float32, batch 1"))
            rows += more
        if self.json is not None:
            machine = {"line": _machine_line(self.rounds), "system": platform.platform(), "cores": os.cpu_count()}
            report = {"machine": machine, "rows": [row._asdict() for row in rows]}
            self.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
        return 0


COMMANDS = {"decode": Decode, "prefill": Prefill}


def _check_lengths(name: str, lengths: tuple[int, ...], multiple: int) -> None:
    if wrong := [length for length in lengths if length < multiple or length % multiple]:
        raise ValueError(f"{name}: expected multiples of {multiple}, got {wrong[0]}.")


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}.")


def _machine_line(rounds: int) -> str:
    import jax

    device = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    return f"jax {jax.__version__} on {device}; medians of {rounds} interleaved runs"
