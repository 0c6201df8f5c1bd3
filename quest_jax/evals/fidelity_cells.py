"""Figures of :mod:`quest_jax.evals.fidelity` kept method by method, so that an interrupted run goes on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quest_jax import Params, Policy
from quest_jax.evals import fidelity
from quest_jax.evals.capture import capture
from quest_jax.evals.fidelity import Fidelity
from quest_jax.evals.interval import Interval, bootstrap
from quest_jax.evals.report import Points
from quest_jax.evals.store import Store, source
from quest_jax.tables import Table

# Policies that are measured before any of them is kept; they share what is read of a layer.
_TOGETHER = 8
_ARRAYS = ("mass", "recall", "error")


def measure(
    params: Params,
    ids: Sequence[int],
    policies: Mapping[str, Policy],
    *,
    store: Store | None,
    settings: Mapping[str, Any],
    queries: int,
    page_size: int = 16,
    needle: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Fidelity]:
    """As :func:`quest_jax.evals.fidelity.run`, of what the store does not have.

    Args:
      params, ids, policies, queries, page_size, needle: of that.
      store: has the results of earlier runs, and keeps those of this one; None: neither.
      settings: that tell these results from others in the store.
      progress: called with (policies done, policies in all).
    """

    def key(name: str) -> dict[str, Any]:
        own = {"task": "fidelity", "method": name, "source": source(type(policies[name]))}
        return dict(settings) | own | {"page_size": page_size, "queries": queries}

    found: dict[str, Fidelity] = {}
    for name in policies:
        if store is not None and (cell := store.get(key(name))) is not None:
            try:
                found[name] = _read(cell)
            except (KeyError, TypeError, ValueError) as error:
                raise store.damaged(key(name), error) from error
    missing = [name for name in policies if name not in found]
    captured = capture(params, ids, page_size) if missing else None
    for at in range(0, len(missing), _TOGETHER):
        together = {name: policies[name] for name in missing[at : at + _TOGETHER]}
        measured = fidelity.run(
            params, ids, together, queries=queries, page_size=page_size, needle=needle, found=captured
        )
        for name, one in measured.items():
            cell = one._asdict() | {field: getattr(one, field).round(5).tolist() for field in _ARRAYS}
            found[name] = _read(cell)
            if store is not None:
                store.put(key(name), cell)
        if progress is not None:
            progress(len(found), len(policies))
    return {name: found[name] for name in policies}


def _read(cell: Mapping[str, Any]) -> Fidelity:
    fields: dict[str, Any] = dict(cell) | {field: np.asarray(cell[field], np.float64) for field in _ARRAYS}
    found = Fidelity(**fields)
    if any(getattr(found, field).shape != found.mass.shape or found.mass.ndim != 2 for field in _ARRAYS):
        raise ValueError("expected figures by layer and head")
    return found


def mean_of(texts: Sequence[Fidelity], field: str) -> float:
    """The mean of a figure over texts, layers and heads."""
    return float(np.mean([np.mean(getattr(one, field)) for one in texts]))


def _interval(texts: Sequence[Fidelity], field: str) -> Interval:
    """With what another draw of texts and layers may give; the heads of a layer stay together."""
    values = np.stack([getattr(one, field) for one in texts])  # [texts, layers, heads]
    at = np.broadcast_to(np.arange(values[..., 0].size).reshape(*values.shape[:2], 1), values.shape)
    return bootstrap(values.ravel().tolist(), at.ravel().tolist())


def table(found: Mapping[str, Sequence[Fidelity]], title: str) -> Table:
    """Lays methods out, each measured on some texts; intervals are of the bootstrap over texts and layers."""
    has_needle = next(iter(found.values()))[0].needle is not None
    headings = ["method, budget", "bytes of dense", "by a group at once", "mass", "recall of 10", "output error"]
    rows = [
        [
            name, f"{mean_of(texts, 'share'):.1%}", f"{mean_of(texts, 'union'):.1%}",
            *(str(_interval(texts, field)) for field in _ARRAYS),
            *([f"{mean_of(texts, 'needle'):.2f}"] if has_needle else []),
        ]
        for name, texts in found.items()
    ]  # fmt: skip
    return Table(title, [*headings, *(["needle read"] if has_needle else [])], rows)


def curves(found: Mapping[str, Sequence[Fidelity]], field: str) -> dict[str, Points]:
    """Points for :func:`quest_jax.evals.plots.against_bytes`, the interval being the quartiles over layers."""
    points: dict[str, Points] = {}
    for name, texts in found.items():
        values = _by_layer(texts, field)
        low, high = np.quantile(values, [0.25, 0.75])
        one = mean_of(texts, "share"), float(values.mean()), float(low), float(high)
        points.setdefault(name.rsplit(" ", 1)[0], []).append(one)
    return points


def by_layer(found: Mapping[str, Sequence[Fidelity]], field: str) -> dict[str, list[float]]:
    """A value a layer for :func:`quest_jax.evals.plots.by_layer`, means over texts and heads."""
    return {name: [float(value) for value in _by_layer(texts, field)] for name, texts in found.items()}


def _by_layer(texts: Sequence[Fidelity], field: str) -> np.ndarray:
    return np.mean([getattr(one, field).mean(axis=1) for one in texts], axis=0)
