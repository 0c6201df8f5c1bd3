"""The plot of a bench: what is drawn, and that a PNG comes out of it."""

import pytest

from quest_jax.bench import plot
from tests.bench.test_report import make, row


def test_a_panel_a_shape_and_a_line_a_method():
    rows = [row(length=1024), row("Quest 64", 512), row(length=512), row("Quest 64", 1024), row(shape="mha")]
    found = plot.panels(rows)
    assert list(found) == ["smollm2"]  # one length makes no line
    assert {method: [one.length for one in line] for method, line in found["smollm2"].items()} == {
        "split32": [512, 1024],
        "Quest 64": [512, 1024],
    }
    with pytest.raises(ValueError, match="two lengths or more"):
        plot.panels([row()])


def test_it_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    plot.check_plot(file)
    plot.write_plot(file, make(row(), row(length=4096, ms=9.0), row("Quest 64", ms=3.0), row("Quest 64", 4096)))
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
