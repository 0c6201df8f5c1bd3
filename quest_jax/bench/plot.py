"""Time against the length of the context, log-log, a panel for every shape."""

import importlib
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from quest_jax.bench.machine import machine_line
from quest_jax.bench.report import Report
from quest_jax.bench.rows import Row


def check_plot(path: pathlib.Path) -> None:
    """Checks that a plot can be written.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no PNG file in a folder that exists.
    """
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise ValueError(f"--plot: expected a .png file in a folder that exists, got {path}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('--plot needs matplotlib; pip install "quest-jax[plot]"')


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Sorts rows into lines by method and panels by shape, by length; shapes of one length make no panel.

    Raises:
      ValueError: no shape was timed at two lengths or more.
    """
    found: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row.length):
        found.setdefault(row.shape, {}).setdefault(row.method, []).append(row)
    found = {shape: lines for shape, lines in found.items() if any(len(line) > 1 for line in lines.values())}
    if not found:
        raise ValueError("--plot: expected a shape that was timed at two lengths or more, got none.")
    return found


def write_plot(path: pathlib.Path, report: Report) -> None:
    """Draws the medians, with bars for the quartiles.

    Raises:
      ValueError: see :func:`panels`.
    """
    shapes = panels(report.rows)
    figures: Any = importlib.import_module("matplotlib.figure")
    ticks: Any = importlib.import_module("matplotlib.ticker")
    figure = figures.Figure(figsize=(5.5 * len(shapes), 4.5), layout="constrained")
    for axes, (shape, lines) in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes.items(), strict=True):
        for method, line in lines.items():
            bars = [[row.ms - row.ms_low for row in line], [row.ms_high - row.ms for row in line]]
            axes.errorbar([row.length for row in line], [row.ms for row in line], bars, marker="o", label=method)
        axes.set(xscale="log", yscale="log", title=shape, xlabel="tokens of context", ylabel="ms")
        lengths = sorted({row.length for line in lines.values() for row in line})
        axes.set_xticks(lengths, [f"{length}" for length in lengths])
        axes.yaxis.set_major_locator(ticks.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticks.FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(machine_line(report.machine), fontsize="small")
    figure.savefig(path, dpi=120)
