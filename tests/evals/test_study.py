"""The study in small: every part runs, resumes, and finds its places in the document."""

import importlib.util
import pathlib

import numpy as np
import pytest

from quest_jax import load, load_tokenizer
from quest_jax.evals import study, study_report
from quest_jax.evals.retention import Found
from quest_jax.evals.store import Store
from tests.imports import ROOT
from tests.tiny_model import write_tiny_model


def make(share, kl, scores):
    return Found({"sparse": scores}, {}, [[1.0] * 40] * 2, kl, [[1.0] * 40] * 2, {"x": share}, {"x": 1000}, 0.0)


def test_methods_compare_at_equal_bytes():
    low, high = [[0.4] * 40, [0.4] * 40], [[0.2] * 40, [0.2] * 40]
    half = [[0.3] * 40, [0.3] * 40]
    found = {
        "full": make(1000, [[0.0] * 40] * 2, [1.0, 1.0]), "quest_mean 1": make(100, low, [0.0, 0.0]),
        "quest_mean 2": make(400, high, [1.0, 1.0]), "same 1": make(200, half, [0.5, 0.5]),
        "worse 1": make(400, low, [0.0, 1.0]), "less 1": make(50, low, [0.0, 0.0]),
        "more 1": make(900, low, [0.0, 0.0]),
    }  # fmt: skip
    table = study_report.against(found)
    assert [row[0] for row in table.rows] == ["same 1", "worse 1"], (
        "what lies outside the bytes of quest_mean is left out"
    )
    assert table.rows[0][2] == "+0.0000 [+0.0000, +0.0000]" and table.rows[0][3].startswith("+0.00 [")
    assert table.rows[1][2] == "+0.2000* [+0.2000, +0.2000]" and table.rows[1][3].startswith("-0.50 [-1.00")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def small(folder):
    model = write_tiny_model(folder / "model")
    return lambda **options: study.run(
        load(str(model)), load_tokenizer(str(model)), Store(folder / "cells"), study.SMALL, model="tiny", **options
    )


@pytest.mark.slow(seconds=60)
def test_every_part_runs_and_fills_its_place(small, folder):
    seen = []
    found = small(report=seen.append)
    assert seen[0] == "decode" and {"page 8", "prefill", "long", "map 900", "from-start"} <= {*seen}
    tables = study_report.tables(found)
    keys = [key for part in study.PARTS for key in study_report.TABLES[part]]
    assert {*tables} == {*keys}
    names = ["full", "quest 64", "quest_mean 64", "quoka 64"]
    assert [row[0] for row in tables["fidelity"].rows] == names == [row[0] for row in tables["decode"].rows]
    document = folder / "study.md"
    document.write_text("\n\n".join("\n".join(study_report.markers(key)) for key in keys))
    study_report.check_places(document, study.PARTS)
    study_report.write(document, found)
    text = document.read_text()
    assert all(table.title in text for table in tables.values() if table.rows)
    before = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    again = small()
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()} == before
    assert study_report.tables(again) == tables
    if importlib.util.find_spec("matplotlib"):
        study_report.draw(folder, again)
        drawn = {path.name for path in folder.glob("*.png") if "facts" not in path.name}  # of no answers, no plot
        assert drawn == {
            f"study-{name}.png" for name in ("decode-kl", "prefill-kl", "long-kl", "layers", "pages", "passkey")
        }


def test_what_cannot_run_is_refused(folder):
    with pytest.raises(ValueError, match="expected parts of decode, again, fidelity, .* got 'all'"):
        study.check_parts(["all"])
    with pytest.raises(ValueError, match="expected a document with places"):
        study_report.check_places(pathlib.Path("nothing.md"), study.PARTS)
    with pytest.raises(ValueError, match="expected a folder that exists"):
        study_report.check_plots(pathlib.Path("nothing"))


def test_the_document_has_a_place_for_every_table():
    study_report.check_places(ROOT / "docs" / "study.md", study.PARTS)


def test_facts_are_followed_by_what_the_book_goes_on_with():
    class Characters:
        def encode(self, text, *, add_special_tokens=True):
            return [ord(letter) for letter in text]

    (context,) = study.facts_contexts(Characters(), 3000, 1, 50, 3)
    text = "".join(map(chr, context.ids))
    after = "".join(map(chr, context.following))
    assert len(after) == 50 and np.ptp([len(one.ids) for one in context.asked]) < 60
    start, end = study._needle(Characters(), text, context.asked[0].sample.answers[0])
    assert text[start:end].endswith(context.asked[0].sample.answers[0]) and " is " in text[start:end] + " is "
    prose = " ".join(study.split_sentences(study.shipped_text()))
    assert text[-15:] + after in f"{prose} {prose}"
