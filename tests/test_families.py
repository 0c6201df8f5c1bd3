"""Every family through the paged cache: prompts whole and in chunks, decoding, and policies that select everything."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import quest_jax
from quest_jax.weights.families import FAMILIES

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "parity"
TOLERANCE = 1e-4


def model_type(folder: pathlib.Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and model_type(path) != "llama")


@functools.cache
def loaded(name: str) -> tuple[quest_jax.Params, dict[str, np.ndarray]]:
    return quest_jax.load(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")


def test_every_family_has_a_checkpoint():
    assert {model_type(FIXTURES / name) for name in NAMES} == set(FAMILIES) - {"llama"}


@pytest.mark.parametrize("chunk", [7, 16, None])
@pytest.mark.parametrize("length", [1, 17, 48])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_give_the_logits_of_transformers(name, length, chunk):
    params, expected = loaded(name)
    state = quest_jax.prefill(params, expected["tokens"][None, :length], page_size=4, chunk=chunk, capacity=64)
    np.testing.assert_allclose(state.logits[0], expected[f"logits_{length}"][-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "prefill_policy"),
    [(None, None), (quest_jax.Quest(64, dense_layers=0), quest_jax.QuoKA(64))],
    ids=["dense", "sparse"],
)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_logits_of_transformers(name, policy, prefill_policy):
    """A prompt of 13 tokens, then one token after the other; budgets hold everything, so nothing may be lost."""
    params, expected = loaded(name)
    tokens, start = expected["tokens"], 13
    options = dict(page_size=4, capacity=64, policy=policy, prefill_policy=prefill_policy)
    state = quest_jax.prefill(params, tokens[None, :start], **options)
    for end in range(start, len(tokens)):
        np.testing.assert_allclose(state.logits[0], expected["logits_stepwise"][end - 1], rtol=0, atol=TOLERANCE)
        state = quest_jax.feed_tokens(params, state, tokens[None, end : end + 1])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_layers_with_a_window_read_its_pages_only(name):
    params, expected = loaded(name)
    policy = quest_jax.Quest(8, dense_layers=0)
    out = quest_jax.generate(params, expected["tokens"][None], policy=policy, page_size=4, max_new_tokens=8)
    read, live = (np.asarray(count)[-1, :, 0] for count in (out.stats.reads.read, out.stats.reads.live))
    kv_heads = params.config.n_kv_heads
    for layer in range(params.config.n_layers):
        window = params.config.window(layer)
        pages = 2 if window is None else -(-(window - 1) // 4) + 1
        assert read[layer] <= pages * kv_heads < live[layer]
        assert window is None or read[layer] >= (window // 4) * kv_heads


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_library_keeps_it(name, tmp_path):
    params, _ = loaded(name)
    quest_jax.save(params, tmp_path / "model")
    again = quest_jax.load(tmp_path / "model")
    assert again.config == params.config
    for stored, restored in zip(*(jax.tree.leaves(one.weights) for one in (params, again)), strict=True):
        np.testing.assert_array_equal(stored, restored)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near(name):
    params, expected = quest_jax.load(FIXTURES / name, dtype="bfloat16"), loaded(name)[1]
    state = quest_jax.prefill(params, expected["tokens"][None], page_size=4)
    exact = expected["logits_48"]
    assert np.sqrt(np.mean((np.asarray(state.logits[0]) - exact[-1]) ** 2)) < 0.1 * exact.std()
    assert params.weights["embed"].dtype == jnp.bfloat16
