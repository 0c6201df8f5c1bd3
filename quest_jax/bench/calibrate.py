"""The three constants of :class:`~quest_jax.policies.cost.CostModel`, from the times of one layer on this machine."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from quest_jax.bench.decode import paged_calls
from quest_jax.bench.sizes import SHAPES, Shape, dense_bytes, metadata_bytes
from quest_jax.bench.timing import time_interleaved
from quest_jax.policies.base import Dense, Policy
from quest_jax.policies.cost import CostModel
from quest_jax.policies.quest import Quest


class Measured(NamedTuple):
    """One layer's decode attention, float32, batch 1.

    Attributes:
      shape: of the layer, a name in ``SHAPES``.
      length: tokens in the cache.
      budget: tokens that Quest reads; None is dense.
      seconds: median.
    """

    shape: str
    length: int
    budget: int | None
    seconds: float


def measure(
    lengths: Sequence[int], budgets: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> list[Measured]:
    """Times dense attention and Quest at every length, in interleaved runs."""
    found = []
    for name, shape in SHAPES.items():
        for length in lengths:
            progress(f"{name}, {length} tokens")
            policies: dict[int | None, Policy] = {None: Dense()}
            policies |= {budget: Quest(budget, dense_layers=0) for budget in budgets if budget < length}
            calls = paged_calls(shape, length, "float32", {str(budget): one for budget, one in policies.items()})
            timings = time_interleaved(calls, rounds)
            found += [Measured(name, length, budget, timings[str(budget)].median) for budget in policies]
    return found


def fit(measured: Sequence[Measured]) -> tuple[CostModel, float]:
    """Finds the constants whose relative errors are least, in the sense of least squares.

    Returns:
      the model, and the seconds that every call takes however little it reads: they decide nothing.
    """
    rows = []
    for one in measured:
        per_token, metadata = _bytes(SHAPES[one.shape])
        if one.budget is None:
            row = (one.length * per_token, 0.0, 0.0, 1.0)
        else:
            row = (one.length * metadata, one.budget * per_token, 1.0, 1.0)
        rows.append(np.array(row) / one.seconds)
    matrix = np.array(rows)
    scale = np.abs(matrix).max(axis=0)  # bytes and a count: as different as they are, they would drown each other
    found = np.linalg.lstsq(matrix / scale, np.ones(len(rows)), rcond=None)[0] / scale
    *constants, base = (float(max(value, 0.0)) for value in found)
    return CostModel(*constants), base


def table(measured: Sequence[Measured], model: CostModel, base: float) -> Table:
    """Lays out what was measured beside what the model says, and where it would change from dense to Quest."""
    shown = Table(title="seconds of a layer, batch 1, float32", title_justify="left")
    for column in ("shape", "length", "budget", "measured", "model", "break-even"):
        shown.add_column(column, justify="left" if column == "shape" else "right")
    for one in measured:
        per_token, metadata = _bytes(SHAPES[one.shape])
        if one.budget is None:
            budget, says, turn = "dense", model.dense(one.length, per_token), ""
        else:
            budget, turn = f"{one.budget}", f"{model.break_even(per_token, metadata, one.budget)}"
            says = model.selected(one.length, per_token, metadata, one.budget)
        shown.add_row(
            one.shape, f"{one.length}", budget, f"{one.seconds * 1e3:.2f} ms", f"{(base + says) * 1e3:.2f} ms", turn
        )
    return shown


def _bytes(shape: Shape) -> tuple[float, float]:
    """Bytes of keys and values, and of metadata, for each token, float32."""
    page = 16
    return dense_bytes(shape, page, "float32") / page, metadata_bytes(shape, page) / page
