"""``quest-jax eval`` of a task: questions about long contexts, answered by every method."""

import abc
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from quest_jax import __version__
from quest_jax.cli.common import Dtype, identity, load_both, read_text
from quest_jax.cli.methods_of import DEFAULT, policies_for
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
      methods: names of `quest-jax methods`, or `all`; `quest`, or `quoka` with --prefill, if none. `full`, `random`,
        `sink_window` and `oracle` are there always.
      budgets: tokens that a method reads per layer and KV head; a half and a quarter of the prompt if none.
      prefill: measure the methods in reading prompts, and count the bytes of that; decoding is dense then.
      tokens: lengths of the prompts.
      batch: contexts in memory at a time.
      seed: of what is asked, and where it stands.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      basis: of `quest-jax calibrate loki`, for `loki`; without it that ranks by the basis of the text itself.
      out: folder for the results, as JSON, Markdown and plots. A run that was interrupted goes on from what is in it;
        the summary is of the last command.
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
        from quest_jax.inputs import as_seeds, as_size
        from quest_jax.progress import stderr_console

        if not self.tokens:
            raise ValueError("--tokens: expected at least one length, got none.")
        as_size("--batch", self.batch)
        for tokens in self.tokens:
            as_size("--tokens", tokens)
        as_seeds(self.seed, 1)
        policies = {tokens: self._policies(tokens) for tokens in self.tokens}
        store = None if self.out is None else Store(self.out / "cells")
        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        made = {tokens: self.contexts(tokenizer, tokens) for tokens in self.tokens}
        found = {}
        for tokens, contexts in made.items():
            found[tokens] = self._measure(params, tokenizer, contexts, policies[tokens], store, tokens, console)
            self._show(tokens, found[tokens])
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
        if not self.budgets and tokens < 4 * self.page_size:
            raise ValueError(
                f"--tokens: expected at least {4 * self.page_size}, four pages, where --budgets names none: "
                f"the smaller one is a quarter; got {tokens}; raise it, or name --budgets."
            )
        return policies_for(self.methods or (DEFAULT[phase],), budgets, self.page_size, self.basis, phase)

    def _measure(self, params, tokenizer, contexts, policies, store, tokens, console) -> "dict[str, Found]":
        from quest_jax.evals import retention
        from quest_jax.progress import counting

        about = {"task": self.name, "model": identity(self.model), "dtype": self.dtype, "tokens": tokens}
        about |= {"seed": self.seed, "version": __version__}
        basis = None if self.basis is None else identity(self.basis)
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

    def _title(self, tokens: int, found: "dict[str, Found]") -> str:
        from quest_jax.evals import report

        by = ", prompts read by the method" if self.prefill else ""
        return (
            f"{self.name}, {tokens} tokens{by}; {report.counts(found)}; {self.model}, {self.dtype}, pages of "
            f"{self.page_size}; seed {self.seed}, 95 % intervals"
        )

    def _show(self, tokens, found) -> None:
        from rich.console import Console

        from quest_jax.evals import report

        Console().print(report.table(report.rows(found), self._title(tokens, found)).for_terminal())

    def _write(self, made, found, console: "Console") -> None:
        from quest_jax.evals import report

        assert self.out is not None
        rows = {tokens: report.rows(one) for tokens, one in found.items()}
        titles = {tokens: self._title(tokens, one) for tokens, one in found.items()}
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
            missing = self.draw(made, found, rows)
        except ImportError as error:
            missing = str(error)
        if missing:
            console.print(f"no plots: {missing}", highlight=False, markup=False)

    @abc.abstractmethod
    def draw(
        self, made: "dict[int, list[Context]]", found: "dict[int, dict[str, Found]]", rows: "dict[int, list[Row]]"
    ) -> str | None:
        """Writes plots into ``out``; returns why there is none, or None.

        Raises:
          ImportError: matplotlib is not installed.
        """


@dataclasses.dataclass(frozen=True)
class TaskEvaluation(Evaluation):
    """Questions of a task.

    Attributes:
      cases: how many questions; of a file, as many of them as it has.
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
        return {"cases": self.cases, "data": None if self.data is None else identity(self.data)}

    def contexts(self, tokenizer: "Tokenizer", tokens: int) -> "list[Context]":
        """The questions of the task, by what they are about."""
        from quest_jax.evals.contexts import gather

        return gather(tokenizer, TASKS[self.name].make(tokenizer, tokens, self.cases, self.seed, self.data))

    def draw(self, made, found, rows) -> str | None:
        """What is kept of dense attention's answers against bytes; of several lengths a map with the depths."""
        from quest_jax.evals import plots, report

        assert self.out is not None
        asked = {"sparse": "question decoded by the method", "dense": "question in the prompt"}
        drawn = False
        for tokens, lines in rows.items():
            for mode in self.modes:
                if curves := report.curves(lines, "kept", mode):
                    path = self.out / f"{self.name}-{tokens}-{mode}.png"
                    title = f"{self.name}, {tokens} tokens, {asked[mode]}"
                    plots.against_bytes(curves, path, ylabel="share of dense attention's answers", title=title)
                    drawn = True
        for name in set.intersection(*(set(one) for one in found.values())):
            of_lengths = {tokens: (made[tokens], one[name]) for tokens, one in found.items()}
            values = report.by_depth(of_lengths, self.modes[0])
            if len(found) > 1 and values:
                path = self.out / f"{self.name}-depth-{name.replace(' ', '-')}.png"
                plots.heat_map(values, path, title=f"{self.name}, {name}")
        return None if drawn else "dense attention answers none of the questions"


@dataclasses.dataclass(frozen=True)
class Perplexity(Evaluation):
    """Measure how well a model predicts a text, teacher forced, when a method decodes it token by token.

    With the differences to dense attention: of the negative log-likelihood, of the next-token distributions (KL), and
    how often the likeliest token is the same. Without --start the method reads from the first token on, which is
    Quest's protocol.

    Attributes:
      text: a file; None is the shipped text, Moby-Dick.
      start: tokens that are read as a prompt is: densely before the method begins, or with --prefill by the method. 1,
        or with --prefill half of the text, if none.
      texts: pieces of the file, one after the other.
    """

    text: pathlib.Path | None = None
    start: int | None = None
    texts: int = 1

    name: ClassVar[str] = "perplexity"

    @property
    def modes(self) -> tuple[Any, ...]:
        """Text alone."""
        return ("text",)

    @property
    def settings(self) -> dict[str, Any]:
        """Which text, and from where."""
        return {"text": None if self.text is None else identity(self.text), "start": self.start}

    def _policies(self, tokens: int) -> "dict[str, Policy]":
        found, start = super()._policies(tokens), self._start(tokens)
        chunk = max(getattr(policy, "chunk", 0) or 0 for policy in found.values())
        if self.prefill and start <= chunk:
            raise ValueError(
                f"--start: expected more than a chunk of {chunk} tokens, which any method reads whole, got {start}; "
                "raise --start, or --tokens."
            )
        return found

    def _start(self, tokens: int) -> int:
        return self.start if self.start is not None else tokens // 2 if self.prefill else 1

    def contexts(self, tokenizer: "Tokenizer", tokens: int) -> "list[Context]":
        """Pieces of the text."""
        from quest_jax.evals.contexts import pieces
        from quest_jax.evals.needle import shipped_text

        text = shipped_text() if self.text is None else read_text("--text", self.text)
        return pieces(tokenizer, text, tokens, self.texts, self._start(tokens))

    def draw(self, made, found, rows) -> str | None:
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
