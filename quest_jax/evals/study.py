"""The study of ``docs/study.md``: every method at every budget on one model, kept piece by piece so that it resumes.

Its parts share a :class:`~quest_jax.evals.store.Store`; :mod:`quest_jax.evals.study_report` lays them out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quest_jax import Params, Policy, Quest
from quest_jax.evals import fidelity_cells, retention
from quest_jax.evals.contexts import Context, gather, pieces
from quest_jax.evals.fidelity import Fidelity
from quest_jax.evals.needle import shipped_text, split_sentences
from quest_jax.evals.retention import Found
from quest_jax.evals.samples import Encoder
from quest_jax.evals.store import Store
from quest_jax.evals.tasks import facts
from quest_jax.evals.tasks import registry as tasks
from quest_jax.policies import registry
from quest_jax.tokenizer import Tokenizer

# Those that are compared where comparing all would take too long: the default, the paper's ranking, and the rows that
# any table needs.
FEW = ("full", "quest", "quest_box", "quest_per_head", "oracle_pages", "oracle", "sink_window", "random", "h2o")
# How a group shares a list: compared once more on other contexts, since of many comparisons some stand out by chance.
REDUCTIONS = ("quest", "quest_mean", "quest_round_robin", "quest_sum_softmax")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
      tokens: of a context.
      contexts: texts of six facts each.
      following: tokens of the text after a context that are predicted.
      budgets: tokens that a method reads.
      page_sizes: of Quest, besides 16.
      queries: tokens at the end of a text whose attention is looked at, in ``fidelity_texts`` texts.
      long_tokens, long_contexts: contexts near the model's longest.
      lengths, depths: of the map of passkeys, at ``map_budget``.
      from_start: tokens of the texts that are read from their first token on by the method, at the first budget.
      seed: of the facts; the next one is that of ``again``.
      methods: names; all if none.
    """

    tokens: int = 4096
    contexts: int = 4
    following: int = 65
    budgets: tuple[int, ...] = (256, 512, 1024, 2048)
    page_sizes: tuple[int, ...] = (4, 8, 32)
    queries: int = 32
    fidelity_texts: int = 2
    long_tokens: int = 8000
    long_contexts: int = 3
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8000)
    depths: int = 10
    map_budget: int = 512
    from_start: int = 1024
    seed: int = 0
    methods: tuple[str, ...] = ()


# To see that all of it runs; its numbers say nothing.
SMALL = Sizes(
    tokens=2000, contexts=1, following=8, budgets=(64,), page_sizes=(8,), queries=4, fidelity_texts=1,
    long_tokens=2100, long_contexts=1, lengths=(900,), depths=1, map_budget=64, from_start=100,
    methods=("quest", "quest_mean", "quoka"),
)  # fmt: skip


@dataclasses.dataclass
class Study:
    """What was found, by part; the names in each are ``method budget``.

    Attributes:
      sizes: of the study.
      attention: by page size, then name, a :class:`~quest_jax.evals.fidelity.Fidelity` for each text.
      kept: by part, then name: ``decode``, ``prefill``, ``page 4`` and so on, ``long``, ``map 1024`` and so on,
        ``from-start``, ``again``.
      contexts: of each part.
    """

    sizes: Sizes
    attention: dict[int, dict[str, list[Fidelity]]] = dataclasses.field(default_factory=dict)
    kept: dict[str, dict[str, Found]] = dataclasses.field(default_factory=dict)
    contexts: dict[str, list[Context]] = dataclasses.field(default_factory=dict)


PARTS = ("decode", "again", "fidelity", "pages", "prefill", "long", "map", "from-start")


