"""Quantised weights from files and back: the same numbers whatever the way, within the memory that is announced."""

import json
import pathlib
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.models.llama import abstract_weights
from quest_jax.models.quant import QuantArray
from quest_jax.weights import quantize as module
from quest_jax.weights.assemble import assemble, load_bytes, match_tensors
from quest_jax.weights.checkpoint import MARKER
from quest_jax.weights.quantize import MATRICES, quantize, quantize_array, quantize_tree
from tests.models_for_tests import tiny
from tests.weights.synthetic import (
    gguf_metadata,
    gguf_tensors,
    make_config,
    make_tensors,
    write_gguf,
    write_huggingface,
)
from tests.weights.test_assemble import CONFIG, NAMES, make_stored

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "parity"
KINDS = ["int8", "int4"]


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa", "tied", "qwen3_moe", "gpt_oss", "gemma3"])
def test_loading_is_quantising_what_loads(name, kind):
    """Norms, biases, sinks and routers as they are; every matrix and embedding in integers, and stacks of experts."""
    exact, made = (quest_jax.load(FIXTURES / name, weights=weights) for weights in (None, kind))
    assert_same(made, quantize(exact, kind))
    assert (made.quantized, made.dtype) == (kind, jnp.float32)

    def is_quantized(leaf):
        return isinstance(leaf, QuantArray)

    for path, leaf in jax.tree_util.tree_leaves_with_path(made.weights, is_leaf=is_quantized):
        assert is_quantized(leaf) == (path[-1].key in MATRICES)
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {
        jnp.dtype(name) for name in ("float32", "int8" if kind == "int8" else "uint8")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_computes_with_the_same_integers(kind):
    """They are rounded once, from float32, whatever the model computes in."""
    wide, narrow = (quest_jax.load(FIXTURES / "gqa", dtype=dtype, weights=kind) for dtype in ("float32", "bfloat16"))
    assert narrow.dtype == jnp.bfloat16 == narrow.weights["layer_0"]["attn_norm"].dtype
    assert_same(wide.weights["layer_0"]["qkv"], narrow.weights["layer_0"]["qkv"])
    assert_same(wide.weights["embed"], narrow.weights["embed"])


def test_every_format(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    folder = write_huggingface(tmp_path / "hf", config, tensors)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata(config), gguf_tensors(config, tensors))
    quest_jax.save(quest_jax.load(folder), tmp_path / "own")
    one, two, three = (quest_jax.load(path, weights="int8") for path in (folder, file, tmp_path / "own"))
    assert_same(one.weights, two.weights)
    assert_same(one, three)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tied", "gpt_oss"])
def test_a_checkpoint_keeps_every_bit(name, kind, tmp_path):
    params = quest_jax.load(FIXTURES / name, weights=kind, dtype="bfloat16")
    quest_jax.save(params, tmp_path / "model")
    assert_same(quest_jax.load(tmp_path / "model"), params)
    assert_same(quest_jax.load(tmp_path / "model", weights=kind), params)
    assert_same(quest_jax.load(tmp_path / "model", dtype="float32").weights["embed"], params.weights["embed"])
    assert quest_jax.load_config(tmp_path / "model") == params.config
    other = "int4" if kind == "int8" else "int8"
    with pytest.raises(ValueError, match=f"model: weights: these are {kind}, got {other}; load the original"):
        quest_jax.load(tmp_path / "model", weights=other)


@pytest.mark.parametrize(
    ("stated", "message"),
    [("int3", "weights: expected .* got 'int3'"), ("int4", "calls for .* stored is"), (None, "calls for .* stored is")],
)
def test_a_checkpoint_that_states_other_weights(stated, message, tmp_path):
    quest_jax.save(quest_jax.load(FIXTURES / "tied", weights="int8"), tmp_path / "model")
    header = json.loads((tmp_path / "model" / MARKER).read_text())
    (tmp_path / "model" / MARKER).write_text(json.dumps(header | {"weights": stated}))
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'model'))}.*{message}"):
        quest_jax.load(tmp_path / "model")


def test_saving_refuses_parts_that_do_not_belong(tmp_path):
    params = quantize(tiny(), "int8")
    embed = params.weights["embed"]
    broken = params.replace(weights=params.weights | {"embed": embed.replace(scales=embed.scales[:-1])})
    with pytest.raises(
        ValueError, match=r"embed'\].scales: the config calls for float32\[97, 1\], got float32\[96, 1\]"
    ):
        quest_jax.save(broken, tmp_path / "model")


@pytest.mark.parametrize("weights", ["int3", "", "INT8", 8, True, jnp.int8])
def test_other_kinds_are_refused_before_anything_is_read(as_a_user, weights):
    with pytest.raises(ValueError, match=r'weights: expected "int8", "int4" or None for full precision, got '):
        quest_jax.load("no-such-path", weights=weights)


def test_chunks_give_the_same(monkeypatch):
    array = np.random.default_rng(0).standard_normal((3, 70, 33)).astype(np.float32)
    whole = [quantize_array(array, kind, -2, "w") for kind in KINDS]
    flat = [quantize_array(array[0], kind, -1, "w") for kind in KINDS]
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    assert_same(whole, [quantize_array(array, kind, -2, "w") for kind in KINDS])
    assert_same(flat, [quantize_array(array[0], kind, -1, "w") for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_quantised_model(kind, monkeypatch):
    matched = match_tensors(CONFIG, NAMES, make_stored(), "file")
    kept, staged = load_bytes(quantize_tree(abstract_weights(CONFIG, jnp.float32), kind))
    made = assemble(CONFIG, np.dtype("float32"), matched, "file", kind)
    assert kept == nbytes(made)
    # The array that takes most on the way: in float32, and what it becomes.
    matrices = [made.weights["embed"], made.weights["lm_head"], *made.weights["layer_0"].values()]
    matrices = [leaf for leaf in matrices if isinstance(leaf, QuantArray)]
    assert staged == max(4 * int(np.prod(leaf.shape)) + leaf.nbytes for leaf in matrices)
    asked = []
    monkeypatch.setattr("quest_jax.weights.assemble.check_memory", lambda *args: asked.append(args))
    assemble(CONFIG, np.dtype("float32"), matched, "file", kind)
    assert asked == [(kept, staged, "file")]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("kind", KINDS)
def test_quantising_takes_little_more_than_the_result(kind, axis, monkeypatch):
    """The peak of numpy's memory: the integers and scales, and chunks."""
    array = np.ones((4096, 2048), np.float32)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1 << 18)
    tracemalloc.start()
    made = quantize_array(array, kind, axis, "w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < made.nbytes + (1 << 22) < array.nbytes
