"""The parts of a decode step: all of them, and the policy that chooses nothing."""

import jax.numpy as jnp
import pytest

from quest_jax import LayerView, LlamaConfig
from quest_jax.bench import breakdown
from quest_jax.bench.breakdown import LastPages
from tests.test_attention import draw, make, read


@pytest.mark.slow
def test_a_step_is_taken_apart(monkeypatch):
    monkeypatch.setattr(breakdown, "SMOLLM2", LlamaConfig(64, 32, 64, 4, 4, 2, 8, 512))
    step, parts = breakdown.run(128, 64, 1)
    assert step > 0 and len(parts) == 5 == breakdown.table(step, parts, 128, 64).row_count
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)


def test_the_last_pages_are_read_and_none_is_scored():
    policy = LastPages(48, dense_layers=0)
    _, state = read(make(policy, batch=2), draw(2, 100), [99, 1], (100, 100))
    assert state.reads.read.tolist() == [[3 * 2, 3 * 2]]
    _, state = read(make(policy, batch=1), draw(1, 20), [19, 1], (20,))
    assert state.reads.read.tolist() == [[2 * 2]]
    view_pages = policy.choose(None, _view(state), None).pages
    assert jnp.array_equal(view_pages[0, 0], jnp.arange(3))


def _view(state):
    cache = state.cache
    return LayerView(cache.kv[0], cache.meta[0], None, state.starts, cache.lengths, None)
