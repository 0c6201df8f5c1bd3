"""What quantised weights change: the measure against arithmetic of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import load, load_tokenizer, quantize
from quest_jax.evals import mass, weights
from tests.models.dense import init_dense, one_shot
from tests.models_for_tests import CONFIG, tiny

IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 70).tolist()


def logits(params):
    state = init_dense(CONFIG, 1, len(IDS))
    return np.asarray(one_shot(params.weights, CONFIG, jnp.asarray([IDS]), state)[0][0, :-1], np.float64)


@pytest.mark.slow
def test_changes_are_those_of_the_logits(monkeypatch):
    monkeypatch.setattr(weights, "_TOKENS", 32)  # two whole pieces and a part
    steps = []
    nll, found = weights.run(tiny(), IDS, progress=lambda done, every: steps.append((done, every)))
    assert steps == [(1, 2), (2, 2)] and list(found) == ["int8", "int4"]
    one = logits(tiny())
    p = np.asarray(jax.nn.log_softmax(one))
    rows = np.arange(len(IDS) - 1), IDS[1:]
    assert nll == pytest.approx(-p[rows].mean(), abs=1e-4)
    for kind, change in found.items():
        made = quantize(tiny(), kind)
        two = logits(made)
        q = np.asarray(jax.nn.log_softmax(two))
        assert change.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
        assert change.largest == pytest.approx(np.abs(one - two).max(), rel=1e-3)
        assert change.rms == pytest.approx(np.sqrt(np.mean((one - two) ** 2)), rel=1e-3)
        assert change.kl == pytest.approx((np.exp(p) * (p - q)).sum(axis=-1).mean(), rel=1e-3)
        assert change.agreement == pytest.approx(np.mean(one.argmax(-1) == two.argmax(-1)), abs=1e-6)
        assert change.nll == pytest.approx(-q[rows].mean() - nll, abs=1e-3)
    assert found["int8"].rms < found["int4"].rms and found["int8"].kl < found["int4"].kl


def test_a_text_without_a_next_token_is_refused():
    with pytest.raises(
        ValueError, match="ids: expected a text of at least 2 tokens, so that there is a next one, got 1"
    ):
        weights.run(tiny(), [1])


@pytest.mark.slow
def test_the_real_model_in_8_bits_says_nearly_the_same():
    ids = mass.prose(load_tokenizer("smollm2-135m"), 256)
    _, found = weights.run(load("smollm2-135m"), ids, ("int8",))
    assert found["int8"].kl < 0.02 and found["int8"].agreement > 0.9 and abs(found["int8"].nll) < 0.02
