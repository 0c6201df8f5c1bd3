"""The evaluation of narrow and two-level metadata: what it calls the same, the mass, the bytes."""

import numpy as np
import pytest

from quest_jax import Quest
from quest_jax.evals import metadata
from quest_jax.evals.capture import capture, listed, mass_kept, probabilities
from quest_jax.evals.metadata import Form
from tests.models_for_tests import DEEP, deep

IDS = np.random.default_rng(0).integers(0, DEEP.vocab_size, 300).tolist()


def test_the_reference_is_the_same_and_keeps_what_its_pages_keep():
    """The mass against a selection made one query at a time."""
    compared = [{"float32": Form(Quest(48), "float32"), "less": Form(Quest(32), "float32")}]
    (found,) = metadata.run(deep(), IDS, compared, queries=8)
    assert found["float32"].same.tolist() == [1.0, 1.0] and found["float32"].mass.shape == (2, DEEP.n_heads)
    # Two pages of the three: the current one and the sink, of which all but the best are the same.
    np.testing.assert_allclose(found["less"].same, 2 / 3, rtol=1e-6)
    text, mass = capture(deep(), IDS), []
    for at in range(292, 300):
        q, view = text.chunk(2, at, at + 1), text.view(2, at, at + 1)
        marks = listed(Quest(48).choose(q, view, None), 16, 512)
        mass.append(mass_kept(probabilities(q, view), marks)[:, 0])
    np.testing.assert_allclose(found["float32"].mass[0], np.mean(mass, axis=0), rtol=1e-5)


def test_narrow_forms_select_nearly_the_same_and_few_blocks_do_not():
    compared = [metadata.forms(48, 2, 1)]
    (found,) = metadata.run(deep(), IDS, compared, queries=32)
    assert list(found) == ["float32", "bfloat16", "int8", "float32, two levels", "int8, two levels"]
    assert found["bfloat16"].same.mean() > 0.95 and found["int8"].same.mean() > 0.9
    assert 2 / 3 <= found["float32, two levels"].same.mean() < 1
    assert found["float32, two levels"].mass.mean() < found["float32"].mass.mean()
    (every,) = metadata.run(deep(), IDS, [metadata.forms(48, 2, 8)], queries=32)
    assert every["float32, two levels"].same.mean() == 1, "blocks enough for all pages"


def test_bytes_are_those_of_what_is_scored():
    one, two = Form(Quest(512), "int8"), Form(Quest(512, block_pages=16), "bfloat16")
    assert metadata.scored_nbytes(one, 8192, 64, 3, 16) == 512 * 3 * (128 + 8)
    assert metadata.scored_nbytes(two, 8192, 64, 3, 16) == (32 + 17 * 16) * 3 * 256


def test_a_text_without_room_for_the_budget_is_refused():
    with pytest.raises(ValueError, match="expected more than 328 .* got 300; take a longer text or smaller budgets"):
        metadata.run(deep(), IDS, [metadata.forms(256, 2, 1)], queries=56)
