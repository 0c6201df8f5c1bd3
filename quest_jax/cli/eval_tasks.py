"""``quest-jax eval`` of a task: questions about long contexts, answered by every method."""

import abc
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from quest_jax.cli.common import Dtype, load_both
from quest_jax.cli.methods_of import ALWAYS, DEFAULT, policies_of
from quest_jax.evals.tasks.registry import TASKS

if TYPE_CHECKING:
    from rich.console import Console

    from quest_jax import Policy, Tokenizer
    from quest_jax.evals.contexts import Context
    from quest_jax.evals.report import Row
    from quest_jax.evals.retention import Found

Question = Literal["sparse", "dense", "both"]


@dataclasses.dataclass(frozen=True)
class Evaluation(abc.ABC):
    """What all evaluations of answers and texts have in common.

    Attributes:
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      methods: names of `quest-jax methods`; `quest`, or `quoka` with --prefill, if none. `full`, `random`,
        `sink_window` and `oracle` are there always.
      budgets: tokens that a method reads per layer and KV head; a half and a quarter of the prompt if none.
      prefill: measure the methods in reading prompts; decoding is dense then.
      tokens: lengths of the prompts.
      batch: contexts in memory at a time.
      seed: of what is asked, and where it stands.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      basis: of `quest-jax calibrate loki`, for `loki`; without it that ranks by the basis of the text itself.
      out: folder for the results, as JSON, Markdown and plots. A run that was interrupted goes on from what is in it.
    """

    model: str = "smollm2-135m"
    methods: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    prefill: bool = False
    tokens: tuple[int, ...] = (2048,)
    batch: int = 4
    seed: int = 0
    page_size: int = 16
    dtype: Dtype = "float32"
    basis: pathlib.Path | None = None
    out: pathlib.Path | None = None

    name: ClassVar[str] = ""

    def run(self) -> int:
        """Prints a table for each length."""
        from quest_jax.evals.store import Store
        from quest_jax.progress import stderr_console

        if not self.tokens:
            raise ValueError("--tokens: expected at least one length, got none.")
        policies = {tokens: self._policies(tokens) for tokens in self.tokens}
        store = None if self.out is None else Store(self.out / "cells")
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        made = {tokens: self.contexts(tokenizer, tokens) for tokens in self.tokens}
        found = {}
        for tokens, contexts in made.items():
            found[tokens] = self._measure(params, tokenizer, contexts, policies[tokens], store, tokens, console)
            self._show(tokens, contexts, found[tokens])
        if self.out is not None:
            self._write(made, found, console)
        return 0

    @abc.abstractmethod
    def contexts(self, tokenizer: "Tokenizer", tokens: int) -> "list[Context]":
        """What is asked, or followed."""

    @property
    @abc.abstractmethod
    def modes(self) -> tuple[Any, ...]:
        """Of :mod:`quest_jax.evals.retention`."""

    def _policies(self, tokens: int) -> "dict[str, Policy]":
        budgets, phase = self.budgets or (tokens // 2, tokens // 4), "prefill" if self.prefill else "decode"
        found: dict[str, Policy] = {}
        for name in dict.fromkeys((*ALWAYS[phase], *(self.methods or (DEFAULT[phase],)))):
            found |= policies_of(name, budgets, self.page_size, self.basis, phase)
        return found

    def _measure(self, params, tokenizer, contexts, policies, store, tokens, console) -> "dict[str, Found]":
        from quest_jax.evals import retention
        from quest_jax.progress import counting

        about = {"task": self.name, "model": self.model, "dtype": self.dtype, "tokens": tokens, "seed": self.seed}
        basis = None if self.basis is None else str(self.basis)
        with counting(f"{self.name}, {tokens} tokens", console) as progress:
            return retention.run(
                params, tokenizer, contexts, policies, modes=self.modes, batch=self.batch, page_size=self.page_size,
                prefills=self.prefill, store=store, settings=about | {"basis": basis} | self.settings,
                progress=progress,
            )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """More that tells results of this command from others."""
        return {}

    def _title(self, tokens: int, contexts: "list[Context]") -> str:
        asked = sum(len(one.asked) for one in contexts)
        texts = sum(max(0, len(one.following) - 1) for one in contexts)
        what = (
            f"{asked} questions about {len(contexts)} contexts" if asked else f"{texts} tokens of {len(contexts)} texts"
        )
        by = "prompts read" if self.prefill else "decoded"
        return f"{self.name}, {what}, {tokens} tokens, {by} by the method; seed {self.seed}, 95 % bootstrap intervals"

    def _show(self, tokens, contexts, found) -> None:
        from rich.console import Console

        from quest_jax.evals import report

        Console().print(report.table(report.rows(found), self._title(tokens, contexts)).for_terminal())

    def _write(self, made, found, console: "Console") -> None:
        from quest_jax.evals import report

        assert self.out is not None
        rows = {tokens: report.rows(one) for tokens, one in found.items()}
        titles = {tokens: self._title(tokens, made[tokens]) for tokens in found}
        content = [
            {"title": titles[tokens], "tokens": tokens, "rows": report.as_json(found[tokens], lines)}
            for tokens, lines in rows.items()
        ]
        about = {"task": self.name, "model": self.model, "dtype": self.dtype, "page_size": self.page_size}
        (self.out / f"{self.name}.json").write_text(
            json.dumps(about | {"seed": self.seed, "lengths": content}, indent=1) + "\n", encoding="utf-8"
        )
        text = "\n".join(report.table(lines, titles[tokens]).for_document() for tokens, lines in rows.items())
        (self.out / f"{self.name}.md").write_text(text, encoding="utf-8")
        try:
            self.draw(made, found, rows)
        except ImportError as error:
            console.print(f"no plots: {error}", highlight=False, markup=False)

    @abc.abstractmethod
    def draw(
        self, made: "dict[int, list[Context]]", found: "dict[int, dict[str, Found]]", rows: "dict[int, list[Row]]"
    ) -> None:
        """Writes plots into ``out``.

        Raises:
          ImportError: matplotlib is not installed.
        """


@dataclasses.dataclass(frozen=True)
class TaskEvaluation(Evaluation):
    """Questions of a task.

    Attributes:
      cases: how many questions.
      question: `sparse`: decoded by the method, token by token, as Quest's own evaluation does; `dense`: read densely,
        which flatters any method; or `both`.
      data: files of a task that reads some.
    """

    cases: int = 20
    question: Question = "sparse"
    data: pathlib.Path | None = None

    @property
    def modes(self) -> tuple[Any, ...]:
        """Where prompts are measured the question is part of the prompt."""
        if self.prefill:
            return ("dense",)
        return ("sparse", "dense") if self.question == "both" else (self.question,)

    @property
    def settings(self) -> dict[str, Any]:
        """The number of questions, which may decide what they are."""
        return {"cases": self.cases, "data": None if self.data is None else str(self.data)}

    def contexts(self, tokenizer: "Tokenizer", tokens: int) -> "list[Context]":
        """The questions of the task, by what they are about."""
        from quest_jax.evals.contexts import gather

        return gather(tokenizer, TASKS[self.name].make(tokenizer, tokens, self.cases, self.seed, self.data))

    def draw(self, made, found, rows) -> None:
        """What is kept of dense attention's answers against bytes; of several lengths a map with the depths."""
        from quest_jax.evals import plots, report

        assert self.out is not None
        asked = {"sparse": "question decoded by the method", "dense": "question in the prompt"}
        for tokens, lines in rows.items():
            for mode in self.modes:
                if curves := report.curves(lines, "kept", mode):
                    path = self.out / f"{self.name}-{tokens}-{mode}.png"
                    title = f"{self.name}, {tokens} tokens, {asked[mode]}"
                    plots.against_bytes(curves, path, ylabel="share of dense attention's answers", title=title)
        for name in set.intersection(*(set(one) for one in found.values())):
            of_lengths = {tokens: (made[tokens], one[name]) for tokens, one in found.items()}
            values = report.by_depth(of_lengths, self.modes[0])
            if len(found) > 1 and values:
                path = self.out / f"{self.name}-depth-{name.replace(' ', '-')}.png"
                plots.heat_map(values, path, title=f"{self.name}, {name}")


@dataclasses.dataclass(frozen=True)
class Perplexity(Evaluation):
    """Measure how well a model predicts a text, teacher forced, when a method decodes it token by token.

    With the differences to dense attention: of the negative log-likelihood, of the next-token distributions (KL), and
    how often the likeliest token is the same. Without --start the method reads from the first token on, which is
    Quest's protocol.

    Attributes:
      text: a file; None is the shipped text, Moby-Dick.
      start: tokens that are read as a prompt is, before the method begins.
      texts: pieces of the file, one after the other.
    """

    text: pathlib.Path | None = None
    start: int = 1
    texts: int = 1

    name: ClassVar[str] = "perplexity"

    @property
    def modes(self) -> tuple[Any, ...]:
        """Text alone."""
        return ("text",)

    @property
    def settings(self) -> dict[str, Any]:
        """Which text, and from where."""
        return {"text": None if self.text is None else str(self.text), "start": self.start}

    def contexts(self, tokenizer: "Tokenizer", tokens: int) -> "list[Context]":
        """Pieces of the text."""
        from quest_jax.evals.contexts import pieces
        from quest_jax.evals.needle import shipped_text

        text = shipped_text() if self.text is None else self.text.read_text(encoding="utf-8")
        return pieces(tokenizer, text, tokens, self.texts, self.start)

    def draw(self, made, found, rows) -> None:
        """What the text loses against bytes."""
        from quest_jax.evals import plots, report

        del made, found
        assert self.out is not None
        for tokens, lines in rows.items():
            path = self.out / f"{self.name}-{tokens}.png"
            title = f"{self.name}, {tokens} tokens"
            plots.against_bytes(report.curves(lines, "kl"), path, ylabel="KL to dense attention, nats", title=title)


def _of(name: str) -> type[TaskEvaluation]:
    """The command of a task."""
    task = TASKS[name]
    reads = f" Reads {task.reads}, --data." if task.reads else ""
    says = f"Measure what methods keep of dense attention's answers: {task.about}.{reads} Source: {task.source}."
    return type(name.title().replace("_", ""), (TaskEvaluation,), {"__doc__": says, "name": name})


COMMANDS: dict[str, type[Evaluation]] = {
    **{name.replace("_", "-"): _of(name) for name in TASKS}, "perplexity": Perplexity,
}  # fmt: skip
