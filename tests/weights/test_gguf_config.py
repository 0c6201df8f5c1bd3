import re

import numpy as np
import pytest

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.weights.gguf_config import check_architecture, parse_metadata
from quest_jax.weights.llama3_factors import llama3_factors
from tests.weights.synthetic import CONFIG, gguf_metadata


def parse(*, vocab_size=40, tied=False, factors=None, **changes):
    metadata = gguf_metadata(CONFIG, **changes)
    rope = {} if factors is None else {"rope_freqs.weight": factors}
    return parse_metadata(metadata, vocab_size=vocab_size, tied=tied, rope_factors=rope, where="model.gguf")


def test_all_values():
    assert parse() == LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
        max_positions=128, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"tied": True}, "tie_word_embeddings", True),
        ({"llama__attention__head_count_kv": None}, "n_kv_heads", 4),
        ({"llama__attention__head_count_kv": [2, 2]}, "n_kv_heads", 2),
        ({"llama__attention__key_length": None}, "head_dim", 8),
        ({"llama__attention__key_length": 16, "llama__attention__value_length": 16}, "head_dim", 16),
        ({"llama__vocab_size": None, "vocab_size": 50}, "vocab_size", 50),
        ({"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 2}, "eos_token_ids", (2, 7)),
        ({"tokenizer__ggml__eos_token_id": None}, "eos_token_ids", ()),
        ({"tokenizer__ggml__bos_token_id": None}, "bos_token_id", None),
        ({"llama__expert_count": 0, "llama__rope__scaling__finetuned": True}, "n_layers", 2),
        ({"llama__tensor_data_layout": "Meta AI original pth"}, "n_layers", 2),
        ({"llama__rope__freq_base": None}, "rope", RopeConfig(10000.0)),
        ({"llama__rope__freq_base": 5e5}, "rope", RopeConfig(500000.0)),
        ({"llama__rope__scaling__type": "none"}, "rope", RopeConfig()),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            "rope",
            RopeConfig(kind="linear", factor=4.0),
        ),
        ({"llama__rope__scale_linear": 2.0}, "rope", RopeConfig(kind="linear", factor=2.0)),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 32,
                "llama__rope__scaling__yarn_beta_fast": 16.0,
            },
            "rope",
            RopeConfig(1e4, "yarn", 4.0, 32, beta_fast=16.0),
        ),
        (
            {"factors": llama3_factors(5e5, 128, 8.0, 8192), "llama__attention__key_length": 128,
             "llama__rope__freq_base": 5e5},
            "rope",
            RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
        ),
    ],
)  # fmt: skip
def test_variants(changes, field, value):
    assert getattr(parse(**changes), field) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count: expected 0, got 8, which means a mixture of experts"),
        ({"llama__attention__sliding_window": 4096}, "attention.sliding_window: expected 0, got 4096"),
        ({"llama__attention__head_count_kv": [2, 4]}, "attention.head_count_kv: expected the same value in all layers"),
        ({"llama__feed_forward_length": [64, 32]}, "feed_forward_length: expected the same value in all layers"),
        ({"llama__attention__value_length": 16}, "attention.value_length = 8, the width of a key, got 16"),
        ({"llama__rope__dimension_count": 4}, "rope.dimension_count = 8, the width of a key, got 4"),
        ({"llama__rope__scaling__type": "longrope"}, "RoPE type: expected one of none, linear, yarn, got 'longrope'"),
        ({"llama__rope__scaling__attn_factor": 1.2}, "rope.scaling.attn_factor"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        (
            {"factors": np.ones(4), "llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
            "RoPE factors (rope_freqs.weight) and scaling 'linear' in one file",
        ),
        ({"factors": np.array([1.0, 2.0, 1.0, 2.0])}, "follow no Llama 3 rule"),
    ],
)
def test_other_models_are_named(changes, message):
    with pytest.raises(NotImplementedError, match=f"^model.gguf: .*{re.escape(message)}"):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__logit_scale": 0.5}, "unknown key 'llama.logit_scale'"),
        ({"llama__block_count": None}, "the key 'block_count' is missing"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "'attention.layer_norm_rms_epsilon' is missing"),
        ({"llama__block_count": "2"}, "block_count: expected an integer"),
        ({"llama__block_count": 0}, "n_layers: expected an integer of at least 1"),
        ({"llama__attention__head_count": 0}, "at least one attention head"),
        ({"llama__attention__head_count_kv": 3}, "multiple of n_kv_heads"),
        ({"llama__attention__head_count_kv": 0}, "n_kv_heads"),
        ({"llama__attention__key_length": 7}, "head_dim"),
        ({"llama__vocab_size": 41}, "vocab_size is 41, but the embedding has 40 rows"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ({"llama__rope__freq_base": -1.0}, "RoPE theta"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 0.0}, "RoPE factor"),
        ({"tokenizer__ggml__eos_token_id": "2"}, "tokenizer.ggml.eos_token_id: expected a token id"),
        ({"factors": np.ones(5)}, "rope_freqs.weight: expected the shape (4,), got (5,)"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^model.gguf: .*{re.escape(message)}"):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general__architecture": "gemma2"},
            "architecture 'gemma2' is not implemented; expected one of llama, qwen2,",
        ),
        ({"general__architecture": "llama4"}, "architecture 'llama4'"),
        ({"general__type": "adapter"}, "got one of type 'adapter'"),
        ({"split__count": 3}, "one of 3 parts; join them with"),
    ],
)
def test_other_files_are_named(changes, message):
    with pytest.raises(NotImplementedError, match=f"^model.gguf: .*{re.escape(message)}"):
        check_architecture(gguf_metadata(CONFIG, **changes), "model.gguf")


@pytest.mark.parametrize("architecture", [None, 3])
def test_no_architecture(architecture):
    with pytest.raises(ValueError, match="^model.gguf: .*general.architecture"):
        check_architecture(gguf_metadata(CONFIG, general__architecture=architecture), "model.gguf")
