"""Logits of tiny random checkpoints against what transformers computed for them (tests/parity/record.py)."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from quest_jax.models.config import RopeConfig, RopeKind
from quest_jax.params import Params
from quest_jax.weights.families import FAMILIES
from quest_jax.weights.load import load
from tests.models.dense import init_dense, one_shot, stepwise

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "parity"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
LENGTHS = (1, 17, 48)
TOLERANCE = 1e-4


@functools.cache
def load_fixture(name: str, dtype=jnp.float32) -> Params:
    return load(FIXTURES / name, dtype=dtype)


@functools.cache
def recorded(name: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / name / "expected.safetensors")


def test_the_fixtures_cover_what_they_promise():
    configs = {name: load_fixture(name).config for name in NAMES}
    assert {config.rope.kind for config in configs.values()} == set(RopeKind.__args__)
    assert {config.group_size for config in configs.values()} == {1, 2, 3, 4}
    assert any(config.head_dim != config.hidden_size // config.n_heads for config in configs.values())
    assert {config.tie_word_embeddings for config in configs.values()} == {False, True}
    assert configs["dynamic"].max_positions < max(LENGTHS)
    models = {json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert models == set(FAMILIES)
    assert all(recorded(name)[f"logits_{max(LENGTHS)}"].std() > 1 for name in NAMES)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_one_shot(name, length):
    params, expected = load_fixture(name), recorded(name)
    tokens = expected["tokens"][None, :length]
    logits, _ = one_shot(params.weights, params.config, tokens, init_dense(params.config, 1, length))
    np.testing.assert_allclose(logits[0], expected[f"logits_{length}"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    """For dynamic NTK too, where it differs from one shot: early keys were turned with the base of their time."""
    params, expected = load_fixture(name), recorded(name)
    logits = stepwise(params.weights, params.config, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits_stepwise"], rtol=0, atol=TOLERANCE)
    difference = np.abs(expected["logits_stepwise"] - expected["logits_48"]).max()
    grows = params.config.rope.kind in ("dynamic", "longrope")
    assert difference > 0.01 if grows else difference < TOLERANCE


@pytest.mark.parametrize("name", ["bfloat16", "gqa", "tied", "yarn"])
def test_bfloat16_stays_near(name):
    params, expected = load_fixture(name, jnp.bfloat16), recorded(name)
    state = init_dense(params.config, 1, 48, jnp.bfloat16)
    logits, _ = one_shot(params.weights, params.config, expected["tokens"][None], state)
    assert {leaf.dtype for leaf in jax.tree.leaves(params.weights)} == {jnp.dtype(jnp.bfloat16)}
    error = np.asarray(logits[0]) - expected["logits_48"]
    assert np.sqrt(np.mean(error**2)) < 0.05 * expected["logits_48"].std()


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "yarn_mscale", "llama3"])
def test_another_rope_would_show(name):
    """Guards the tolerance: the scaling of each checkpoint moves the logits far beyond it."""
    params, expected = load_fixture(name), recorded(name)
    config = dataclasses.replace(params.config, rope=RopeConfig(theta=params.config.rope.theta))
    logits, _ = one_shot(params.weights, config, expected["tokens"][None], init_dense(config, 1, 48))
    assert np.abs(logits[0] - expected["logits_48"]).max() > 1000 * TOLERANCE


def test_another_order_of_heads_would_show():
    """Guards the tolerance: query heads 1 and 2 belong to different KV heads; swapping them must not go unnoticed."""
    params, expected = load_fixture("gqa"), recorded("gqa")
    width = params.config.head_dim
    first, second = slice(width, 2 * width), slice(2 * width, 3 * width)
    qkv = params.weights["layer_0"]["qkv"]
    qkv = qkv.at[:, first].set(qkv[:, second]).at[:, second].set(qkv[:, first])
    weights = {**params.weights, "layer_0": {**params.weights["layer_0"], "qkv": qkv}}
    logits, _ = one_shot(weights, params.config, expected["tokens"][None], init_dense(params.config, 1, 48))
    assert np.abs(logits[0] - expected["logits_48"]).max() > 1000 * TOLERANCE
