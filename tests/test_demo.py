"""The demo's table, on a tiny random model and, slowly, on the real one."""

import io
import re
from typing import NamedTuple

import pytest
from rich.console import Console

from quest_jax.demo import run_demo
from quest_jax.evals.needle import Fact
from tests.tiny_model import write_tiny_model

LINE = re.compile(r" *(dense|Quest \d+|QuoKA \d+)  +(.*?) +(yes|no) +(\d+) +([\d.]+) +(\d+)% +(\d+) +([\d.]+) s *")


class Line(NamedTuple):
    name: str
    answer: str
    right: str
    pages: float
    megabytes: float
    share: float
    milliseconds: float
    compiling: float


def demonstrate(model: str, **options) -> tuple[str, list[Line]]:
    """Runs the demo; returns what it printed, and the lines of its table."""
    settings = dict(tokens=700, depth=0.5, budgets=(), prefill_budget=None, max_new_tokens=8, page_size=16)
    settings["dtype"] = "float32"
    out = Console(file=io.StringIO(), width=200)
    run_demo(model, Fact(), **settings | options, out=out, err=Console(file=io.StringIO()))
    printed = out.file.getvalue()
    found = [found.groups() for found in map(LINE.fullmatch, printed.splitlines()) if found]
    return printed, [Line(*words[:3], *map(float, words[3:])) for words in found]


@pytest.mark.slow
def test_every_policy_has_its_line(tmp_path):
    printed, lines = demonstrate(str(write_tiny_model(tmp_path)))
    assert [line.name for line in lines] == ["dense", "Quest 336", "Quest 160", "Quest 80", "QuoKA 175", "QuoKA 175"]
    assert [line.right for line in lines] == ["no"] * 6  # random weights know nothing, and the table says so
    # The cache grows to 44-48 pages; 2 KV heads, 3 layers, of which the last is sparse: 336 tokens are 21 pages.
    dense, *sparse, then_dense, then_quest = lines
    assert (then_dense[3:6], then_quest[3:6]) == (dense[3:6], sparse[0][3:6])
    assert "+ dense" in printed and "+ Quest 336" in printed
    assert 6 * 40 < dense.pages < 6 * 50 and dense.share == 100
    for line, budget in zip(sparse, (336, 160, 80), strict=True):
        assert line.pages == pytest.approx(dense.pages * 2 / 3 + 2 * budget / 16, abs=1)
        assert line.megabytes < dense.megabytes
    assert "First token, dense: " in printed and "First token, QuoKA 175: " in printed and " s in all" in printed
    assert 'The password of the vault is "accordion".' in printed


@pytest.mark.slow
def test_budgets_and_document_are_the_callers(tmp_path):
    options = dict(tokens=900, budgets=(128, 4096), depth=0.25, prefill_budget=64)
    printed, lines = demonstrate(str(write_tiny_model(tmp_path)), **options)
    assert [line.name for line in lines] == ["dense", "Quest 128", "Quest 4096", "QuoKA 64", "QuoKA 64"]
    assert lines[2][1:6] == lines[0][1:6]  # a budget above the length is dense: same answer, pages, bytes and share
    found = re.search(r"In (\d+) tokens of Moby-Dick", printed)
    assert found and 600 < int(found.group(1)) <= 900
    assert "a fact is hidden, at 25%:" in printed


@pytest.mark.slow(seconds=60)
def test_the_real_model_finds_the_fact():
    _, lines = demonstrate("smollm2-135m", tokens=2048, budgets=(1024,), max_new_tokens=12)
    assert [line.name for line in lines] == ["dense", "Quest 1024", "QuoKA 512", "QuoKA 512"]
    assert [line.right for line in lines] == ["yes"] * 4
