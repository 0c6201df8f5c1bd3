"""What a selection keeps of real attention: the measure itself, and QuoKA's figures on a real model."""

import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import QuoKA, load, load_tokenizer
from quest_jax.evals import mass
from quest_jax.evals.capture import capture, listed, probabilities
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.pages import as_tokens
from quest_jax.policies.oracle import OracleChunk
from tests.models_for_tests import CONFIG, tiny

IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 200).tolist()


def test_captured_queries_and_keys_give_the_attention_of_the_model():
    """A prefix sees what the whole text sees of it, and rows of attention are distributions over the past."""
    found, prefix = capture(tiny(), IDS), capture(tiny(), IDS[:120])
    for layer in range(CONFIG.n_layers):
        np.testing.assert_allclose(found.chunk(layer, 0, 120), prefix.chunk(layer, 0, 120), atol=1e-5)
    view = found.view(1, 96, 128)
    attention = np.asarray(probabilities(found.chunk(1, 96, 128), view))
    assert attention.shape == (CONFIG.n_heads, 32, 256)
    np.testing.assert_allclose(attention.sum(axis=-1), 1, rtol=1e-5)
    for t in range(32):
        assert (attention[:, t, 97 + t :] == 0).all() and (attention[:, t, : 97 + t] > 0).all()


def test_marks_are_the_positions_that_are_listed():
    found = capture(tiny(), IDS)
    for granularity, unit in (("token", 1), ("page", 16)):
        policy = QuoKA(32, n_queries=4, granularity=granularity)
        view = found.view(1, 150, 182)
        selection = policy.choose(found.chunk(1, 150, 182), view, None)
        marks = np.asarray(listed(selection, unit, 256))
        for head in range(CONFIG.n_kv_heads):
            pages = np.asarray(selection.pages[0, head, : selection.counts[0, head]])
            assert set(np.flatnonzero(marks[head])) == {page * unit + i for page in pages for i in range(unit)}


def test_a_larger_budget_keeps_more_and_all_keeps_everything():
    policies = {f"{n}": QuoKA(n, n_queries=4, chunk=16, granularity="token") for n in (1, 32, 64)}
    kept = mass.run(tiny(), IDS, policies, chunk=16)
    assert kept["1"].mass.shape == kept["1"].error.shape == (CONFIG.n_layers - 2, 7, CONFIG.n_heads)
    assert 0 < kept["1"].mass.mean() < kept["32"].mass.mean() < kept["64"].mass.mean() < 1
    assert kept["1"].error.mean() > kept["32"].error.mean() > kept["64"].error.mean() > 0
    found = capture(tiny(), IDS)
    ((share, error),) = mass.measure(found, 1, 64, 16, (QuoKA(64, n_queries=4, granularity="token"),))
    np.testing.assert_allclose(share, 1, atol=1e-6)
    np.testing.assert_allclose(error, 0, atol=1e-6)


def test_the_error_is_that_of_attention_over_the_selected_tokens():
    found, policy = capture(tiny(), IDS), QuoKA(32, n_queries=4, granularity="token")
    ((_, error),) = mass.measure(found, 1, 96, 16, (policy,))
    view, q = found.view(1, 96, 112), found.chunk(1, 96, 112)
    out, _ = page_attention(q, view.kv, view.starts, view.lengths)
    selection = policy.choose(q, view, None)
    kv, _ = as_tokens(view.kv, None)
    sparse, _ = page_attention(q, kv, view.starts, view.lengths, pages=selection.pages, counts=selection.counts)
    expected = jnp.linalg.norm(sparse - out, axis=(1, 3))[0] / jnp.linalg.norm(out, axis=(1, 3))[0]
    np.testing.assert_allclose(error, expected, rtol=1e-4)


def test_no_choice_of_as_many_tokens_keeps_more_than_the_oracle():
    """Against every policy, and against the best of all lists, found in NumPy."""
    rules = {"far": QuoKA(32, n_queries=4, granularity="token"), "dot": QuoKA(32, score="dot", granularity="token")}
    kept = mass.run(tiny(), IDS, {"oracle": OracleChunk(32)} | rules, chunk=16)
    size = CONFIG.n_heads // CONFIG.n_kv_heads

    def by_group(name):
        return kept[name].mass.reshape(CONFIG.n_layers - 2, -1, CONFIG.n_kv_heads, size).sum(axis=-1)

    for name in rules:
        assert (by_group("oracle") >= by_group(name) - 1e-6).all()
        assert by_group("oracle").mean() > by_group(name).mean()
    found = capture(tiny(), IDS)
    view, q = found.view(1, 96, 112), found.chunk(1, 96, 112)
    attention = np.asarray(probabilities(q, view))
    ((share, _),) = mass.measure(found, 1, 96, 16, (OracleChunk(32),))
    for group in range(CONFIG.n_kv_heads):
        own = slice(size * group, size * (group + 1))
        heads = attention[own].sum(axis=1)  # [G, L], summed over the queries
        best = np.argsort(-heads.sum(axis=0)[:96], kind="stable")[:32]
        expected = (heads[:, best].sum(axis=1) + heads[:, 96:].sum(axis=1)) / 16
        np.testing.assert_allclose(share[own], expected, rtol=1e-5)


def test_chunks_are_those_where_every_budget_leaves_something_out():
    assert mass.starts_of(200, 16, 64) == [80, 96, 112, 128, 144, 160, 176]
    with pytest.raises(ValueError, match="after more than 190 tokens, the largest budget, got 200 tokens"):
        mass.starts_of(200, 16, 190)


@pytest.mark.slow(seconds=60)
def test_quoka_keeps_what_an_independent_measurement_found():
    """Measured elsewhere with another text of the kind: this much of the attention, the best choice that much."""
    tokenizer, params = load_tokenizer("smollm2-135m"), load("smollm2-135m")
    expected = {256: (0.931, 0.945), 512: (0.957, 0.969), 1024: (0.980, 0.987)}
    policies = {f"{budget}": QuoKA(budget, granularity="token") for budget in expected}
    kept = mass.run(
        params, mass.prose(tokenizer, 3072), policies | {f"oracle {budget}": OracleChunk(budget) for budget in expected}
    )
    for budget, (value, best) in expected.items():
        found, oracle = (kept[name].mass.mean() for name in (f"{budget}", f"oracle {budget}"))
        assert found == pytest.approx(value, abs=0.02) and oracle == pytest.approx(best, abs=0.02)
        assert oracle - found == pytest.approx(best - value, abs=0.01)


@pytest.mark.slow
def test_the_error_of_the_output_falls_as_the_budget_grows():
    """On real queries, keys and values."""
    tokenizer, params = load_tokenizer("smollm2-135m"), load("smollm2-135m")
    found = capture(params, mass.prose(tokenizer, 2048))
    policies = tuple(QuoKA(budget, granularity="token") for budget in (64, 128, 256, 512, 1024, 1920))
    layers = range(2, params.config.n_layers, 3)
    errors = np.mean([mass.measure(found, layer, 1920, 128, policies)[:, 1] for layer in layers], axis=(0, 2))
    assert (np.diff(errors) < 0).all(), errors
    assert errors[-1] < 1e-5
