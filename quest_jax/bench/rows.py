"""What a bench reports: rows that all have the same columns, in sections."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quest_jax.bench.timing import Timing


class Row(NamedTuple):
    """One measured line.

    Attributes:
      shape, length, dtype: of what was run; length in tokens of context.
      method, budget: how; budget None is dense.
      ms: median wall time, in milliseconds; ``ms_low`` and ``ms_high`` are the quartiles.
      cpu_ms: median processor time, all threads together.
      compile_s: what the first run took beyond the median, in seconds; None where it was not measured.
      ratio: the fastest dense method of the run over this, by median wall time.
      byte_model: what the ratio would be if only bytes counted (of keys, values and metadata; of a whole step the
        weights too) or, for prompts, operations with keys and values.
      achieved: ratio / byte_model.
      gb_s: bytes that the method must read over the time, in 10**9 a second; None where operations are the model.
    """

    shape: str
    length: int
    dtype: str
    method: str
    budget: int | None
    ms: float
    ms_low: float
    ms_high: float
    cpu_ms: float
    compile_s: float | None
    ratio: float
    byte_model: float
    achieved: float
    gb_s: float | None


class Method(NamedTuple):
    """A candidate of a bench.

    Attributes:
      name: as the tables call it.
      budget: None is dense.
      work: bytes it must read, or operations.
    """

    name: str
    budget: int | None
    work: float


class Section(NamedTuple):
    """Rows that make one table.

    Attributes:
      title: what was measured.
      rows: the lines.
      note: what a reader must know; may be empty.
    """

    title: str
    rows: Sequence[Row]
    note: str = ""


def make_rows(
    shape: str,
    length: int,
    dtype: str,
    timings: Mapping[str, Timing],
    methods: Mapping[str, Method],
    *,
    calls: int = 1,
    operations: bool = False,
    yardstick: Sequence[str] | None = None,
) -> list[Row]:
    """Compares the candidates of one run.

    Args:
      shape, length, dtype: see :class:`Row`.
      timings, methods: by candidate; ``methods`` may have more.
      calls: steps that one timed run took.
      operations: the methods' ``work`` counts these, not bytes.
      yardstick: the candidates whose fastest the ratios refer to, and whose least work the model; None: all dense ones.

    Raises:
      ValueError: none of the yardstick was timed.
    """
    dense = [name for name in timings if (methods[name].budget is None if yardstick is None else name in yardstick)]
    if not dense:
        raise ValueError(f"expected a dense method to compare with, got only {', '.join(timings)}; add one.")
    best = min(timings[name].median for name in dense)
    dense_work = min(methods[name].work for name in dense)
    rows = []
    for name, timing in timings.items():
        method = methods[name]
        ratio, model = best / timing.median, dense_work / method.work
        ms, low, high, cpu = (1e3 * seconds / calls for seconds in timing[:4])
        rate = None if operations else method.work / (ms / 1e3) / 1e9
        rows.append(
            Row(shape, length, dtype, method.name, method.budget, ms, low, high, cpu, timing.compile, ratio, model,
                ratio / model, rate)
        )  # fmt: skip
    return rows
