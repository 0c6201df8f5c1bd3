"""Every family as GGUF gives the config and the weights of the Hugging Face folder it was converted from."""

import dataclasses
import json
import pathlib
import re

import gguf
import jax
import numpy as np
import pytest

import quest_jax
from quest_jax.models.config import RopeConfig
from quest_jax.weights import assemble
from quest_jax.weights.gguf_config import parse_metadata
from quest_jax.weights.gguf_families import ARCHITECTURES
from tests.weights.gguf_conversion import CASES, FIXTURES, convert, make_case, make_folder, mxfp4_tensor, write
from tests.weights.synthetic import write_gguf

LLAMA_CPP = pathlib.Path(__file__).parents[1] / "fixtures" / "gguf" / "llama_cpp.json"
NORMS = ("norm", "attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_out_norm", "mlp_out_norm")


def as_stored(config):
    """A config after its numbers went through the float32 of a GGUF file, and its norms' offset into the weights."""
    rope = config.rope
    for name in ("short_factors", "long_factors"):
        rope = dataclasses.replace(rope, **{name: tuple(float(np.float32(x)) for x in getattr(rope, name))})
    window_rope = config.window_rope if config.windows else None
    eps = float(np.float32(config.rms_norm_eps))
    return dataclasses.replace(config, rope=rope, window_rope=window_rope, rms_norm_eps=eps, norm_offset=0.0)


def test_every_architecture_has_a_case(tmp_path):
    found = {convert(FIXTURES / name)[0]["general.architecture"] for name, *_ in CASES.values()}
    assert found == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_the_config_and_weights_of_the_checkpoint(tmp_path, case, monkeypatch):
    folder, path = make_case(tmp_path, case)
    expected = quest_jax.load(folder)
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", 1)  # so that a matrix takes several reads
    params = quest_jax.load(path)
    assert params.config == as_stored(expected.config)
    assert quest_jax.load_config(path) == params.config
    assert jax.tree.structure(params.weights) == jax.tree.structure(expected.weights)

    def check(keys, actual, wanted):
        offset = np.float32(expected.config.norm_offset if keys[-1].key in NORMS else 0)
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted) + offset)

    jax.tree_util.tree_map_with_path(check, params.weights, expected.weights)


def test_the_offset_of_the_norms_of_gemma3(tmp_path):
    """Of all cases the one whose weights are not those of the checkpoint; it computes the same."""
    folder, path = make_case(tmp_path, "gemma3")
    tokens = np.arange(7, 55, dtype=np.int32)[None]
    logits = [np.asarray(quest_jax.prefill(quest_jax.load(it), tokens, page_size=4).logits) for it in (folder, path)]
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", json.loads(LLAMA_CPP.read_text())["logprobs"])
def test_what_llama_cpp_computes(tmp_path, case):
    """The file says to llama.cpp what it says to us; it computes in less than float32, by up to 0.02 here."""
    recorded = json.loads(LLAMA_CPP.read_text())
    params = quest_jax.load(make_case(tmp_path, case)[1])
    state = quest_jax.prefill(params, np.array([recorded["tokens"]], np.int32), page_size=4)
    logprobs = jax.nn.log_softmax(state.logits[0])
    np.testing.assert_allclose(logprobs, recorded["logprobs"][case], rtol=0, atol=0.03)


