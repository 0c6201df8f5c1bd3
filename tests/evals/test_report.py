"""Rows of results against sums by hand."""

import json

import numpy as np
import pytest

from quest_jax.evals import report
from quest_jax.evals.retention import Found


def make(scores, nll, kl=0.0, share=50):
    answers = {mode: ["x"] * len(values) for mode, values in scores.items()}
    rows = [[float(value) for value in row] for row in nll]
    same = [[1.0] * len(row) for row in rows]
    return Found(
        scores, answers, rows, [[kl] * len(row) for row in rows], same, {"sparse": share}, {"sparse": 100}, 1.0
    )


FOUND = {
    "full": make({"sparse": [1.0, 1.0, 0.0, 0.5], "dense": [1.0, 1.0, 1.0, 1.0]}, [[1, 2], [3]], share=100),
    "quest 256": make({"sparse": [1.0, 0.0, 1.0, 1.0], "dense": [1.0, 1.0, 1.0, 0.0]}, [[2, 2], [3.5]], kl=0.25),
    "quest 512": make({"sparse": [1.0, 1.0, 1.0, 1.0], "dense": [1.0] * 4}, [[1, 2], [3]], share=75),
}


def test_means_and_what_is_kept_of_dense():
    full, quest, more = report.rows(FOUND)
    assert quest.share == 0.5 and quest.method == more.method == "quest" and full.method == "full"
    assert quest.right["sparse"].mean == 0.75 and quest.right["dense"].mean == 0.75
    # Of the first, second and fourth question; the fourth is answered better than by dense attention.
    assert quest.kept["sparse"].mean == pytest.approx(2 / 3)
    assert quest.kept["sparse"].low == 0 and quest.kept["sparse"].high == 1
    assert more.kept["sparse"][:] == (1, pytest.approx(0.025 ** (1 / 3)), 1) and full.kept["dense"][:] == (1, 1, 1)
    assert full.perplexity == pytest.approx(np.exp(2)) and quest.perplexity == pytest.approx(np.exp(2.5))
    assert quest.gap.mean == pytest.approx(0.5) and full.gap.mean == 0 and quest.kl.mean == 0.25


def test_nothing_is_kept_of_no_answers():
    none = {"full": make({"sparse": [0.0, 0.0]}, []), "quest 1": make({"sparse": [1.0, 0.0]}, [])}
    line = report.rows(none)[1]
    assert line.kept["sparse"] is None and line.gap is None
    headings, cells = report.cells(report.rows(none))
    assert headings == ["method, budget", "bytes of dense", "GB read", "right", "of dense's"]
    assert cells[1] == ["quest 1", "50.0%", "5e-08", "50% [0, 100]", "-"]


def test_tables_and_files_have_every_row():
    lines = report.rows(FOUND)
    text = report.table(lines, "facts").for_document()
    assert text.startswith(
        "**facts**\n\n| method, budget | bytes of dense | GB read | right | of dense's | question dense: right"
    )
    assert text.count("\n|") == 5 and "| quest 256 | 50.0% | 5e-08 | 75% [" in text and "0.5000 [" in text
    table = report.table(lines, "facts [1]").for_terminal()
    assert table.row_count == 3 and str(table.title) == "facts [1]"
    loaded = json.loads(json.dumps(report.as_json(FOUND, lines), allow_nan=False))
    assert loaded[1]["name"] == "quest 256" and loaded[1]["found"]["nll"] == [[2, 2], [3.5]]
    assert loaded[1]["kept"]["sparse"]["mean"] == pytest.approx(2 / 3) and loaded[0]["answers"]["dense"] == ["x"] * 4


def test_curves_are_points_of_bytes_and_values():
    lines = report.rows(FOUND)
    found = report.curves(lines, "kl")
    assert list(found) == ["full", "quest"] and found["quest"] == [(0.5, 0.25, 0.25, 0.25), (0.75, 0.0, 0.0, 0.0)]
    assert report.curves(lines, "kept", "sparse")["quest"][0][:2] == pytest.approx((0.5, 2 / 3))
    assert np.array(report.curves(lines, "gap")["full"]).tolist() == [[1, 0, 0, 0]]


def test_how_many_dense_attention_answers_is_said():
    assert report.counts(FOUND) == (
        "4 questions decoded by the method, of which dense attention answers 2.5; 4 questions read in the prompt, of "
        "which dense attention answers 4; 3 tokens of text"
    )
