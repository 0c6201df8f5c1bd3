import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.weights import assemble as module
from quest_jax.weights.assemble import assemble, match_tensors, target_dtype
from quest_jax.weights.stored import StoredTensor

CONFIG = LlamaConfig(
    vocab_size=11, hidden_size=6, intermediate_size=10, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=4, max_positions=8
)
NAMES = {part: part for part in ("embed", "norm", "lm_head")} | {
    part: f"{{}}.{part}" for part in ("attn_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
}
BLOCK = {
    "attn_norm": (6,), "q": (12, 6), "k": (4, 6), "v": (4, 6), "out": (6, 12), "mlp_norm": (6,), "gate": (10, 6),
    "up": (10, 6), "down": (6, 10),
}  # fmt: skip


def make_stored(config=CONFIG) -> dict[str, StoredTensor]:
    shapes = {"embed": (11, 6), "norm": (6,), "lm_head": (11, 6)}
    for layer in range(config.n_layers):
        shapes |= {f"{layer}.{part}": shape for part, shape in BLOCK.items()}
    arrays = {name: np.random.default_rng(len(name)).standard_normal(shape) for name, shape in shapes.items()}
    return {name: StoredTensor(name, a.shape, lambda i, j, a=a: a[i:j]) for name, a in arrays.items()}


@pytest.mark.parametrize("dtype", ["float32", np.float32, jnp.float32, np.dtype("float32")])
def test_target_dtype_spellings(dtype):
    assert target_dtype(dtype) == np.dtype("float32")


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_target_dtype_bfloat16(dtype):
    assert target_dtype(dtype) == jnp.dtype("bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "int8", np.float64, jnp.float8_e4m3fn, bool, None])
def test_target_dtype_refuses_others(dtype):
    with pytest.raises(ValueError, match='dtype: expected "float32" or "bfloat16", got'):
        target_dtype(dtype)


@pytest.mark.parametrize("dtype", ["fp32", 32, object(), {"a": 1}])
def test_target_dtype_refuses_what_is_no_dtype(dtype):
    with pytest.raises(TypeError, match='dtype: expected "float32" or "bfloat16", got'):
        target_dtype(dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_the_tree_is_that_of_the_model(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    stored = make_stored()
    if tied:
        del stored["lm_head"]
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        params = assemble(config, dtype, match_tensors(config, NAMES, stored, "file"), "file")
        abstract = abstract_weights(config, dtype)
        assert jax.tree.structure(params.weights) == jax.tree.structure(abstract)
        actual = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params.weights)
        assert actual == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)


def test_small_chunks_give_the_same(monkeypatch):
    matched = match_tensors(CONFIG, NAMES, make_stored(), "file")
    whole = assemble(CONFIG, jnp.dtype("float32"), matched, "file")
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    parts = assemble(CONFIG, jnp.dtype("float32"), matched, "file")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole.weights, parts.weights)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("1.down"), "1.down is missing"),
        (lambda s: s.update({"1.dawn": s.pop("1.down")}), "1.down is missing; 1.dawn is unknown"),
        (lambda s: (s.pop("1.down"), s.pop("norm")), "norm, 1.down are missing"),
        (lambda s: s.update(bias=s["norm"]), "bias is unknown"),
        (lambda s: s.update({"2.q": s["1.q"]}), "2.q is unknown"),
        (lambda s: s.update({"0.k": s["0.q"]}), "tensor 0.k: the config says (4, 6), the file has (12, 6)"),
        (lambda s: s.update(norm=s["embed"]), "tensor norm: the config says (6,), the file has (11, 6)"),
        (lambda s: [s.pop(f"0.{part}") for part in BLOCK], "0.attn_norm, 0.q, 0.k, 0.v, 0.out and 4 more are missing"),
    ],
)
def test_names_and_shapes_are_accounted_for(change, message):
    stored = make_stored()
    change(stored)
    with pytest.raises(ValueError, match=f"^file: .*{re.escape(message)}"):
        match_tensors(CONFIG, NAMES, stored, "file")


def test_a_number_of_layers_is_not_believed():
    config = dataclasses.replace(CONFIG, n_layers=2**31 - 1)
    with pytest.raises(ValueError, match="2147483647 layers, but there are 21 tensors"):
        match_tensors(config, NAMES, make_stored(), "file")


def test_memory_is_checked_before_reading(monkeypatch):
    def read(start, stop):
        raise AssertionError("read before the check")

    stored = {name: dataclasses.replace(tensor, read=read) for name, tensor in make_stored().items()}
    monkeypatch.setattr("quest_jax.memory.available_host_bytes", lambda: 2000)
    n_bytes = 4 * sum(int(np.prod(tensor.shape)) for tensor in stored.values())
    with pytest.raises(MemoryError, match=f"^file: needs {(n_bytes + 4 * 6 * 20) / 1e9:.2f} GB"):
        assemble(CONFIG, jnp.dtype("float32"), match_tensors(CONFIG, NAMES, stored, "file"), "file")


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e300),
        RopeConfig(theta=1.0, kind="yarn", factor=2.0, original_max_positions=8),
        RopeConfig(kind="yarn", factor=2.0, original_max_positions=8, beta_fast=0.0),
        RopeConfig(kind="yarn", factor=2.0, original_max_positions=8, beta_slow=-1.0),
        RopeConfig(kind="llama3", factor=2.0, original_max_positions=8, low_freq_factor=4.0, high_freq_factor=1.0),
        RopeConfig(kind="llama3", factor=2.0, original_max_positions=8, low_freq_factor=0.0),
        RopeConfig(kind="linear", factor=1e-300),
    ],
)
def test_rope_without_frequencies(rope):
    config = dataclasses.replace(CONFIG, rope=rope)
    with pytest.raises(ValueError, match="^file: .*RoPE"):
        assemble(config, jnp.dtype("float32"), match_tensors(config, NAMES, make_stored(), "file"), "file")
