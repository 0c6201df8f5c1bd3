"""What methods keep of dense attention's answers and predictions, on contexts that all of them share.

A context is read densely. Then a method decodes: its questions and their answers, token by token (``sparse``, the
strict way, and Quest's own); answers alone, the question having been read densely (``dense``); and the text that goes
on after it, teacher forced (``text``). Or a method reads the context, and the question of ``dense``; all else is dense.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from quest_jax import DecodeState, Dense, Params, Policy, replace_policy
from quest_jax.evals import metrics
from quest_jax.evals.ask import ask, follow, forget_programs, predict
from quest_jax.evals.contexts import Context, groups, prefilled, read_on
from quest_jax.evals.samples import Decoder
from quest_jax.evals.store import Store, source

Mode = Literal["sparse", "dense", "text"]
MODES: tuple[Mode, ...] = ("sparse", "dense", "text")
_WIDTH = 32
# Policies that are done one after the other before the next: an interruption loses what one of these groups found.
_TOGETHER = 4


class Found(NamedTuple):
    """What one method did, in the order of the contexts and their questions.

    Attributes:
      scores: of every answer, by mode (``sparse``, ``dense``).
      answers: the decoded texts.
      nll, kl, agree: per context and token of the following text: see :class:`~quest_jax.evals.ask.Followed`.
      read, dense: bytes of all decode steps, by mode: read by the method, and what dense attention reads. Where methods
        read prompts, those of the contexts' chunks, ``prompt``, and dense attention's in the same chunks.
      seconds: wall time, compiling included.
    """

    scores: dict[str, list[float]]
    answers: dict[str, list[str]]
    nll: list[list[float]]
    kl: list[list[float]]
    agree: list[list[float]]
    read: dict[str, int]
    dense: dict[str, int]
    seconds: float

    @property
    def share(self) -> float:
        """Bytes read, of keys, values and metadata, over those of dense attention, all modes together."""
        return sum(self.read.values()) / max(1, sum(self.dense.values()))


def run(
    params: Params,
    tokenizer: Decoder,
    contexts: Sequence[Context],
    policies: Mapping[str, Policy],
    *,
    modes: Sequence[Mode] = ("sparse",),
    batch: int = 4,
    page_size: int = 16,
    prefills: bool = False,
    store: Store | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Found]:
    """Measures every policy on every context.

    Args:
      params, tokenizer: of the model.
      contexts: of :func:`quest_jax.evals.contexts.gather`.
      policies: by name.
      modes: what is decoded; ``text`` needs contexts with a following text of two tokens or more.
      batch: contexts in memory at a time; their cache exists up to three times.
      page_size: tokens of a page.
      prefills: measure the policies in reading prompts instead of in decoding.
      store: keeps the results of every policy and batch, and has those of earlier runs, which are not measured again.
      settings: that tell these results from others in the store.
      progress: called with (policies and batches done, all).

    Raises:
      ValueError: no contexts, policies or modes, a batch below 1, or no text to follow.
    """
    if not contexts or not policies or not modes or batch < 1:
        raise ValueError(
            "eval: expected contexts, methods, modes and a batch of at least 1, got "
            f"{len(contexts)}, {len(policies)}, {len(modes)} and {batch}."
        )
    if not {*modes} <= {*MODES}:
        raise ValueError(f"eval: expected modes of {', '.join(MODES)}, got {', '.join(modes)}.")
    if "text" in modes and min(len(one.following) for one in contexts) < 2:
        raise ValueError("eval: expected at least 2 tokens of text after every context to follow, got fewer.")
    for policy in policies.values():
        policy.check(page_size)
    rows = min(batch, len(contexts))
    starts = range(0, len(contexts), rows)
    cells: dict[tuple[str, int], dict[str, Any]] = {}

    def key(name: str, start: int) -> dict[str, Any]:
        own = {"method": name, "source": source(type(policies[name]))}
        own |= {"page_size": page_size, "modes": list(modes), "prefills": prefills}
        return own | {"contexts": [start, min(start + rows, len(contexts))]} | dict(settings or {})

    for start in starts:
        missing = []
        for name in policies:
            found = None if store is None else store.get(key(name, start))
            if found is None:
                missing.append(name)
                continue
            try:
                _check_cell(found, contexts[start : start + rows], modes, prefills)
            except (KeyError, TypeError, ValueError) as error:
                assert store is not None
                raise store.damaged(key(name, start), error) from error
            cells[name, start] = found
        part = contexts[start : start + rows]
        todo = {name: policies[name] for name in missing}
        for name, cell in _measure(params, tokenizer, part, rows, todo, modes, page_size, prefills):
            cells[name, start] = cell
            if store is not None:
                store.put(key(name, start), cell)
            if progress is not None:
                progress(len(cells), len(policies) * len(starts))
    found = {name: _joined([cells[name, start] for start in starts], prefills) for name in policies}
    if "full" in found and not prefills:
        # The same steps for all: whole pages, where a method that lists tokens counts dense attention by those.
        found = {name: one._replace(dense=found["full"].dense) for name, one in found.items()}
    return found


def _measure(
    params, tokenizer, part, rows, policies, modes, page_size, prefills
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the cell of every policy for one batch of contexts."""
    if not policies:
        return
    # Contexts repeated to fill the last batch cost less than compiling for another size.
    filled = [*part, *[part[-1]] * (rows - len(part))]
    most = max(one.longest for one in filled)
    sizes = dict(capacity=max(len(one.ids) for one in filled) + most + _WIDTH, page_size=page_size)
    plain, reference = None, None
    if "text" in modes:
        plain, _ = prefilled(params, filled, Dense(), **sizes)
        reference = predict(params, plain, [one.following for one in filled], room=-(-most // _WIDTH) * _WIDTH)
    for names in [[name] for name in policies] if prefills else groups(policies):
        first = policies[names[0]]
        if plain is None or prefills or first.keeps_more:
            plain = None  # before the next: a cache of several long contexts is large
            state, prompt = prefilled(params, filled, first, prefills=prefills, **sizes)
        else:
            state, prompt = plain, None
        for at in range(0, len(names), _TOGETHER):
            together = {name: policies[name] for name in names[at : at + _TOGETHER]}
            states = {
                name: state if prefills else replace_policy(state, policy=policy) for name, policy in together.items()
            }
            cells = _of_group(params, tokenizer, part, filled, state, states, modes, reference)
            if prefills and prompt is not None:
                for cell in cells.values():
                    _count(cell.setdefault("prompt", {}), prompt, len(part))
            yield from cells.items()
            forget_programs()
        del state


def _of_group(params, tokenizer, part, filled, state, states, modes, reference) -> dict[str, dict[str, Any]]:
    """The cells of states that differ in their policy only, of which ``state`` read the contexts."""
    cells: dict[str, dict[str, Any]] = {name: {"seconds": 0.0} for name in states}
    real = [one.asked for one in part]

    def measure(mode: str, extended: DecodeState, questions, at: int):
        for name, own in states.items():
            if extended is not state:
                own = replace_policy(extended, policy=own.attention.policy)
            begin = time.perf_counter()
            found = ask(params, own, questions, n_new, reference=reference)
            cell = cells[name].setdefault(mode, {"answers": [[] for _ in part], "scores": [[] for _ in part]})
            for row, asked in enumerate(real):
                if at < len(asked):
                    text = _text(params, tokenizer, found.tokens[row], asked[at].sample.n_new)
                    cell["answers"][row].append(text)
                    cell["scores"][row].append(metrics.score(asked[at].sample.metric, text, asked[at].sample.answers))
            _add(cells[name], cell, found.stats, len(part), begin)

    n_new = max([one.sample.n_new for context in filled for one in context.asked], default=1)
    turns = max(len(context.asked) for context in filled)
    for at in range(turns):
        questions = [context.asked[min(at, len(context.asked) - 1)].ids for context in filled]
        if "sparse" in modes:
            measure("sparse", state, questions, at)
        if "dense" in modes:
            read = [question[:-1] for question in questions]
            extended = read_on(params, state, read) if all(read) else state
            measure("dense", extended, [question[-1:] for question in questions], at)
    if "text" in modes:
        for name, own in states.items():
            begin = time.perf_counter()
            found = follow(params, own, [one.following for one in filled], reference)
            cell = cells[name]["text"] = {
                label: [values[: len(one.following) - 1].tolist() for values, one in zip(by_row.T, part, strict=False)]
                for label, by_row in (("nll", found.nll), ("kl", found.kl), ("agree", found.agree))
            }
            _add(cells[name], cell, found.stats, len(part), begin)
    return {name: cell | {"seconds": round(cell["seconds"], 2)} for name, cell in cells.items()}


def _add(cell, part, stats, n_rows, begin):
    _count(part, stats, n_rows)
    cell["seconds"] += time.perf_counter() - begin


def _count(part, stats, n_rows):
    part["read"] = part.get("read", 0) + int(stats.bytes_read()[..., :n_rows].sum())
    part["dense"] = part.get("dense", 0) + int(stats.bytes_dense()[..., :n_rows].sum())


def _check_cell(cell, part, modes, prefills) -> None:
    """Raises KeyError, TypeError or ValueError where a kept result is not one of these contexts."""
    for mode in modes:
        one = cell[mode]
        if mode == "text":
            counts = [max(0, len(context.following) - 1) for context in part]
            lists = [one[label] for label in ("nll", "kl", "agree")]
        else:
            counts = [len(context.asked) for context in part]
            lists = [one["scores"]]
            if [len(answers) for answers in one["answers"]] != counts:
                raise ValueError(f"expected {counts} answers")
        for rows in lists:
            if [len(row) for row in rows] != counts or not np.isfinite(np.asarray(sum(rows, []), np.float64)).all():
                raise ValueError(f"expected {counts} numbers of {mode}")
    for part_of in ("prompt",) if prefills else modes:
        if not all(isinstance(cell[part_of][name], int) for name in ("read", "dense")):
            raise TypeError("expected bytes as integers")
    float(cell["seconds"])


def _text(params, tokenizer, tokens, n_new) -> str:
    """The answer, up to the model's end of text."""
    ids = tokens[:n_new].tolist()
    ends = [i for i, token in enumerate(ids) if token in params.config.eos_token_ids]
    return tokenizer.decode(ids[: ends[0]] if ends else ids)


def _joined(cells: Sequence[Mapping[str, Any]], prefills: bool) -> Found:
    asked = [mode for mode in ("sparse", "dense") if mode in cells[0]]

    def flat(mode, field):
        return [value for cell in cells for row in cell[mode][field] for value in row]

    def rows(field):
        return [row for cell in cells if "text" in cell for row in cell["text"][field]]

    def total(field):
        parts = ("prompt",) if prefills else [mode for mode in MODES if mode in cells[0]]
        return {part: sum(cell[part][field] for cell in cells) for part in parts}

    return Found(
        {mode: flat(mode, "scores") for mode in asked}, {mode: flat(mode, "answers") for mode in asked},
        rows("nll"), rows("kl"), rows("agree"), total("read"), total("dense"),
        sum(cell["seconds"] for cell in cells),
    )  # fmt: skip
