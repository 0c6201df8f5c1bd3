"""What the compiler makes of the decoder: one program for all inputs, no copies of weights, full precision."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models import llama, numbers
from quest_jax.models.config import LlamaConfig
from tests.models.dense import forward, init_dense

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    max_positions=64,
)
TOKENS = jax.ShapeDtypeStruct((2, 5), jnp.int32)
PRODUCTS = CONFIG.n_layers * len(("qkv", "out", "gate_up", "down")) + 1


def pass_queries(layer, q, k, v, state):
    return q, state


def lower_forward():
    weights, state = llama.abstract_weights(CONFIG), jax.eval_shape(lambda: init_dense(CONFIG, 2, 5))
    return jax.jit(forward, static_argnums=1).lower(weights, CONFIG, TOKENS, state)


def test_one_compilation_serves_all_tokens_and_positions():
    weights = llama.init_weights(CONFIG, jax.random.key(0))
    apply = jax.jit(lambda tokens, positions: llama.apply(weights, CONFIG, tokens, positions, pass_queries, 0))
    for shift in range(4):
        apply(jnp.full((1, 3), shift, jnp.int32), shift + jnp.arange(3, dtype=jnp.int32)[None])
    assert apply._cache_size() == 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_decode_step_writes_no_copy_of_a_weight(dtype, tied, batch):
    """Neither a transposed nor a widened one: all temporaries together are smaller than the smallest matrix."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    weights = llama.abstract_weights(config, dtype)
    smallest = min(leaf.size for leaf in jax.tree.leaves(weights) if leaf.ndim == 2)

    def step(weights, tokens, positions):
        hidden, _ = llama.apply(weights, config, tokens, positions, pass_queries, None)
        return llama.project_logits(weights, config, hidden)

    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    compiled = jax.jit(step).lower(weights, tokens, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < smallest * jnp.dtype(dtype).itemsize
    assert "conditional(" not in (
        compiled.as_text() or "conditional("
    )  # the branch per platform was chosen while compiling


def test_float32_products_ask_for_full_precision():
    """Else a TPU multiplies in bfloat16 and a GPU in TF32 by default."""
    lines = [line for line in lower_forward().as_text().splitlines() if "dot_general" in line]
    products = [line for line in lines if "batching_dims" not in line]  # those of the dense attention have them
    assert len(products) == PRODUCTS
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_every_stage_is_named_in_the_program():
    text = lower_forward().as_text(debug_info=True)
    stages = ["embed", "qkv", "rope", "attend", "out", "mlp", "norm", "logits"]
    assert [stage for stage in stages if not re.search(rf"/{stage}/", text)] == []


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (2, 64), (1, 2, 64)])
@pytest.mark.parametrize("contract", [0, 1])
def test_bfloat16_products_of_one_row_equal_those_of_many(shape, contract):
    """The padded product for one row returns the same numbers, in the shape asked for."""
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (64, 48) if contract == 0 else (48, 64), jnp.bfloat16)
    x = jax.random.normal(keys[1], shape, jnp.bfloat16)
    out = numbers.matmul(x, weight, jnp.float32, contract=contract)
    exact = np.asarray(x, np.float64) @ np.asarray(weight if contract == 0 else weight.T, np.float64)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)
