"""Calibration: the fit finds the constants that made the times, and the command measures what it fits."""

import pytest

from quest_jax.bench import calibrate
from quest_jax.bench.calibrate import Measured, fit
from quest_jax.bench.sizes import SHAPES
from quest_jax.policies.cost import CostModel

MODEL, BASE = CostModel(stream=4e-11, listed=1e-10, fixed=2e-4), 1e-4


def exact(shape, length, budget):
    per_token, metadata = calibrate._bytes(SHAPES[shape])
    dense = MODEL.dense(length, per_token)
    chosen = dense if budget is None else MODEL.selected(length, per_token, metadata, budget)
    return Measured(shape, length, budget, BASE + chosen)


def test_the_fit_finds_what_made_the_times():
    found, base = fit([exact(s, n, b) for s in SHAPES for n in (4096, 32768) for b in (None, 512, 2048)])
    assert found == pytest.approx(MODEL, rel=1e-6) and base == pytest.approx(BASE, rel=1e-6)


def test_noise_of_a_tenth_moves_the_break_even_little():
    times = [exact(s, n, b) for s in SHAPES for n in (4096, 32768) for b in (None, 512, 2048)]
    noisy = [one._replace(seconds=one.seconds * (1.1 if i % 2 else 0.9)) for i, one in enumerate(times)]
    per_token, metadata = calibrate._bytes(SHAPES["smollm2"])
    wanted = MODEL.break_even(per_token, metadata, 1024)
    assert fit(noisy)[0].break_even(per_token, metadata, 1024) == pytest.approx(wanted, rel=0.3)


def test_both_are_measured_at_every_length():
    said = []
    found = calibrate.measure([512], [64, 1024], 1, said.append)
    assert [(one.shape, one.length, one.budget) for one in found] == [
        (shape, 512, budget)
        for shape in SHAPES
        for budget in (None, 64)  # 1024 tokens are not there to choose from
    ]
    assert all(one.seconds > 0 for one in found) and len(said) == len(SHAPES)
    text = calibrate.table(found, MODEL, BASE)
    assert text.row_count == len(found)
