import re

import pytest

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.weights import hf_config
from quest_jax.weights.hf_config import parse_config
from tests.weights.synthetic import make_config

# What the hub has, with values of the published files.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers.js_config": {},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip


def test_smollm2():
    assert parse_config(SMOLLM2, {}) == LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
        max_positions=8192, rms_norm_eps=1e-5, rope=RopeConfig(theta=100000.0), tie_word_embeddings=True,
        eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip


def test_llama32():
    config = parse_config(LLAMA32, {})
    assert config.rope == RopeConfig(500000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_defaults_are_those_of_transformers():
    config = parse_config(
        {
            "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        {},
    )  # fmt: skip
    assert config == LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=4,
        max_positions=2048, rms_norm_eps=1e-6, rope=RopeConfig(theta=10000.0), eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 16}, "head_dim", 16),
        ({"head_dim": 16, "hidden_size": 30}, "head_dim", 16),
        ({"num_key_value_heads": 1}, "n_kv_heads", 1),
        ({"num_key_value_heads": 4}, "n_kv_heads", 4),
        ({"num_key_value_heads": None}, "n_kv_heads", 4),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"layer_types": ["full_attention"] * 2}, "n_layers", 2),
        ({"hidden_act": "swish"}, "n_layers", 2),
        ({"_name_or_path": "x", "_attn_implementation": "eager"}, "n_layers", 2),
    ],
)
def test_variants(changes, field, value):
    assert getattr(parse_config(make_config(**changes), {}), field) == value


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (5, {}, (5,)),
        ([5, 6], {}, (5, 6)),
        (5, {"eos_token_id": 7}, (7,)),
        (5, {"eos_token_id": [8, 9, 8]}, (8, 9)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {"temperature": 0.6}, (5,)),
    ],
)
def test_end_of_text(config, generation, expected):
    assert parse_config(make_config(eos_token_id=config), generation).eos_token_ids == expected


def test_null_eos_and_bos_mean_none():
    config = parse_config(make_config() | {"eos_token_id": None, "bos_token_id": None}, {})
    assert config.eos_token_ids == () and config.bos_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True, which means biases on q, k, v"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"pretraining_tp": True}, "pretraining_tp"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        (
            {"architectures": ["MistralForCausalLM"]},
            "expected the architecture LlamaForCausalLM, .*got MistralForCausalLM",
        ),
        ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, "DeepseekV2ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "expected the architecture"),
        ({"model_type": "mistral"}, "mistral"),
        ({"architectures": None, "model_type": "mamba2"}, "mamba2.*state-space layers are not implemented"),
        ({"architectures": None, "model_type": None}, "expected the architecture"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "RoPE type: expected one of .*'ntk'"),
    ],
)
def test_other_models_are_named(changes, message):
    with pytest.raises(NotImplementedError, match=f"^dir/config.json: .*{message}"):
        parse_config(make_config(**changes), {}, "dir/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_scaling": 8.0}, "unknown key 'logits_scaling'"),
        ({"num_local_experts": 8}, "unknown key 'num_local_experts'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "40"}, "vocab_size: expected an integer"),
        ({"vocab_size": 0}, "vocab_size: expected an integer of at least 1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: expected an integer"),
        ({"num_attention_heads": 0}, "0 heads must divide hidden_size"),
        ({"num_attention_heads": 5}, "5 heads must divide hidden_size 32"),
        ({"num_key_value_heads": 3}, "n_heads must be a multiple of n_kv_heads"),
        ({"num_key_value_heads": 0}, "n_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a finite number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": "2"}, "eos_token_id: expected a token id"),
        ({"eos_token_id": [[2]]}, "eos_token_id: expected a token id"),
        ({"bos_token_id": [1]}, "bos_token_id: expected an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one entry per layer (2)"),
        ({"rope_theta": 0}, "RoPE theta"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(
        ValueError, match=f"^dir/config.json: .*{re.escape(message)}|^dir/config.json: {re.escape(message)}"
    ):
        parse_config(make_config(**changes), {}, "dir/config.json")


def test_wrong_generation_config():
    with pytest.raises(ValueError, match="generation_config.json.*eos_token_id: expected a token id"):
        parse_config(make_config(), {"eos_token_id": {"a": 1}})


def test_every_ignored_key_has_a_reason_and_no_effect():
    assert not set(hf_config.IGNORED) & (hf_config._READ | set(hf_config._ONLY))
    assert all(hf_config.IGNORED.values())
    assert parse_config(make_config() | dict.fromkeys(hf_config.IGNORED, "x"), {}) == parse_config(make_config(), {})
