"""A model whose head dim fills no tile: on an accelerator its cache has padded rows, and nothing else is different."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.cache import cache_nbytes, rebuild_metadata
from quest_jax.models.config import LlamaConfig
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.params import Params, random_params
from tests.models_for_tests import SCALE

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=48, intermediate_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=80,
    max_positions=4096, eos_token_ids=(),
)  # fmt: skip
PROMPTS = np.random.default_rng(0).integers(0, 97, (2, 100))


@functools.cache
def model() -> Params:
    params = random_params(CONFIG, seed=0)
    scaled = jax.tree_util.tree_map_with_path(lambda path, w: w * SCALE.get(path[-1].key, 1), params.weights)
    return params.replace(weights=scaled)


@pytest.fixture(params=[("tpu", "TPU v5 lite"), ("gpu", "NVIDIA H200")], ids=["tpu", "gpu"])
def accelerator(request):
    return functools.partial(dispatch.target, *request.param)


@pytest.mark.slow
def test_decoding_is_what_it_is_without_padding(accelerator):
    # The policy reads 48 of 100 tokens, so scores count; XLA computes both, on this CPU.
    options = {"policy": quest_jax.Quest(48, dense_layers=1), "lengths": [100, 61], "implementation": "xla"}
    expected = quest_jax.prefill(model(), PROMPTS, capacity=128, **options)
    with accelerator():
        padded = quest_jax.prefill(model(), PROMPTS, capacity=128, **options)
    for _ in range(6):
        np.testing.assert_allclose(padded.logits, expected.logits, atol=2e-6 * float(jnp.abs(expected.logits).max()))
        expected, token = quest_jax.decode_step(model(), expected)
        with accelerator():
            padded, again = quest_jax.decode_step(model(), padded)
        np.testing.assert_array_equal(again, token)
    narrow, wide = expected.attention.cache, padded.attention.cache
    assert wide.model_shape == narrow.model_shape == (2, 2, 80)
    assert wide.kv[0].shape == (2, 16, 16, 2 * 128) and wide.meta[0].shape == (2, 2, 8, 2 * 128)
    for past in (wide.kv[0].reshape(-1, 2, 128), wide.meta[0].reshape(-1, 2, 128)):
        assert (past[..., 80:] == 0).all() and (past[..., :80] != 0).any()
    for stored, again in zip(wide.meta, rebuild_metadata(wide), strict=True):
        np.testing.assert_array_equal(stored, again)


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_a_prompt_read_by_quoka_is_what_it_is_without_padding(accelerator, granularity):
    policy = quest_jax.QuoKA(32, n_queries=4, chunk=16, granularity=granularity)
    options = {"prefill_policy": policy, "policy": policy, "lengths": [100, 61], "implementation": "xla"}
    expected = quest_jax.prefill(model(), PROMPTS, capacity=128, **options)
    with accelerator():
        padded = quest_jax.prefill(model(), PROMPTS, capacity=128, **options)
    np.testing.assert_allclose(padded.logits, expected.logits, atol=4e-6 * float(jnp.abs(expected.logits).max()))
    for wide, narrow in zip(padded.attention.cache.norms, expected.attention.cache.norms, strict=True):
        np.testing.assert_allclose(wide, narrow, rtol=1e-5)


def test_what_is_read_counts_as_it_is_stored(accelerator):
    options = {"budget": 64, "max_new_tokens": 2, "implementation": "xla"}
    here = quest_jax.generate(model(), PROMPTS, **options)
    with accelerator():
        there = quest_jax.generate(model(), PROMPTS, **options)
    np.testing.assert_array_equal(there.tokens, here.tokens)
    assert there.stats.page_bytes * 80 == here.stats.page_bytes * 128
    assert there.stats.meta_bytes * 80 == here.stats.meta_bytes * 128
    assert there.stats.share_read() == here.stats.share_read()


@pytest.mark.parametrize("layout", ["auto", "fused", "split"])
@pytest.mark.parametrize(("head_dim", "stored"), [(8, 64), (64, 64), (80, 128), (96, 128), (128, 128), (256, 256)])
def test_only_the_fused_layout_of_an_accelerator_is_padded(accelerator, layout, head_dim, stored):
    sizes = {"batch": 2, "capacity": 32, "dtype": jnp.bfloat16, "layout": layout}
    here = quest_jax.init_cache(3, 2, head_dim, **sizes)
    with accelerator():
        there = quest_jax.init_cache(3, 2, head_dim, **sizes)
        assert there.nbytes == cache_nbytes(3, 2, head_dim, **sizes)
    for cache, width in ((here, head_dim), (there, head_dim if layout == "split" else stored)):
        assert pool_shape(cache.kv[0]).head_dim == width and cache.meta[0].shape[-1] == 2 * width
        assert cache.model_shape == (3, 2, head_dim)
    assert here.nbytes == cache_nbytes(3, 2, head_dim, **sizes)


def test_on_a_cpu_no_op_of_a_decode_step_pads(accelerator, as_a_user):
    options = {"budget": 48, "implementation": "xla"}
    state = quest_jax.prefill(model(), PROMPTS, **options)
    assert " pad[" not in str(jax.make_jaxpr(quest_jax.decode_step)(model(), state))
    with accelerator():
        state = quest_jax.prefill(model(), PROMPTS, **options)
        assert " pad[" in str(jax.make_jaxpr(quest_jax.decode_step)(model(), state))
