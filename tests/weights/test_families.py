"""What sets the families apart, read off their configs; and what each refuses."""

import re

import pytest

from quest_jax.models.config import Experts, RopeConfig
from quest_jax.weights.families import FAMILIES
from quest_jax.weights.hf_config import parse_config
from tests.weights.synthetic import make_config


def make(model_type, **changes):
    config = make_config(model_type=model_type, architectures=[FAMILIES[model_type].architecture])
    config |= {"num_hidden_layers": 4, "head_dim": 8} | changes
    return {key: value for key, value in config.items() if value != "absent"}


def parse(model_type, **changes):
    return parse_config(make(model_type, **changes), {}, "file")


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("mistral", {"sliding_window": None}, {"windows": ()}),
        ("mistral", {"sliding_window": 16}, {"windows": (16,) * 4}),
        ("mistral", {}, {"windows": (4096,) * 4}),
        ("qwen2", {"sliding_window": 16}, {"qkv_bias": True, "out_bias": False, "windows": ()}),
        (
            "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
            {"windows": (0, 0, 0, 16)},
        ),
        ("qwen2", {"head_dim": "absent"}, {"head_dim": 8}),
        ("qwen3", {}, {"qk_norm": True, "qkv_bias": False}),
        ("qwen3", {"head_dim": "absent"}, {"head_dim": 128}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        (
            "qwen3_moe",
            {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True},
            {"experts": Experts(5, 2, 6, "softmax_all", normalized=True)},
        ),
        ("smollm3", {}, {"unrotated_layers": (3,), "tie_word_embeddings": False}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, {"unrotated_layers": (0, 3)}),
        ("smollm3", {"rope_theta": "absent", "tie_word_embeddings": "absent"}, {
            "rope": RopeConfig(theta=2000000.0), "tie_word_embeddings": True,
        }),
        ("phi3", {"sliding_window": 16}, {"windows": (16,) * 4}),
        ("phi3", {"partial_rotary_factor": 0.5}, {"rope": RopeConfig(theta=10000.0, rotary_dim=4)}),
        (
            "phi3", {
                "max_position_embeddings": 32, "original_max_position_embeddings": 8,
                "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2.5]},
            },
            {"rope": RopeConfig(1e4, "longrope", 4.0, 8, short_factors=(1.0,) * 4, long_factors=(2.0, 2.0, 2.0, 2.5))},
        ),
        (
            "gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2, "hidden_size": 64},
            {
                "windows": (16, 0, 16, 0), "window_rope": RopeConfig(theta=10000.0), "norm_offset": 1.0,
                "embed_scale": 8.0, "query_scale": 1 / 16, "activation": "gelu_tanh", "output_norms": True,
            },
        ),
        (
            "gemma3_text", {
                "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                },
            },
            {
                "windows": (0, 16, 0, 16), "rope": RopeConfig(1e6, "linear", 8.0), "window_rope": RopeConfig(1e4),
            },
        ),
        (
            "gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_scaling": "absent"},
            {
                "sinks": True, "qkv_bias": True, "out_bias": True, "windows": (128, 0, 128, 0),
                "activation": "swiglu_clamped", "experts": Experts(5, 2, 64, "softmax_chosen", biased=True),
                "rope": RopeConfig(10000.0, "yarn", 32.0, 4096, truncate=False),
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_differences(model_type, changes, expected):
    config = parse(model_type, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias: expected False"),
        ("mistral", {"sliding_window": 16.5}, "sliding_window: expected an integer"),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "expected a number of tokens"),
        ("mistral", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers: expected at most 4096"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window: expected true"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types: expected one entry per layer (4)"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "full_attention or sliding_attention, got 'linear"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "RoPE type: expected one of"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step and mlp_only_layers: expected 1 and none"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types: expected full_attention only"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "decoder_sparse_step and mlp_only_layers: expected 1 and none"),
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 3}, "experts: expected 1 <= per_token <= count"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "unknown key 'shared_expert_intermediate_size'"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers: expected 4 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 4 numbers"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a number in (0, 1]"),
        ("phi3", {"partial_rotary_factor": 0.4}, "rotary_dim: expected an even number"),
        (
            "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1, 1, 1]}},
            "expected 4 short_factors and long_factors",
        ),
        (
            "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1] * 4, "long_factor": ["1"] * 4}},
            "long_factor: expected a list of finite numbers",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1] * 4}}, "needs the key 'short_factor'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected null"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive number"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: expected 7.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected none, got 'awq'"),
        ("qwen2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 'with weights="int4"'),
        ("qwen3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "its packing is not read"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, "got 'mxfp4'"),
    ],
)  # fmt: skip
def test_what_is_refused(model_type, changes, message):
    with pytest.raises((ValueError, NotImplementedError), match=rf"^file: .*{re.escape(message)}"):
        parse(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "architecture", "nearest"),
    [
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "latent attention (MLA) is not implemented; the nearest that is: Qwen3-MoE",
        ),
        ("mamba2", "Mamba2ForCausalLM", "state-space layers"),
        ("t5", "T5ForConditionalGeneration", "encoder"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "vision"),
        ("gemma3", "Gemma3ForConditionalGeneration", "load the family's text model"),
        ("mixtral", "MixtralForCausalLM", "Qwen3-MoE"),
        ("gemma2", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    ],
)
def test_other_architectures_are_named_with_the_nearest(model_type, architecture, nearest):
    with pytest.raises(NotImplementedError, match=re.escape(nearest)) as caught:
        parse_config(make_config(model_type=model_type, architectures=[architecture]), {}, "file")
    assert architecture in str(caught.value) and "GptOssForCausalLM" in str(caught.value)
