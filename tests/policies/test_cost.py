"""Dense where that is faster: the model's arithmetic, and what attention does with its answer."""

import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.pallas_kernels import dispatch
from quest_jax.policies.cost import MODELS, CostModel, break_even
from tests.test_attention import draw, make, read

MODEL = CostModel(stream=1e-10, listed=3e-10, fixed=1e-4)


@pytest.mark.parametrize("budget", [64, 1024, 2048])
def test_at_the_break_even_both_take_as_long(budget):
    length = MODEL.break_even(1536.0, 96.0, budget)
    assert length > budget
    for more, slower in ((-1, True), (1, False)):
        chosen = MODEL.selected(length + more, 1536.0, 96.0, budget)
        assert (chosen > MODEL.dense(length + more, 1536.0)) == slower


def test_metadata_as_large_as_the_keys_and_values_never_pays():
    assert MODEL.break_even(1536.0, 1536.0, 64) == MODEL.break_even(768.0, 1536.0, 64) == 2**31 - 1


def test_a_device_without_figures_has_no_break_even():
    state = make()
    kv, meta = state.cache.kv[0], state.cache.meta[0]
    assert break_even(kv, meta, 64) == MODELS["cpu"].break_even(256.0, 2 * 2 * 16 * 4 / 16, 64) > 64
    with dispatch.target("tpu", "TPU v5 lite"):
        assert break_even(kv, meta, 64) == 0


def test_short_rows_are_read_whole_and_long_ones_are_not():
    """Each by its own length, whatever stands beside it."""
    qkv, lengths = draw(2, 160), (160, 90)
    sizes = [140] + [1] * 20
    policy = quest_jax.Quest(48, dense_layers=0, dense_below=100)
    out, state = read(make(policy), qkv, sizes, lengths)
    dense, _ = read(make(), qkv, sizes, lengths)
    selected, expected = read(make(quest_jax.Quest(48, dense_layers=0)), qkv, sizes, lengths)
    np.testing.assert_allclose(out[0], selected[0], atol=1e-6)
    np.testing.assert_allclose(out[1], dense[1], atol=1e-6)
    assert state.reads.read[0, 0] == expected.reads.read[0, 0]


def test_what_was_read_is_what_is_counted():
    policy = quest_jax.Quest(48, dense_layers=0, dense_below=100)
    _, state = read(make(policy), draw(2, 120), [119, 1], (120, 99), quest_jax.attend)
    assert state.reads.whole.tolist() == [[False, False]], "a row that brought no token has read nothing"
    _, state = read(make(policy, batch=1), draw(1, 99), [98, 1], (99,), quest_jax.attend)
    assert state.reads.whole.tolist() == [[True]] and state.reads.scored.tolist() == [[0]]
    assert state.reads.read.tolist() == state.reads.live.tolist() == [[7 * 2]]
    _, state = read(make(policy, batch=1), draw(1, 100), [99, 1], (100,), quest_jax.attend)
    assert state.reads.whole.tolist() == [[False]] and state.reads.read.tolist() == [[3 * 2]]


def test_a_budget_leaves_the_choice_to_the_library_and_a_policy_does_not():
    params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 3, 4, 2, 8, 512), seed=0)
    prompt = [[i % 60 for i in range(100)]]
    by_budget = quest_jax.generate(params, prompt, budget=64, max_new_tokens=4)
    by_name = quest_jax.generate(params, prompt, policy=quest_jax.Quest(64), max_new_tokens=4)
    assert by_budget.stats.reads.whole.all(), "below the break-even"
    assert not by_name.stats.reads.whole[:, 2].any()


@pytest.mark.parametrize("value", [-1, 1.5, "always", True, None])
def test_bad_thresholds_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="dense_below"):
        quest_jax.Quest(64, dense_below=value)


def test_a_cache_that_stays_short_has_no_selection_in_its_program():
    policy = quest_jax.Quest(48, dense_layers=0, dense_below=1000)
    state = make(policy, capacity=256)
    view = quest_jax.LayerView(
        state.cache.kv[0], state.cache.meta[0], None, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), None
    )
    assert policy.is_dense(0, view) and not quest_jax.Quest(48, dense_layers=0).is_dense(0, view)
