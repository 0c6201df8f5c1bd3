"""Plots of evaluations: a value against the bytes read for it, a map of depth and length, a line over the layers.

Needs matplotlib, the ``plot`` extra. No global state of it is touched: figures are made without pyplot.
"""

import importlib
import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Of Okabe and Ito, without the yellow that white paper swallows: told apart whatever one's colour vision. With as many
# markers as have no divisor in common, 77 lines look different.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
GREY = "#A0A0A0"

Points = Sequence[tuple[float, float, float, float]]
Path = str | os.PathLike[str]


def against_bytes(
    curves: Mapping[str, Points],
    path: Path,
    *,
    ylabel: str,
    title: str = "",
    highlight: Sequence[str] = (),
    floor: float | None = None,
    log: bool = False,
) -> None:
    """Draws a value against what was read for it, on a logarithmic axis in percent, with bars for the intervals.

    Args:
      curves: by name, points of (bytes read over those of dense attention, value, lower end, upper end).
      path: file to write, in the format of its ending.
      ylabel: what the value is.
      title: above the plot, wrapped.
      highlight: names that get colours, the others are grey then; none: all get colours.
      floor: where a dashed line is drawn: what is had for nothing.
      log: also of the value, which has no zeros then.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no curves, an unknown name in ``highlight``, or a share that is not above 0.
    """
    _bytes_figure(curves, ylabel, title, highlight, floor, log).savefig(path, dpi=150)


def heat_map(
    values: Mapping[tuple[float, int], float],
    path: Path,
    *,
    title: str,
    ylabel: str = "depth",
    xlabel: str = "tokens of context",
    label: str = "share of right answers",
) -> None:
    """Draws a value in [0, 1] for every depth (0 start, 1 end; downwards) and length; what is missing stays empty.

    Args:
      values: by depth and length.
      path: file to write, in the format of its ending.
      title: above the map, wrapped.
      ylabel, xlabel: of the axes.
      label: of the colours.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no values.
    """
    _map_figure(values, title, ylabel, xlabel, label).savefig(path, dpi=150)


def by_layer(
    curves: Mapping[str, Sequence[float]],
    path: Path,
    *,
    ylabel: str,
    title: str = "",
    first_layer: int = 0,
    highlight: Sequence[str] = (),
    log: bool = False,
) -> None:
    """Draws a value for every layer.

    Args:
      curves: by name, a value a layer.
      path: file to write, in the format of its ending.
      ylabel: what the value is.
      title: above the plot, wrapped.
      first_layer: the layer of the first values.
      highlight: as for :func:`against_bytes`.
      log: whether the value's axis is logarithmic, with ticks at powers of two.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no curves, or an unknown name in ``highlight``.
    """
    _layer_figure(curves, ylabel, title, first_layer, highlight, log).savefig(path, dpi=150)


def _bytes_figure(
    curves: Mapping[str, Points],
    ylabel: str,
    title: str,
    highlight: Sequence[str],
    floor: float | None,
    log: bool = False,
):
    for name, points in curves.items():
        if any(share <= 0 for share, *_ in points):
            raise ValueError(f"{name}: expected shares above 0, which a logarithmic axis can show, got {points}.")
    figure, axes = _figure(title, len(curves))
    for name, points, style in _styled(curves, highlight):
        shares, found, low, high = zip(*sorted(points), strict=True) if points else ((),) * 4
        percents = [100 * share for share in shares]
        axes.plot(percents, found, label=name, **style)
        axes.vlines(
            percents,
            low,
            high,
            color=style["color"],
            linewidth=0.5 * style["linewidth"],
            alpha=0.6,
            zorder=style["zorder"],
        )
    if floor is not None:
        axes.axhline(floor, color="black", linestyle="--", linewidth=0.8, label=f"floor, {floor:.3g}")
    ticks = importlib.import_module("matplotlib.ticker")
    axes.set(xscale="log", xlabel="bytes read, of dense attention", ylabel=ylabel)
    axes.xaxis.set_major_locator(ticks.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ticks.FuncFormatter(lambda percent, _: f"{percent:g} %"))
    if log:
        axes.set_yscale("log", nonpositive="clip")
        axes.yaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:g}"))
    return _finished(figure, axes)


def _map_figure(values: Mapping[tuple[float, int], float], title: str, ylabel: str, xlabel: str, label: str):
    depths, lengths = sorted({depth for depth, _ in values}), sorted({length for _, length in values})
    figure, axes = _figure(title, len(values), size=(2.5 + 0.6 * len(lengths), max(3.0, 1.8 + 0.35 * len(depths))))
    rows = [[values.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    # Cividis runs from dark to light, the same with any colour vision.
    image = axes.imshow(rows, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (i, row), (j, _) in itertools.product(enumerate(rows), enumerate(lengths)):
        if row[j] == row[j]:
            colour = "black" if row[j] > 0.5 else "white"
            axes.text(j, i, f"{row[j]:.2f}", ha="center", va="center", color=colour, fontsize="x-small")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.colorbar(image, ax=axes, label=label)
    return figure


def _layer_figure(
    curves: Mapping[str, Sequence[float]],
    ylabel: str,
    title: str,
    first_layer: int,
    highlight: Sequence[str],
    log: bool,
):
    figure, axes = _figure(title, len(curves))
    for name, found, style in _styled(curves, highlight):
        axes.plot(range(first_layer, first_layer + len(found)), found, label=name, **style)
    ticks = importlib.import_module("matplotlib.ticker")
    axes.set(xlabel="layer", ylabel=ylabel)
    axes.xaxis.set_major_locator(ticks.MaxNLocator(integer=True))
    if log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:g}"))
    return _finished(figure, axes)


def check() -> None:
    """Checks that plots can be drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError('plots need matplotlib; pip install "quest-jax[plot]"') from error


def _figure(title: str, count: int, size: tuple[float, float] | None = None) -> tuple[Any, Any]:
    """A figure with one pair of axes, high enough for a legend of ``count`` lines."""
    if not count:
        raise ValueError("plot: expected something to draw, got nothing.")
    check()
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=size or (8, max(4.5, 0.8 + 0.17 * count)), layout="constrained")
    axes = figure.subplots()
    if title:
        axes.set_title(textwrap.fill(title, int(9 * figure.get_figwidth())), fontsize="medium")
    return figure, axes


def _styled(curves: Mapping[str, Any], highlight: Sequence[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every curve with how it looks, those of ``highlight`` first."""
    if unknown := [name for name in highlight if name not in curves]:
        raise ValueError(f"highlight: expected names of {', '.join(curves)}, got {', '.join(unknown)}.")
    shown = dict.fromkeys(highlight or curves)
    colours, markers = itertools.cycle(COLOURS), itertools.cycle(MARKERS)
    for name in shown:
        style = {"color": next(colours), "linestyle": "-", "linewidth": 1.6, "markersize": 5, "zorder": 3}
        yield name, curves[name], style | {"marker": next(markers)}
    greys = itertools.cycle(("--", ":", "-."))
    for name in curves:
        if name not in shown:
            style = {"color": GREY, "linestyle": next(greys), "linewidth": 0.9, "markersize": 3.5, "zorder": 2}
            yield name, curves[name], style | {"marker": next(markers)}


def _finished(figure: Any, axes: Any) -> Any:
    """The grid, and the legend beside the axes, where it hides nothing."""
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small", frameon=False)
    return figure
