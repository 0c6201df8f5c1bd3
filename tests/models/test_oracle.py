"""SmolLM2-135M-Instruct, the real model, against values of transformers in float32 on six real prompts."""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from quest_jax.weights.load import load
from tests.models.dense import init_dense, one_shot

pytestmark = pytest.mark.slow

ORACLE = json.loads(
    (pathlib.Path(__file__).parents[1] / "fixtures" / "oracle" / "SmolLM2-135M-Instruct.Q4_1.json").read_text()
)
PROMPTS = {prompt["name"]: prompt for prompt in ORACLE["prompts"]}
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def logits_of():
    """name -> logits float32 [T, V]; short prompts share one compiled length: padding behind changes nothing."""
    params = load("smollm2-135m", dtype=jnp.float32)

    @functools.cache
    def compute(name: str) -> np.ndarray:
        ids = PROMPTS[name]["ids"]
        length = max(64, len(ids))
        tokens = jnp.array([ids + [0] * (length - len(ids))], jnp.int32)
        logits, _ = one_shot(params.weights, params.config, tokens, init_dense(params.config, 1, length))
        return np.asarray(logits[0, : len(ids)])

    return compute


@pytest.mark.parametrize("name", PROMPTS)
def test_every_recorded_logit(name, logits_of):
    logits, prompt = logits_of(name), PROMPTS[name]
    for position, expected in prompt["positions"].items():
        row = logits[int(position)]
        np.testing.assert_allclose(row[:8], expected["first8"], rtol=0, atol=TOLERANCE)
        assert row.mean() == pytest.approx(expected["logit_mean"], abs=TOLERANCE)
        assert row.std() == pytest.approx(expected["logit_std"], abs=TOLERANCE)
    last = logits[-1]
    np.testing.assert_allclose(last[prompt["top5_ids"]], prompt["top5_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        log_softmax(last)[prompt["top5_ids"]], prompt["top5_logprobs"], rtol=0, atol=2 * TOLERANCE
    )


@pytest.mark.parametrize("name", PROMPTS)
def test_argmax_at_every_position(name, logits_of):
    """The recorded winner wins here too, unless the two best differ by less than both computations may."""
    logits, winners = logits_of(name), PROMPTS[name]["argmax_all"]
    assert len(winners) == len(logits)
    behind = logits.max(axis=-1) - np.take_along_axis(logits, np.array(winners)[:, None], axis=-1)[:, 0]
    assert behind.max() <= 2 * TOLERANCE
    assert np.mean(behind == 0) > 0.99


@pytest.mark.parametrize("name", PROMPTS)
def test_mean_negative_log_likelihood(name, logits_of):
    ids = np.array(PROMPTS[name]["ids"])
    of_next = np.take_along_axis(log_softmax(logits_of(name)[:-1], axis=-1), ids[1:, None], axis=-1)
    assert -of_next.mean() == pytest.approx(PROMPTS[name]["nll_mean"], abs=TOLERANCE)
