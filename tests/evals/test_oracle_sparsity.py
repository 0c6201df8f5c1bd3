"""How many tokens each layer needs: decoding with one sparse layer against the text at once in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.evals import oracle_sparsity
from quest_jax.evals.oracle_sparsity import Sparsity
from quest_jax.models import llama
from quest_jax.params import Params
from tests.models_for_tests import DEEP, deep

IDS, DECODED = [(7 * i * i + i) % 97 for i in range(90)], 10
BUDGETS = (4, 20, 89)


def predicted_at_once(params, sparse_layer, budget):
    """Log-probabilities ``[DECODED, V]``, all in one pass; the last queries of one layer see their best tokens only."""
    config, first = params.config, len(IDS) - DECODED - 1

    def attend(layer, q, k, v, state):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        group, out = config.n_heads // config.n_kv_heads, np.zeros(q.shape)
        for at in range(len(q)):
            for kv in range(config.n_kv_heads):
                heads = slice(kv * group, (kv + 1) * group)
                scores = q[at, heads] @ k[: at + 1, kv].T / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                if layer == sparse_layer and at >= first:
                    mass = weights.sum(axis=0)
                    mass[-1] = np.inf
                    left_out = np.argsort(-mass, kind="stable")[budget:]
                    weights[:, left_out] = 0
                    weights /= weights.sum(axis=1, keepdims=True)
                out[at, heads] = weights @ v[: at + 1, kv]
        return jnp.asarray(out, jnp.float32)[None], state

    tokens = jnp.asarray(IDS)[None]
    hidden, _ = llama.apply(params.weights, config, tokens, jnp.arange(len(IDS))[None], attend, None)
    logits = llama.project_logits(params.weights, config, hidden)[0]
    return np.asarray(jax.nn.log_softmax(logits), np.float64)[first:-1]


def nll_of(found):
    return -found[np.arange(DECODED), IDS[-DECODED:]].mean()


def shallow():
    """The first two layers."""
    params = deep()
    weights = {name: part for name, part in params.weights.items() if name not in ("layer_2", "layer_3")}
    return Params(weights, dataclasses.replace(params.config, n_layers=2))


@pytest.fixture(scope="module")
def found():
    return oracle_sparsity.run(shallow(), IDS, budgets=BUDGETS, decoded=DECODED, page_size=8)


@pytest.mark.slow
def test_decoding_with_one_sparse_layer_is_the_text_at_once(found):
    assert found.nll.shape == (2, len(BUDGETS)) and found.budgets == BUDGETS
    dense = predicted_at_once(shallow(), None, 0)
    assert found.dense == pytest.approx(nll_of(dense), abs=1e-4)
    for layer in range(2):
        for i, budget in enumerate(BUDGETS[:2]):
            want = predicted_at_once(shallow(), layer, budget)
            assert found.nll[layer, i] == pytest.approx(nll_of(want), abs=1e-4), (layer, budget)
            kl = (np.exp(dense) * (dense - want)).sum(axis=1).mean()
            assert found.kl[layer, i] == pytest.approx(kl, abs=1e-4) and kl > 1e-3


@pytest.mark.slow
def test_a_budget_that_holds_the_text_changes_nothing_and_a_small_one_does(found):
    np.testing.assert_array_equal(found.nll[:, -1], found.dense)
    np.testing.assert_array_equal(found.gaps()[:, -1], 0)
    np.testing.assert_array_equal(found.gaps("kl")[:, -1], 0)
    assert (abs(found.gaps("nll")[:, 0]) > 1e-3).all()
    assert oracle_sparsity._predict._cache_size() == 1, "one program, whatever the layer"


def test_what_a_layer_needs():
    nll = np.log([[9.0, 10.005, 10.02, 10.0], [11.0, 10.009, 10.0, 9.0], [10.0] * 4, [10.0, 10.0, 10.0, 10.05]])
    kl = np.array([[0.5, 0.02, 0.01, 0.001], [0.0] * 4, [0.02] * 4, [0.04, 0.03, 0.01, 0.009]])
    found = Sparsity(np.log(10.0), nll, kl, (16, 32, 64, 128), 200, 64)
    # Luck with fewer tokens does not count where more are not enough.
    assert found.needed() == [128, 32, 16, 200]
    assert found.needed(gap=0.1) == [16, 32, 16, 16]
    assert found.needed(measure="nll") == [16, 32, 16, 16]
    row = oracle_sparsity.as_json(found)
    assert row["needed"]["perplexity"] == [128, 32, 16, 200] and row["needed"]["kl"] == [64, 16, 200, 64]
    assert row["gap"] == 0.01 and found.needed(measure="kl") == row["needed"]["kl"]
    np.testing.assert_allclose(row["nll_by_layer_and_budget"], nll, atol=1e-6)
    assert oracle_sparsity.check(2048, 64, ()) == (16, 32, 64, 128, 256, 512, 1024)
    assert oracle_sparsity.check(2049, 64, ())[-1] == 2048 and oracle_sparsity.check(99, 9, (32, 8, 8)) == (8, 32)


@pytest.mark.parametrize(("options", "message"), [
    ({"decoded": 0}, "decoded: expected at least 1, of a text with 2 tokens before, got 0 of 90"),
    ({"decoded": 89}, "got 89 of 90"), ({"budgets": (0, 8)}, r"budgets: expected at least 1 .* got \[0, 8\]"),
    ({"budgets": (90,)}, r"less than the text of 90 tokens, got \[90\]"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        oracle_sparsity.run(deep(), IDS, **options)


def test_a_model_with_windows_is_refused():
    params = deep().replace(config=dataclasses.replace(DEEP, windows=(8, 0, 8, 0)))
    with pytest.raises(NotImplementedError, match="one with windows"):
        oracle_sparsity.run(params, IDS, decoded=DECODED)
