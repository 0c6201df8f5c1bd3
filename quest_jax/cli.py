"""The ``quest-jax`` command: generate, demo, doctor, eval.

Options are frozen dataclasses, read by tyro; what only one command needs is imported when it runs. Text that was asked
for goes to stdout, everything about it to stderr.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Literal

from quest_jax import __version__

INTERRUPTED = 130  # as shells report SIGINT
BROKEN_PIPE = 141  # as shells report SIGPIPE
Dtype = Literal["float32", "bfloat16"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments without the program's name; None takes the process's.

    Returns:
      Exit code: 0, or 2 after one line on stderr for anything a caller can get wrong, 130 after Ctrl-C, 141 when the
      reader of stdout has gone.

    Raises:
      SystemExit: for ``--help`` (0) and arguments that cannot be parsed (2), from tyro.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"quest-jax {__version__}")
        return 0
    try:
        return _parse(argv).run()
    except KeyboardInterrupt:
        print("\nquest-jax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError, FloatingPointError) as error:
        print(f"quest-jax: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt; the text streams to stdout, numbers go to stderr.

    The prompt is --prompt, --prompt-file or what is piped in. Without --budget attention is dense.

    Attributes:
      model: "smollm2-135m", a .gguf file, a Hugging Face directory or repo id, or an orbax directory.
      tokenizer: where the tokenizer is, if not with the model; same forms.
      prompt: the text to continue.
      prompt_file: a UTF-8 file with the text to continue.
      budget: tokens that Quest reads per layer and KV head; leave it out for dense attention.
      chat: put the prompt into the model's chat template, as the user's message.
      system: system message of the chat.
      max_new_tokens: most tokens to generate.
      temperature: 0 takes the likeliest token each time.
      top_k: sample from the k likeliest tokens only.
      top_p: sample from the likeliest tokens that together have this probability.
      seed: of the sampling.
      stop: end before this text appears.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    prompt: str | None = None
    prompt_file: pathlib.Path | None = None
    budget: int | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    page_size: int = 16
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Streams the continuation."""
        prompt = self._read_prompt()
        if not prompt:
            raise ValueError("expected a prompt, got an empty text.")
        from quest_jax import load, load_tokenizer, stream
        from quest_jax.progress import counting, stderr_console, working

        console = stderr_console()
        with working(f"loading {self.model}", console):
            tokenizer = load_tokenizer(self.tokenizer or self.model)
            params = load(self.model, dtype=self.dtype)
        if self.chat:
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            ids = tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
        start = time.perf_counter()
        with counting("reading the prompt", console) as progress:
            chunks = stream(
                params, [ids], tokenizer=tokenizer, stop=self.stop, progress=progress,
                budget=self.budget, max_new_tokens=self.max_new_tokens, page_size=self.page_size,
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed,
            )  # fmt: skip
        times = [time.perf_counter()]
        for chunk in chunks:
            if chunk.token >= 0:
                times.append(time.perf_counter())
            print(chunk.text, end="", flush=True)
        print(flush=True)
        console.print(_speed(len(ids), times[0] - start, times), highlight=False)
        return 0

    def _read_prompt(self) -> str:
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a chat; add --chat.")
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("expected --prompt or --prompt-file, got both; leave one out.")
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is not None:
            return self.prompt_file.read_text(encoding="utf-8")
        if sys.stdin.isatty():
            raise ValueError("expected a prompt, got none; give --prompt TEXT, --prompt-file FILE, or pipe it in.")
        return sys.stdin.read()


@dataclasses.dataclass(frozen=True)
class Demo:
    """Hide a fact in a long text and ask for it, dense and with Quest at several budgets.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the document.
      depth: where the fact stands in it, 0 start, 1 end.
      answer: the word to hide, as the password of the vault.
      budgets: tokens that Quest reads per layer and KV head; a half, a quarter and an eighth of the document if none.
      max_new_tokens: length of the answer.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
    """

    model: str = "smollm2-135m"
    tokens: int = 4096
    depth: float = 0.5
    answer: str = "accordion"
    budgets: tuple[int, ...] = ()
    max_new_tokens: int = 8
    page_size: int = 16
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax.demo import run_demo
        from quest_jax.evals.needle import Fact
        from quest_jax.progress import stderr_console

        run_demo(
            self.model, Fact(answer=self.answer), tokens=self.tokens, depth=self.depth, budgets=self.budgets,
            max_new_tokens=self.max_new_tokens, page_size=self.page_size, dtype=self.dtype,
            out=Console(), err=stderr_console(),
        )  # fmt: skip
        return 0


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Show versions, devices, the implementation each op uses and why, extras, and whether the small model is here.

    Attributes:
      json: print JSON instead of tables.
    """

    json: bool = False

    def run(self) -> int:
        """Prints the report."""
        from rich.console import Console

        from quest_jax.doctor import examine, show

        report = examine()
        if self.json:
            print(json.dumps(report, indent=2))
        else:
            show(report, Console())
        return 0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure what Quest keeps of the answers of dense attention.

    passkey is Quest's own test: a number hidden in filler, the last 400 characters decoded by the policy.

    Attributes:
      test: what to ask.
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the prompts.
      cases: how many, at depths in equal steps.
      budgets: tokens that Quest reads per layer and KV head; a half and a quarter of the prompt if none.
      batch: cases in memory at a time.
      seed: of the keys.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
    """

    test: Literal["passkey"]
    model: str = "smollm2-135m"
    tokens: int = 2048
    cases: int = 20
    budgets: tuple[int, ...] = ()
    batch: int = 5
    seed: int = 0
    page_size: int = 16
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Prints the table."""
        from rich.console import Console

        from quest_jax import Quest, load, load_tokenizer
        from quest_jax.evals import passkey
        from quest_jax.progress import counting, stderr_console, working

        budgets = self.budgets or (self.tokens // 2, self.tokens // 4)
        policies = {"dense": None} | {f"Quest {budget}": Quest(budget=budget) for budget in budgets}
        for policy in policies.values():
            if policy is not None:
                policy.check(self.page_size)
        console = stderr_console()
        with working(f"loading {self.model}", console):
            tokenizer = load_tokenizer(self.model)
            params = load(self.model, dtype=self.dtype)
        cases = passkey.make_cases(tokenizer, self.tokens, self.cases, self.seed)
        with counting("asking", console) as progress:
            outcomes = passkey.run(
                params, tokenizer, cases, policies, batch=self.batch, page_size=self.page_size, progress=progress
            )
        Console().print(passkey.table(outcomes, self.tokens))
        return 0


def _parse(argv: list[str]) -> Generate | Demo | Doctor | Eval:
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise ImportError('the command line needs tyro; pip install "quest-jax[cli]"') from error
    app = tyro.extras.SubcommandApp()
    app.command(name="generate")(Generate)
    app.command(name="demo")(Demo)
    app.command(name="doctor")(Doctor)
    app.command(name="eval")(Eval)
    return app.cli(
        prog="quest-jax",
        description="Query-aware sparse decoding for JAX. --version prints the version.",
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalRequiredArgs),
    )


def _speed(prompt_tokens: int, prefill_seconds: float, times: Sequence[float]) -> str:
    """The line after a generation; ``times`` has the end of prefill and of every token."""
    line = f"{prompt_tokens} prompt tokens in {prefill_seconds:.1f} s, compiling included; {len(times) - 1} new tokens"
    if len(times) < 3:
        return line
    per_token = (times[-1] - times[1]) / (len(times) - 2)
    return f"{line}, the first after {times[1] - times[0]:.1f} s, then {1e3 * per_token:.0f} ms per token"
