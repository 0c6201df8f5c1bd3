"""How sure a mean is: the bootstrap, over questions or over the texts that they share."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
_DRAWS = 2000


class Interval(NamedTuple):
    """A mean and the range that 95 % of the means of resampled values lie in."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def share(scores: Sequence[float]) -> Interval:
    """Returns the mean of scores from 0 to 1 and its interval.

    The bootstrap's; where all are alike, of which resampling makes nothing, as many cases have this score as the exact
    lower limit of a binomial share says (Clopper and Pearson 1934), and the others may have any.
    """
    found = bootstrap(scores)
    if min(scores) < max(scores):
        return found
    alike = ((1 - LEVEL) / 2) ** (1 / len(scores))
    return Interval(found.mean, found.mean * alike, 1 - (1 - found.mean) * alike)


def bootstrap(values: Sequence[float], groups: Sequence[int] | None = None, *, seed: int = 0) -> Interval:
    """Returns the mean of ``values`` and its percentile interval (Efron 1979).

    Args:
      values: one a question.
      groups: what text each belongs to; then texts are drawn with all their values, since questions of one text are
        not independent. None draws values.
      seed: of the draws.

    Raises:
      ValueError: no values, or not a group for each.
    """
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"bootstrap: expected at least one value, got an array of shape {found.shape}.")
    of = np.arange(len(found)) if groups is None else np.asarray(groups)
    if of.shape != found.shape:
        raise ValueError(f"bootstrap: expected a group for each of {len(found)} values, got {of.shape}.")
    _, index = np.unique(of, return_inverse=True)
    sums, counts = np.bincount(index, found), np.bincount(index)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(_DRAWS, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(found.mean()), float(low), float(high))
