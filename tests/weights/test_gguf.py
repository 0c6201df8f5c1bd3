import re
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.weights import assemble
from quest_jax.weights.gguf import load_gguf
from quest_jax.weights.llama3_factors import llama3_factors
from tests.weights.synthetic import (
    expected_weights,
    gguf_metadata,
    gguf_tensors,
    make_config,
    make_tensors,
    write_gguf,
)

KIND = gguf.GGMLQuantizationType
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def make_file(path, kind=KIND.F32, extra=None, config=None, **changes):
    config = make_config() if config is None else config
    tensors = make_tensors(config)
    return write_gguf(path, gguf_metadata(config, **changes), gguf_tensors(config, tensors) | (extra or {}), kind)


def assert_equal(weights, expected, dtype=FLOAT32):
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    for actual, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(np.asarray(actual), wanted.astype(dtype))


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 12}, {"tie_word_embeddings": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_values_and_permutation(tmp_path, changes, dtype, monkeypatch):
    """The very numbers of the checkpoint the file was converted from, q and k in rotate-half order again."""
    config = make_config(**changes)
    path = make_file(tmp_path / "model.gguf", config=config)
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", 1)  # so that a matrix takes several reads of whole heads
    params = load_gguf(path, dtype)
    assert_equal(params.weights, expected_weights(config, make_tensors(config)), dtype)
    assert params.config.tie_word_embeddings == bool(config["tie_word_embeddings"])
    assert params.config.head_dim == config.get("head_dim", 8)


@pytest.mark.parametrize("kind", [KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1], ids=lambda kind: kind.name)
def test_quantised(tmp_path, kind):
    config = make_config()
    tensors = {
        name: tensor if tensor.ndim == 1 else gguf.dequantize(gguf.quantize(tensor, kind), kind)
        for name, tensor in make_tensors(config).items()
    }
    params = load_gguf(make_file(tmp_path / "model.gguf", kind), FLOAT32)
    assert_equal(params.weights, expected_weights(config, tensors))


def test_llama3_frequencies(tmp_path):
    config = make_config(head_dim=64)
    factors = {"rope_freqs.weight": llama3_factors(1e4, 64, 8.0, 8192).astype(np.float32)}
    params = load_gguf(make_file(tmp_path / "model.gguf", extra=factors, config=config), FLOAT32)
    assert (params.config.rope.kind, params.config.rope.factor) == ("llama3", 8.0)
    assert_equal(params.weights, expected_weights(config, make_tensors(config)))


@pytest.mark.parametrize(
    ("extra", "kind", "message"),
    [
        (
            {"blk.0.attn_q.bias": np.zeros(32, np.float32)},
            NotImplementedError,
            "blk.0.attn_q.bias: this decoder has no",
        ),
        ({"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}, ValueError, "ffn_gate_exps.weight is unknown"),
        (
            {"blk.0.attn_q.weight": np.zeros((32, 31), np.float32)},
            ValueError,
            "attn_q.weight: the config says (32, 32)",
        ),
        (
            {"token_embd.weight": np.zeros((41, 32), np.float32)},
            ValueError,
            "vocab_size is 40, but the embedding has 41",
        ),
        ({"rope_freqs.weight": np.zeros((2, 2), np.float32)}, ValueError, "rope_freqs.weight: expected one number per"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, extra, kind, message):
    path = make_file(tmp_path / "model.gguf", extra=extra)
    with pytest.raises(kind, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        load_gguf(path, FLOAT32)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"])
def test_missing_tensors(tmp_path, name):
    config = make_config()
    tensors = gguf_tensors(config, make_tensors(config))
    del tensors[name]
    path = write_gguf(tmp_path / "model.gguf", gguf_metadata(config), tensors)
    with pytest.raises(ValueError, match=f"expected .*{re.escape(name)}"):
        load_gguf(path, FLOAT32)


def test_a_config_that_promises_too_much(tmp_path):
    path = make_file(tmp_path / "model.gguf", llama__block_count=2**31 - 1)
    with pytest.raises(ValueError, match="block_count: expected at most 4096 layers, got 2147483647"):
        load_gguf(path, FLOAT32)


@pytest.mark.parametrize("kind", [KIND.F32, KIND.F16, KIND.Q8_0], ids=lambda kind: kind.name)
def test_peak_memory_is_the_model_plus_one_array(tmp_path, monkeypatch, kind):
    config = make_config(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    path = make_file(tmp_path / "model.gguf", kind, config=config)
    chunk, largest = 1 << 18, 4096 * 256 * 4
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(assemble, "_to_device", lambda array: jnp.zeros(()))  # the model itself is elsewhere
    load_gguf(path, FLOAT32)  # imports, and what JAX keeps of the abstract weights
    tracemalloc.start()
    load_gguf(path, FLOAT32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < largest + 6 * chunk  # a dequantiser holds a few copies of its chunk


def test_every_truncation_is_noticed(tmp_path):
    """At each offset of the header and at many of the data; only the padding after the last tensor may be lost."""
    whole = make_file(tmp_path / "whole.gguf").read_bytes()
    data = next(iter(gguf.GGUFReader(tmp_path / "whole.gguf").tensors)).data_offset
    path = tmp_path / "model.gguf"
    for size in [*range(0, data, 7), *range(data, len(whole), 4001), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}"):
            load_gguf(path, FLOAT32)


def test_random_damage_is_noticed_or_harmless(tmp_path):
    """Some bytes of the header changed: a typed error that names the file, or a model; never a crash or much memory."""
    whole = make_file(tmp_path / "whole.gguf").read_bytes()
    data = min(t.data_offset for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors)
    path = tmp_path / "model.gguf"
    load_gguf(tmp_path / "whole.gguf", FLOAT32)
    rng = np.random.default_rng(0)
    refused = 0
    tracemalloc.start()
    for _ in range(160):
        damaged = bytearray(whole)
        for position in rng.integers(0, data, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            params = load_gguf(path, FLOAT32)
        except (ValueError, NotImplementedError) as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert params.config.n_layers == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 100
    assert peak < 100 * len(whole)
