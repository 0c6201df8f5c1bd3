"""Timing on a noisy machine: all candidates in one process, in rounds, medians."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = False
) -> dict[str, float]:
    """Runs every candidate once per round, after one run to compile and warm up.

    Args:
      candidates: name to a call whose result is waited for.
      rounds: runs of each.
      warm: they are compiled already; the first run would take minutes.

    Returns:
      median wall time of each, in seconds. Only ratios within one result mean anything.
    """
    for call in () if warm else candidates.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(measured) for name, measured in times.items()}
