"""``quest-jax bench``: decode, prefill, generate, ops, compare, and by other files long, breakdown, calibrate."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Literal

from quest_jax.cli.bench_costs import Breakdown, Calibrate
from quest_jax.cli.bench_files import Files, check_least, check_lengths
from quest_jax.cli.bench_long import Long
from quest_jax.cli.common import Dtype, load_both

if TYPE_CHECKING:
    from quest_jax.bench.rows import Section

ShapeName = Literal["smollm2", "llama-3-8b", "mha"]
_VERY_LONG = 131072  # from here on two levels of metadata are worth their upkeep

MethodName = Literal["split", "grouped", "paged", "dot-product", "torch", "quest", "two-level", "auto"]


@dataclasses.dataclass(frozen=True)
class Decode(Files):
    """Time decode attention of one layer, and whole decode steps of a SmolLM2-shaped model, dense and with Quest.

    The model of a row is by the bytes that it must read: keys, values, metadata, and for whole steps the weights.

    Attributes:
      lengths: context lengths in tokens, multiples of 512.
      shapes: layers to time: 9/3 heads of 64, 32/8 of 128, 32/32 of 128.
      dtype: of keys and values, and of the model.
      budget: tokens that Quest reads in one layer.
      methods: ways to attend; all whose packages are installed if none, `two-level` from 128K tokens on.
      steps: context lengths of whole decode steps, multiples of 512; `--steps` alone leaves them out.
      step_budget: tokens that Quest reads in every layer of a whole step but the two dense ones.
      rounds: timed runs of each candidate, interleaved.
    """

    lengths: tuple[int, ...] = (2048, 8192, 32768)
    shapes: tuple[ShapeName, ...] = ("smollm2", "llama-3-8b", "mha")
    dtype: Dtype = "float32"
    budget: int = 2048
    methods: tuple[MethodName, ...] = ()
    steps: tuple[int, ...] = (2048, 8192, 32768)
    step_budget: int = 1024
    rounds: int = 15

    def run(self) -> int:
        """Prints the tables, and writes the files."""
        check_lengths("--lengths", self.lengths, 512)
        check_lengths("--steps", self.steps, 512)
        check_least("--budget", self.budget, 16)
        check_least("--step-budget", self.step_budget, 16)
        check_least("--rounds", self.rounds, 1)
        from quest_jax.bench.baselines import has_torch
        from quest_jax.bench.decode import METHODS

        if self.methods and not set(self.methods) - {"quest", "two-level", "auto"}:
            raise ValueError(
                "--methods: expected a dense method to compare with, got none; add one, or name no method."
            )
        if "torch" in self.methods and not has_torch():
            raise ImportError('the method "torch" needs PyTorch; pip install "quest-jax[bench]"')
        chosen = self.methods or tuple(name for name in METHODS if name != "torch" or has_torch())
        missing = (
            "" if self.methods or has_torch() else 'Left out: torch SDPA, which pip install "quest-jax[bench]" adds.'
        )
        return self.report("decode", self.dtype, self.rounds, lambda: self._sections(chosen, missing))

    def _sections(self, methods: tuple[str, ...], missing: str) -> "list[Section]":
        from quest_jax.bench import decode
        from quest_jax.bench.rows import Section
        from quest_jax.bench.sizes import SMOLLM2
        from quest_jax.params import random_params
        from quest_jax.progress import stderr_console

        progress, rows, notes = stderr_console(), [], [missing] if missing else []
        for shape in self.shapes:
            for length in self.lengths:
                progress.print(f"decode attention of {shape}, {length} tokens")
                try:
                    here = [name for name in methods if self.methods or name != "two-level" or length >= _VERY_LONG]
                    rows += decode.attention_rows(shape, length, self.dtype, self.budget, self.rounds, here)
                except MemoryError as error:
                    notes.append(f"Left out: {error}")
        if "dot-product" in methods:
            notes.append(decode.TRANSPOSES)
        title = f"decode attention, one layer, {self.dtype}, batch 1, budget {self.budget} (paged: append included)"
        sections = [Section(title, rows, " ".join(notes))]
        if self.steps:
            params, rows, notes = random_params(SMOLLM2, dtype=self.dtype), [], []
            cases = [(length, length) for length in self.steps]
            if min(self.steps) < max(self.steps):
                cases.append((min(self.steps), max(self.steps)))  # what an empty cache costs
            for length, capacity in cases:
                progress.print(f"a decode step after {length} tokens, room for {capacity}")
                try:
                    rows += decode.step_rows(params, length, capacity, self.step_budget, self.rounds)
                except MemoryError as error:
                    notes.append(f"Left out: {error}")
            title = f"a whole decode step, SmolLM2-135M shape, {self.dtype}, batch 1, budget {self.step_budget}"
            sections.append(Section(title, rows, " ".join(notes)))
        return sections


@dataclasses.dataclass(frozen=True)
class Prefill(Files):
    """Time reading a prompt, dense and with QuoKA: the attention of its last chunk in one layer, and all of it.

    The operations model counts products with keys and values; whole prompts have the rest of the model besides.

    Attributes:
      lengths: context lengths in tokens, multiples of 1024.
      shapes: layers to time: 9/3 heads of 64, 32/8 of 128, 32/32 of 128.
      prompts: lengths of whole prompts of a SmolLM2-shaped model; minutes each beyond 8192.
      budget: past tokens that QuoKA reads.
      group: whether the picks of `each` head of a group choose, as a prefill budget has it, or their `mean`.
      rounds: timed runs of each candidate, interleaved.
      prompt_rounds: the same for whole prompts.
    """

    lengths: tuple[int, ...] = (8192, 32768)
    shapes: tuple[ShapeName, ...] = ("smollm2", "llama-3-8b")
    prompts: tuple[int, ...] = (8192,)
    budget: int = 1024
    group: Literal["each", "mean"] = "each"
    rounds: int = 15
    prompt_rounds: int = 3

    def run(self) -> int:
        """Prints the tables, and writes the files."""
        check_lengths("--lengths", self.lengths, 1024)
        check_lengths("--prompts", self.prompts, 1024)
        check_least("--budget", self.budget, 1)
        check_least("--rounds", self.rounds, 1)
        check_least("--prompt-rounds", self.prompt_rounds, 1)
        if shorter := [length for length in self.lengths if length - 128 <= self.budget]:
            raise ValueError(
                f"--lengths: expected more than the budget of {self.budget} and a chunk of 128, got {shorter[0]}: both "
                "would be dense attention."
            )
        return self.report("prefill", "float32", self.rounds, self._sections)

    def _sections(self) -> "list[Section]":
        from quest_jax import QuoKA
        from quest_jax.bench import prefill
        from quest_jax.bench.rows import Section
        from quest_jax.progress import stderr_console

        progress, rows, prompts = stderr_console(), [], []
        policy = QuoKA(self.budget, group=self.group)
        for shape in self.shapes:
            for length in self.lengths:
                progress.print(f"attention of the last chunk of {length} tokens, {shape}")
                rows += prefill.attention_rows(shape, length, policy, self.rounds)
        for length in self.prompts:
            prompts += prefill.prompt_rows(length, policy, self.prompt_rounds, progress.print)
        return [
            Section("attention of the last chunk of 128 tokens, one layer, float32, batch 1", rows),
            Section(
                f"time to the first token, SmolLM2-135M shape, float32, batch 1; runs: {self.prompt_rounds}", prompts
            ),
        ]


@dataclasses.dataclass(frozen=True)
class Generate(Files):
    """Time a real model from end to end: a token and the first one, dense, by Quest and QuoKA, and by llama.cpp.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      lengths: tokens of context.
      dtype: of weights and cache.
      budget: tokens that Quest reads per layer and KV head.
      prefill_budget: past tokens that QuoKA reads for each chunk of the prompt.
      rounds: timed runs of 8 tokens, interleaved.
      prompt_rounds: runs of the time to the first token; 0 leaves it out.
      llama_cpp: True needs xllamacpp, False leaves llama.cpp out; it runs where installed, on GGUF files, by default.
    """

    model: str = "smollm2-135m"
    lengths: tuple[int, ...] = (2048, 8192)
    dtype: Dtype = "float32"
    budget: int = 1024
    prefill_budget: int = 1024
    rounds: int = 5
    prompt_rounds: int = 1
    llama_cpp: bool | None = None

    def run(self) -> int:
        """Prints the tables, and writes the files."""
        check_lengths("--lengths", self.lengths, 128)
        check_least("--budget", self.budget, 16)
        check_least("--prefill-budget", self.prefill_budget, 1)
        check_least("--rounds", self.rounds, 1)
        check_least("--prompt-rounds", self.prompt_rounds, 0)
        from quest_jax.bench.llama_cpp import has_llama_cpp

        if self.llama_cpp and not has_llama_cpp():
            raise ImportError('--llama-cpp needs xllamacpp; pip install "quest-jax[bench]"')
        return self.report("generate", self.dtype, self.rounds, self._sections)

    def _sections(self) -> "list[Section]":
        from quest_jax.bench import generate
        from quest_jax.bench.llama_cpp import has_llama_cpp
        from quest_jax.bench.rows import Section
        from quest_jax.progress import stderr_console
        from quest_jax.weights.locate import locate

        progress, tokens, first, notes = stderr_console(), [], [], []
        params, tokenizer = load_both(self.model, self.dtype, progress)
        location, trained = locate(self.model), params.config.max_positions
        gguf = location.path if location.kind == "gguf" and self.llama_cpp is not False else None
        if self.llama_cpp and gguf is None:
            raise ValueError(f"--llama-cpp: expected a model in a GGUF file, got {self.model}.")
        if gguf is not None and not has_llama_cpp():
            gguf = None
            notes.append('Left out: llama.cpp, which pip install "quest-jax[bench]" adds.')
        for length in self.lengths:
            beyond = length + generate.NEW_TOKENS > trained
            if gguf is not None and beyond:
                notes.append(f"Left out: llama.cpp at {length} tokens, which takes no more than the {trained} trained.")
            try:
                found = generate.time_model(
                    self.model, params, generate.make_prompt(tokenizer, length), self.budget, self.prefill_budget,
                    rounds=self.rounds, prompt_rounds=self.prompt_rounds, gguf=None if beyond else gguf,
                    progress=progress.print,
                )  # fmt: skip
            except MemoryError as error:
                notes.append(f"Left out: {error}")
                continue
            tokens += found.tokens
            first += found.first
        notes.append("Ratios refer to our dense attention over the same weights.")
        if gguf is not None:
            notes.append(f"llama.cpp runs {gguf.name} as it is, with float16 keys and values, and reads a prompt once.")
        return [
            Section(f"a token of {self.model}, end to end, {self.dtype}, batch 1", tokens, " ".join(notes)),
            Section(f"the first token of {self.model}, {self.dtype}, batch 1; runs: {self.prompt_rounds}", first),
        ]


@dataclasses.dataclass(frozen=True)
class Ops(Files):
    """Time the ops of a decode step's attention one by one: append, score, select, attend; and all of it.

    Attributes:
      lengths: context lengths in tokens, multiples of 512, more than the budget.
      shapes: layers to time: 9/3 heads of 64, 32/8 of 128, 32/32 of 128.
      dtype: of keys and values.
      budget: tokens that Quest reads.
      rounds: timed runs of each op, interleaved.
    """

    lengths: tuple[int, ...] = (8192, 32768)
    shapes: tuple[ShapeName, ...] = ("smollm2", "llama-3-8b")
    dtype: Dtype = "float32"
    budget: int = 2048
    rounds: int = 25

    def run(self) -> int:
        """Prints the table, and writes the files."""
        check_lengths("--lengths", self.lengths, 512)
        check_least("--budget", self.budget, 16)
        check_least("--rounds", self.rounds, 1)
        if shorter := [length for length in self.lengths if length <= self.budget]:
            raise ValueError(f"--lengths: expected more than the budget of {self.budget}, got {shorter[0]}.")
        return self.report("ops", self.dtype, self.rounds, self._sections)

    def _sections(self) -> "list[Section]":
        from quest_jax.bench.ops import op_rows
        from quest_jax.bench.rows import Section
        from quest_jax.progress import stderr_console

        progress, rows, notes = stderr_console(), [], ["Ratios refer to all of dense attention, append included."]
        for shape in self.shapes:
            for length in self.lengths:
                progress.print(f"ops of {shape}, {length} tokens")
                try:
                    rows += op_rows(shape, length, self.dtype, self.budget, self.rounds)
                except MemoryError as error:
                    notes.append(f"Left out: {error}")
        title = f"the ops of decode attention, one layer, {self.dtype}, batch 1, budget {self.budget}"
        return [Section(title, rows, " ".join(notes))]


@dataclasses.dataclass(frozen=True)
class Compare:
    """Show what moved between two reports that a bench wrote with --json.

    Attributes:
      before: the older report.
      after: the newer one.
    """

    before: pathlib.Path
    after: pathlib.Path

    def run(self) -> int:
        """Prints the table, and what only one of them has."""
        from rich.console import Console

        from quest_jax.bench import compare
        from quest_jax.bench.machine import machine_line

        before, after = compare.read_report(self.before), compare.read_report(self.after)
        console = Console()
        if not console.is_terminal:
            console = Console(width=200)
        console.print(compare.table(before, after))
        print("~: the quartiles overlap, so the change may be the machine's.")
        for one, other in ((before, after), (after, before)):
            for name in compare.only_in(one, other):
                print(f"only in {one.path}: {name}")
            print(f"{one.path}: {machine_line(one.machine)}")
        return 0


COMMANDS = {
    "decode": Decode,
    "long": Long,
    "prefill": Prefill,
    "generate": Generate,
    "ops": Ops,
    "breakdown": Breakdown,
    "calibrate": Calibrate,
    "compare": Compare,
}