def check_parts(parts: Sequence[str]) -> None:
    """Raises ValueError where there is no such part."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"study: expected parts of {', '.join(PARTS)}, got {unknown[0]!r}.")


def run(
    params: Params,
    tokenizer: Tokenizer,
    store: Store,
    sizes: Sizes,
    *,
    model: str,
    parts: Sequence[str] = PARTS,
    progress: Callable[[int, int], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> Study:
    """Measures what the store does not have yet.

    Args:
      params, tokenizer: of the model.
      store: of this study.
      sizes: how much.
      model: its name, which tells its results from others in the store.
      parts: of ``PARTS``, in this order.
      progress: called with (done, all) of what is being measured; begins anew with every step of a part.
      report: called with what is measured next.

    Raises:
      ValueError: an unknown part, or a text that is too short for the sizes.
    """
    check_parts(parts)
    study = Study(sizes)
    contexts = facts_contexts(tokenizer, sizes.tokens, sizes.contexts, sizes.following, sizes.seed)
    names = sizes.methods or tuple(registry.methods())
    every = policies("decode", sizes.budgets, names)
    few = policies("decode", sizes.budgets, [name for name in FEW if name in names])
    quests = {f"quest {budget}": Quest(budget) for budget in sizes.budgets}
    about = {"model": model, "seed": sizes.seed, "task": "facts", "tokens": sizes.tokens}

    def keep(part: str, contexts: Sequence[Context], found: Mapping[str, Policy], **options: Any) -> None:
        if report is not None:
            report(part)
        options = {"modes": retention.MODES, "settings": about} | options
        batch = min(len(contexts), 6)
        study.contexts[part] = [*contexts]
        study.kept[part] = retention.run(
            params, tokenizer, contexts, found, batch=batch, store=store, progress=progress, **options
        )

    for part in parts:
        if part == "fidelity":
            for size in (16, *sizes.page_sizes):
                measured = every if size == 16 else {"full": every["full"]} | quests
                study.attention[size] = {name: [] for name in measured}
                for number, context in enumerate(contexts[: sizes.fidelity_texts]):
                    if report is not None:
                        report(f"fidelity, pages of {size}, text {number + 1}")
                    # Its end, and the question for its first fact.
                    asked = context.asked[0]
                    found = fidelity_cells.measure(
                        params, [*context.ids, *asked.ids], measured, store=store, settings=about | {"text": number},
                        queries=sizes.queries, page_size=size, progress=progress,
                        needle=_needle(tokenizer, asked.sample.context, asked.sample.answers[0]),
                    )  # fmt: skip
                    for name, one in found.items():
                        study.attention[size][name].append(one)
        elif part == "decode":
            keep("decode", contexts, every)
        elif part == "again":
            seed = sizes.seed + 1
            others = facts_contexts(tokenizer, sizes.tokens, sizes.contexts, sizes.following, seed)
            found = policies("decode", sizes.budgets, [name for name in REDUCTIONS if name in names])
            keep("again", others, found, settings=about | {"seed": seed})
        elif part == "pages":
            for size in sizes.page_sizes:
                keep(f"page {size}", contexts, {"full": every["full"]} | quests, page_size=size)
        elif part == "prefill":
            keep("prefill", contexts, policies("prefill", sizes.budgets, names), modes=("dense", "text"), prefills=True)
        elif part == "long":
            settings = about | {"tokens": sizes.long_tokens}
            texts = facts_contexts(tokenizer, sizes.long_tokens, sizes.long_contexts, sizes.following, sizes.seed)
            keep("long", texts, few, settings=settings)
        elif part == "map":
            for length in sizes.lengths:
                asked = gather(tokenizer, tasks.find("passkey").make(tokenizer, length, sizes.depths, sizes.seed))
                settings = about | {"task": "passkey", "tokens": length}
                found = {"full": every["full"], f"quest {sizes.map_budget}": Quest(sizes.map_budget)}
                keep(f"map {length}", asked, found, modes=("sparse",), settings=settings)
        else:
            settings = about | {"task": "text", "tokens": sizes.from_start}
            texts = pieces(tokenizer, shipped_text(), sizes.from_start, 2)
            small = policies("decode", sizes.budgets[:1], [name for name in FEW if name in names])
            keep("from-start", texts, small, modes=("text",), settings=settings)
    return study


def policies(phase: str, budgets: Sequence[int], names: Sequence[str]) -> dict[str, Policy]:
    """The policies of methods at all budgets, ``full`` first, by ``method budget``."""
    found: dict[str, Policy] = {"full": registry.find("full").make(0)}
    for name, method in registry.methods().items():
        if phase in method.phases and name != "full" and name in names:
            found |= {f"{name} {budget}": method.make(budget) for budget in budgets}
    return found


def facts_contexts(tokenizer: Encoder, tokens: int, contexts: int, following: int, seed: int) -> list[Context]:
    """Contexts with facts in prose, and what the prose goes on with after each."""
    samples = tasks.find("facts").make(tokenizer, tokens, facts.FACTS * contexts, seed)
    prose = " ".join(split_sentences(shipped_text()))
    prose = f"{prose} {prose}"  # a context that reaches its end goes on at its beginning
    found = []
    for context in gather(tokenizer, samples):
        last = context.asked[0].sample.context[-200:]
        while last not in prose:  # a fact may stand in it
            last = last[20:]
        after = prose[prose.index(last) + len(last) :]
        ids = tokenizer.encode(after[: 20 * following], add_special_tokens=False)
        found.append(context._replace(following=tuple(ids[:following])))
    return found


def _needle(tokenizer: Encoder, text: str, answer: str) -> tuple[int, int]:
    """The tokens of a fact, from its sentence on to its answer, by position."""
    end = text.index(answer) + len(answer)
    start = text.rindex(". ", 0, end) + 2
    return len(tokenizer.encode(text[:start])), len(tokenizer.encode(text[:end]))
