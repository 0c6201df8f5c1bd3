"""Timing on a noisy machine: all candidates in one process, in rounds; medians, quartiles and processor time."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Threads of other libraries spin for a while after their work, and large temporaries are given back after it: what does
# that comes last in a round, and then there is a pause.
_REST_SECONDS = 0.005

# More than a processor's last cache: a layer of a model finds there what the layers before it read, not its own pages.
_COLD_BYTES = 1 << 26


class Timing(NamedTuple):
    """What the runs of one candidate took, in seconds.

    Attributes:
      median, low, high: wall time, with its quartiles.
      cpu: median processor time of the process, all threads together.
      compile: what the first run took beyond the median, None where it was not among those timed here.
    """

    median: float
    low: float
    high: float
    cpu: float
    compile: float | None


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = False
) -> dict[str, Timing]:
    """Runs every candidate once per round, after one run to compile and warm up.

    Args:
      candidates: name to a call whose result is waited for.
      rounds: runs of each, at least 1.
      warm: they are compiled already; the first run would take minutes.

    Every run starts with caches full of something else.

    Returns:
      the timing of each. Only ratios within one result mean anything. ``compile`` leaves out what an earlier call of
      the process has compiled.
    """
    first = {} if warm else {name: timed(call)[0] for name, call in candidates.items()}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    flush, block = jax.jit(jnp.sum), jnp.ones(_COLD_BYTES // 4)
    for _ in range(rounds):
        time.sleep(_REST_SECONDS)
        for name, call in candidates.items():
            flush(block).block_until_ready()
            runs[name].append(timed(call))
    return {name: _summary(measured, first.get(name)) for name, measured in runs.items()}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns wall and processor time of one run, in seconds; its result is waited for."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def _summary(runs: list[tuple[float, float]], first: float | None) -> Timing:
    walls, cpus = zip(*runs, strict=True)
    median = statistics.median(walls)
    low, _, high = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else (median,) * 3
    return Timing(median, low, high, statistics.median(cpus), None if first is None else max(0.0, first - median))
