"""The plots of evaluations: what is drawn, and that files come out of it."""

import sys

import pytest

from quest_jax.evals import plots

CURVES = {
    "full": [(1.0, 0.9, 0.85, 0.95)],
    "quest": [(0.5, 0.8, 0.7, 0.9), (0.1, 0.4, 0.3, 0.5)],
    "random": [(0.1, 0.1, 0.0, 0.2), (0.5, 0.2, 0.1, 0.3)],
}


@pytest.fixture(autouse=True)
def matplotlib():
    return pytest.importorskip("matplotlib")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line(figure, name):
    return next(one for one in figure.axes[0].lines if one.get_label() == name)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n") and 10_000 < path.stat().st_size < 1_000_000


def test_a_value_against_the_bytes_read(tmp_path):
    figure = plots._bytes_figure(CURVES, "accuracy", "", ["quest"], 0.05)
    axes = figure.axes[0]
    assert legend_of(figure) == ["quest", "full", "random", "floor, 0.05"]
    assert (axes.get_xscale(), axes.get_ylabel()) == ("log", "accuracy")
    assert line(figure, "quest").get_xydata().tolist() == [[10, 0.4], [50, 0.8]]  # in order
    assert [one.get_color() == plots.GREY for one in (line(figure, name) for name in CURVES)] == [True, False, True]
    bars = [[segment.tolist() for segment in bars.get_segments()] for bars in axes.collections]
    assert bars[0] == [[[10, 0.3], [10, 0.5]], [[50, 0.7], [50, 0.9]]]
    assert axes.xaxis.get_major_formatter()(20.0, 0) == "20 %" and axes.get_yscale() == "linear"
    axes = plots._bytes_figure(CURVES, "KL", "", [], None, log=True).axes[0]
    assert axes.get_yscale() == "log" and axes.yaxis.get_major_formatter()(0.001, 0) == "0.001"
    plots.against_bytes(CURVES, tmp_path / "a.png", ylabel="accuracy", highlight=["quest"], floor=0.05)
    assert is_png(tmp_path / "a.png")


@pytest.mark.parametrize("highlight", [(), ("m3", "m17")])
def test_thirty_methods_look_different_and_fit(highlight):
    curves = {f"m{i}": [(0.1, i / 30, 0.0, 1.0), (0.5, i / 30, 0.0, 1.0)] for i in range(30)}
    title = "what is right of the answers to questions about a long text, " * 4
    figure = plots._bytes_figure(curves, "accuracy", title, highlight, None)
    looks = {(one.get_color(), one.get_marker(), one.get_linestyle()) for one in figure.axes[0].lines}
    assert len(looks) == 30
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for part in (figure.legends[0], figure.axes[0].title, figure.axes[0].xaxis.label, figure.axes[0].yaxis.label):
        box = part.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width and 0 <= box.y0 < box.y1 <= height
    assert figure.axes[0].get_window_extent().x1 <= figure.legends[0].get_window_extent().x0
    assert figure.axes[0].get_window_extent().width > 0.5 * width


def test_a_map_of_depth_and_length(tmp_path):
    values = {(0.5, 1024): 0.25, (0.0, 1024): 1.0, (0.0, 512): 0.75}
    figure = plots._map_figure(values, "passkey, quest", "depth", "tokens", "right")
    axes, bar = figure.axes
    assert axes.images[0].get_array().tolist() == [[0.75, 1.0], [None, 0.25]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "50%"]
    assert [text.get_text() for text in axes.texts] == ["0.75", "1.00", "0.25"]
    assert (axes.get_title(), bar.get_ylabel()) == ("passkey, quest", "right")
    plots.heat_map(values, tmp_path / "a.png", title="passkey, quest")
    assert is_png(tmp_path / "a.png")


def test_a_line_over_the_layers(tmp_path):
    curves = {"oracle": [0.9, 0.8, 0.95], "quest": [0.5, 0.6, 0.7]}
    figure = plots._layer_figure(curves, "mass", "", 2, (), False)
    assert legend_of(figure) == ["oracle", "quest"]
    assert line(figure, "quest").get_xydata().tolist() == [[2, 0.5], [3, 0.6], [4, 0.7]]
    tokens = plots._layer_figure({"needed": [16.0, 2048.0]}, "tokens", "", 0, (), True)
    assert tokens.axes[0].get_yscale() == "log" and tokens.axes[0].yaxis.get_major_formatter()(2048.0, 0) == "2048"
    plots.by_layer(curves, tmp_path / "a.png", ylabel="mass", first_layer=2)
    assert is_png(tmp_path / "a.png")


def test_no_global_state_of_matplotlib_is_touched(matplotlib, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whoever imports it fails
    before = matplotlib.rcParams.copy()
    plots.by_layer({"one": [1.0, 2.0]}, tmp_path / "a.png", ylabel="mass")
    assert matplotlib.rcParams.copy() == before


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    with pytest.raises(ValueError, match="expected something to draw"):
        plots.against_bytes({}, path, ylabel="accuracy")
    with pytest.raises(ValueError, match="expected something to draw"):
        plots.heat_map({}, path, title="none")
    with pytest.raises(ValueError, match="quest: expected shares above 0"):
        plots.against_bytes({"quest": [(0.0, 1.0, 1.0, 1.0)]}, path, ylabel="accuracy")
    with pytest.raises(ValueError, match="expected names of full, quest, random, got quset"):
        plots.against_bytes(CURVES, path, ylabel="accuracy", highlight=["quset"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "quest-jax\[plot\]"'):
        plots.by_layer({"one": [1.0]}, path, ylabel="mass")
    assert not path.exists()