def test_mxfp4_experts(tmp_path, monkeypatch):
    """The blocks of a Hugging Face checkpoint, repacked: the same numbers, exactly."""
    rng = np.random.default_rng(0)
    folder = make_folder(tmp_path, "gpt_oss", intermediate_size=32)
    metadata, tensors = convert(folder)
    metadata["gpt-oss.expert_feed_forward_length"] = 32
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    wanted = {}
    for layer in range(2):
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps"
            blocks = rng.integers(0, 256, (6, 32, 1, 16), np.uint8)
            scales = rng.integers(120, 134, (6, 32, 1), np.uint8)
            numbers = values[np.stack([blocks & 15, blocks >> 4], -1)].reshape(6, 32, 32)
            wanted[f"{layer}{part}"] = numbers * np.exp2(scales.astype(np.float32) - 127)
            tensors[f"{name}.weight"] = mxfp4_tensor(blocks, scales)
            tensors[f"{name}.bias"] = np.zeros((6, 32), np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", 1)
    params = quest_jax.load(write_gguf(tmp_path / "model.gguf", metadata, tensors, kind, floats=True))
    for layer in range(2):
        block = params.weights[f"layer_{layer}"]
        for x in range(6):
            gate_up = np.concatenate([wanted[f"{layer}gate"][x], wanted[f"{layer}up"][x]]).T
            np.testing.assert_array_equal(block["experts_gate_up"][x], gate_up)
            np.testing.assert_array_equal(block["experts_down"][x], wanted[f"{layer}down"][x].T)


@pytest.mark.parametrize(
    ("layers", "width", "expected"),
    [(62, 128, (5376 // 32) ** -0.5), (48, 256, 256**-0.5), (26, 256, 256**-0.5)],
)
def test_the_query_scale_of_gemma3(layers, width, expected):
    config = parse("gemma3", {"block_count": layers, "attention.key_length": width, "attention.value_length": width,
                              "embedding_length": 5376, "attention.head_count": 32})  # fmt: skip
    assert config.query_scale == expected
    assert config.embed_scale == 5376**0.5
    assert [layer for layer in range(layers) if not config.windows[layer]] == list(range(5, layers, 6))


@pytest.mark.parametrize(
    ("layers", "positions", "window", "expected"),
    [(32, 4096, None, 2047), (40, 4096, None, 2047), (32, 131072, None, 0), (32, 4096, 0, 0), (32, 8192, 512, 512)],
)
def test_the_window_of_phi3(layers, positions, window, expected):
    config = parse("phi3", {"block_count": layers, "context_length": positions, "attention.sliding_window": window})
    assert config.windows == ((expected,) * layers if expected else ())


def test_the_temperature_of_early_phi3():
    """Its converter wrote YaRN's, where LongRoPE's was not meant."""
    factors = {f"rope_factors_{length}.weight": np.full(6, 2, np.float32) for length in ("long", "short")}
    rope = parse("phi3_longrope", {"rope.scaling.attn_factor": 1.25}, factors).rope
    assert rope == RopeConfig(1e4, "longrope", 4.0, 24, attention_factor=1.25, rotary_dim=12,
                              short_factors=(2.0,) * 6, long_factors=(2.0,) * 6)  # fmt: skip


def parse(name, changes, factors=None):
    metadata, _ = convert(FIXTURES / name)
    prefix = metadata["general.architecture"]
    metadata |= {f"{prefix}.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return parse_metadata(metadata, vocab_size=64, tied=False, rope_factors=factors or {}, where="model.gguf")


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@pytest.mark.parametrize(
    ("name", "changes", "factors", "kind", "message"),
    [
        ("qwen2", {"attention.sliding_window": 4096}, {}, NotImplementedError, "attention.sliding_window: expected 0"),
        ("qwen3", {"pooling_type": 3}, {}, NotImplementedError, "means an embedding model; 'qwen3' has no"),
        ("qwen3", {"expert_count": 4}, {}, NotImplementedError, "qwen3.expert_count: expected 0, got 4"),
        ("qwen2", {"rope.dimension_sections": [1, 2]}, {}, ValueError, "unknown key 'qwen2.rope.dimension_sections'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, {}, NotImplementedError, "means logits that are capped"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, {}, ValueError, "one truth value per layer (3)"),
        ("gemma3", {"attention.sliding_window_pattern": "x"}, {}, ValueError, "sliding_window_pattern: expected"),
        ("gemma3", {"attention.key_length": 0, "attention.value_length": 0}, {}, ValueError, "head_dim"),
        ("gemma3", {"block_count": 2**31 - 1}, {}, ValueError, "block_count: expected at most 4096"),
        ("qwen3_moe", {"expert_used_count": 7}, {}, ValueError, "1 <= per_token <= count"),
        ("qwen3_moe", {"expert_count": None}, {}, ValueError, "the key 'expert_count' is missing"),
        ("qwen3_moe", {"expert_gating_func": 2}, {}, NotImplementedError, "expert_gating_func: expected 1, got 2"),
        ("qwen3_moe", {"expert_weights_norm": False}, {}, NotImplementedError, "expert_weights_norm: expected True"),
        ("qwen3_moe", {"expert_shared_count": 1}, {}, NotImplementedError, "experts that all tokens go through"),
        ("gpt_oss", {"attention.sliding_window": None}, {}, ValueError, "'attention.sliding_window' is missing"),
        ("gpt_oss", {"rope.freq_base_swa": 1e4}, {}, NotImplementedError, "rope.freq_base_swa: expected"),
        ("smollm3", {"rope.dimension_count": 4}, {}, NotImplementedError, "partial rotations are not implemented"),
        ("qwen3", {"rope.dimension_count": 3}, {}, ValueError, "rotary_dim: expected an even number"),
        ("qwen3", {"rope.dimension_count": 14}, {}, ValueError, "rotary_dim: expected at most head_dim 12"),
        ("phi3", {"rope.scaling.attn_factor": 1.5}, {}, NotImplementedError, "where there are no LongRoPE factors"),
        ("phi3", {}, {LONG: np.ones(4)}, ValueError, "rope_factors_short.weight is missing"),
        ("phi3", {}, {LONG: np.ones(4), SHORT: np.ones(3)}, ValueError, "got 3 and 4"),
        ("phi3", {}, {LONG: np.ones(4), SHORT: np.zeros(4)}, ValueError, "short_factors: expected positive"),
        ("phi3", {"rope.scaling.original_context_length": 0}, {LONG: np.ones(4), SHORT: np.ones(4)}, ValueError,
         "original_context_length: expected at least 1"),
        ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, {LONG: np.ones(4), SHORT: np.ones(4)},
         NotImplementedError, "and scaling 'yarn' in one file"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_named(name, changes, factors, kind, message):
    with pytest.raises(kind, match=f"^model.gguf: .*{re.escape(message)}"):
        parse(name, changes, factors)


def shaped(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("name", "tensors", "kind", "message"),
    [
        ("qwen3_moe", {"blk.1.ffn_up_exps.weight": None}, ValueError, "blk.1.ffn_up_exps.weight[0]"),
        ("qwen3_moe", {"blk.1.ffn_up_exps.weight": shaped(5, 20, 32)}, ValueError, "ffn_up_exps.weight[5] is missing"),
        ("qwen3_moe", {"blk.1.ffn_up_exps.weight": shaped(7, 20, 32)}, ValueError, "ffn_up_exps.weight[6] is unknown"),
        ("qwen3_moe", {"blk.0.ffn_down_exps.weight": shaped(6, 20, 32)}, ValueError,
         "ffn_down_exps.weight[0]: the config says (32, 20), the file has (20, 32)"),
        ("qwen3_moe", {"blk.0.ffn_down_exps.weight": shaped(6, 640)}, ValueError, "the file has (640,)"),
        ("qwen3_moe", {"blk.0.ffn_down_exps.weight": shaped(6)}, ValueError, "ffn_down_exps.weight[0]"),
        ("qwen3_moe", {"blk.0.ffn_up_exps.weight": shaped(65537, 1, 1)}, ValueError, "at most 65536 experts"),
        ("qwen3_moe", {"blk.0.ffn_gate_up_exps.weight": shaped(6, 40, 32)}, ValueError, "ffn_gate_up_exps.weight[0]"),
        ("qwen3_moe", {"blk.0.ffn_up_exps.bias": shaped(6, 20)}, NotImplementedError, "ffn_up_exps.bias: this decoder"),
        ("gpt_oss", {"blk.0.ffn_up_exps.bias": None}, ValueError, "ffn_up_exps.bias[0]"),
        ("gpt_oss", {"blk.0.ffn_up_exps.bias": shaped(6, 21)}, ValueError, "the file has (21,)"),
        ("gpt_oss", {"blk.0.attn_sinks.weight": None}, ValueError, "attn_sinks.weight is missing"),
        ("qwen2", {"blk.0.attn_q.bias": None}, ValueError, "blk.0.attn_q.bias is missing"),
        ("qwen2", {"blk.0.attn_output.bias": shaped(32)}, ValueError, "blk.0.attn_output.bias is unknown"),
        ("mistral", {"blk.0.attn_q.bias": shaped(48)}, NotImplementedError, "this decoder has no biases for 'llama'"),
        ("smollm3", {"blk.0.attn_q.bias": shaped(32)}, NotImplementedError, "has no biases for 'smollm3'"),
        ("phi3", {"blk.0.attn_qkv.weight": shaped(63, 32)}, ValueError, "the config says (64, 32)"),
        ("phi3", {"blk.0.ffn_up.weight": shaped(48, 32)}, ValueError, "the config says (96, 32)"),
        ("phi3", {"blk.0.attn_q.weight": shaped(32, 32)}, ValueError, "attn_q.weight within blk.0.attn_qkv"),
        ("phi3_longrope", {LONG: None}, ValueError, "rope_factors_long.weight is missing"),
        ("phi3_longrope", {LONG: shaped(2, 3)}, ValueError, "rope_factors_long.weight: expected one number per pair"),
        ("qwen3", {LONG: shaped(6)}, ValueError, "rope_factors_long.weight is unknown"),
        ("qwen3", {"blk.0.attn_k_norm.weight": None}, ValueError, "attn_k_norm.weight is missing"),
        ("gemma3", {"blk.0.post_ffw_norm.weight": None}, ValueError, "post_ffw_norm.weight is missing"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(tmp_path, name, tensors, kind, message):
    changes = {"sliding_window": None} if name == "mistral" else {}
    folder = make_folder(tmp_path, name, **changes)
    changed = {key: value for key, value in (convert(folder)[1] | tensors).items() if value is not None}
    path = write(tmp_path / "model.gguf", folder, changed)
    with pytest.raises(kind, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        quest_jax.load(path)
