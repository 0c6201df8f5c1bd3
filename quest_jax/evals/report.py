"""What :mod:`quest_jax.evals.retention` found, as rows with intervals: for a terminal, Markdown, JSON and plots."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quest_jax.evals.contexts import Context
from quest_jax.evals.interval import Interval, bootstrap, share
from quest_jax.evals.retention import Found
from quest_jax.tables import Table

# (bytes read over those of dense attention, value, lower end, upper end)
Points = list[tuple[float, float, float, float]]

# Neighbouring tokens are not independent: the bootstrap draws stretches of so many.
_STRETCH = 16


class Row(NamedTuple):
    """One method at one budget.

    Attributes:
      name: of the policy, as the run had it.
      share: bytes read over those of dense attention.
      read: bytes read, of all steps, layers and rows.
      right: mean score by mode, ``sparse`` and ``dense``.
      kept: of the questions that dense attention answers, the share answered here too, by mode; one that is answered
        better counts as 1. None where dense answers nothing.
      perplexity: of the text.
      gap: what the mean negative log-likelihood of the text is above that of dense attention, in nats.
      kl: divergence from dense attention's next-token distributions, in nats.
      agree: share of the tokens at which the likeliest is that of dense attention.
    """

    name: str
    share: float
    read: int
    right: dict[str, Interval]
    kept: dict[str, Interval | None]
    perplexity: float | None
    gap: Interval | None
    kl: Interval | None
    agree: Interval | None

    @property
    def method(self) -> str:
        """The name without the budget."""
        return self.name.rsplit(" ", 1)[0]


def rows(found: Mapping[str, Found], dense: str = "full") -> list[Row]:
    """Summarises every method, against the one named ``dense``."""
    return [_row(name, one, found[dense]) for name, one in found.items()]


def _row(name: str, one: Found, dense: Found) -> Row:
    right = {mode: share(scores) for mode, scores in one.scores.items()}
    kept = {mode: _kept(scores, dense.scores[mode], one is dense) for mode, scores in one.scores.items()}
    read = sum(one.read.values())
    if not one.nll:
        return Row(name, one.share, read, right, kept, None, None, None, None)
    at = [1000 * row + token // _STRETCH for row, values in enumerate(one.nll) for token in range(len(values))]
    gap = np.concatenate(one.nll) - np.concatenate(dense.nll)
    text = (bootstrap(np.asarray(values).tolist(), at) for values in (gap, sum(one.kl, []), sum(one.agree, [])))
    perplexity = float(np.exp(np.concatenate(one.nll).mean()))
    return Row(name, one.share, read, right, kept, perplexity, *text)


def _kept(scores: Sequence[float], dense: Sequence[float], itself: bool) -> Interval | None:
    values = [min(1.0, mine / theirs) for mine, theirs in zip(scores, dense, strict=True) if theirs > 0]
    if not values:
        return None
    return bootstrap(values) if itself else share(values)


def counts(found: Mapping[str, Found]) -> str:
    """How many questions and tokens the figures are of, and what dense attention answers."""
    dense, texts = found["full"], []
    for mode, scores in dense.scores.items():
        asked = "decoded by the method" if mode == "sparse" else "read in the prompt"
        texts.append(f"{len(scores)} questions {asked}, of which dense attention answers {sum(scores):.3g}")
    if dense.nll:
        texts.append(f"{sum(map(len, dense.nll))} tokens of text")
    return "; ".join(texts)


HEADINGS = {
    "sparse": ("right", "of dense's"), "dense": ("question dense: right", "of dense's"),
    "text": ("perplexity", "NLL gap", "KL", "same token"),
}  # fmt: skip


def cells(lines: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a list of texts for every row."""
    modes = [*lines[0].right]
    texts = lines[0].gap is not None
    headings = ["method, budget", "bytes of dense", "GB read"]
    headings += [heading for mode in modes for heading in HEADINGS[mode]] + [*HEADINGS["text"]] * texts
    found = []
    for line in lines:
        cell = [line.name, f"{line.share:.1%}", f"{line.read / 1e9:.3g}"]
        for mode in modes:
            cell += [_percent(line.right[mode]), _percent(line.kept[mode])]
        if texts:
            cell += ["-" if line.perplexity is None else f"{line.perplexity:.2f}"]
            cell += [_number(line.gap), _number(line.kl), _percent(line.agree)]
        found.append(cell)
    return headings, found


def _percent(one: Interval | None) -> str:
    return "-" if one is None else f"{one.mean:.0%} [{100 * one.low:.0f}, {100 * one.high:.0f}]"


def _number(one: Interval | None) -> str:
    return "-" if one is None else f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]"


def table(lines: Sequence[Row], title: str) -> Table:
    """All of it, under a title."""
    return Table(title, *cells(lines))


def as_json(found: Mapping[str, Found], lines: Sequence[Row]) -> list[dict[str, Any]]:
    """Every number, of all questions and tokens too."""
    return [
        {
            "name": line.name, "share": line.share, "read": line.read, "perplexity": line.perplexity,
            "right": _plain(line.right), "kept": _plain(line.kept),
            **{key: _plain(getattr(line, key)) for key in ("gap", "kl", "agree")},
            "found": {key: value for key, value in found[line.name]._asdict().items() if key != "answers"},
            "answers": found[line.name].answers,
        }
        for line in lines
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return value._asdict()
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def curves(lines: Sequence[Row], of: str, mode: str = "sparse") -> dict[str, Points]:
    """Points for :func:`quest_jax.evals.plots.against_bytes`: ``of`` ``right``, ``kept``, ``gap``, ``kl`` or ``agree``.

    Rows without this value are left out.
    """
    points: dict[str, Points] = {}
    for line in lines:
        value = getattr(line, of)
        value = value.get(mode) if isinstance(value, dict) else value
        if value is not None:
            points.setdefault(line.method, []).append((line.share, *value))
    return points


def by_depth(found: Mapping[int, tuple[Sequence[Context], Found]], mode: str) -> dict[tuple[float, int], float]:
    """Mean scores by depth and length, for :func:`quest_jax.evals.plots.heat_map`.

    Args:
      found: of one method, by length.
      mode: ``sparse`` or ``dense``.
    """
    values: dict[tuple[float, int], list[float]] = {}
    for length, (contexts, one) in found.items():
        depths = [asked.sample.depth for context in contexts for asked in context.asked]
        for depth, score in zip(depths, one.scores.get(mode, []), strict=True):
            if depth is not None:
                values.setdefault((round(depth, 2), length), []).append(score)
    return {at: float(np.mean(scores)) for at, scores in values.items()}
