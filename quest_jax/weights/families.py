"""The families of decoders that Hugging Face checkpoints come in, each as what sets it apart from Llama.

To add one: an entry of ``FAMILIES`` with the config keys it reads, the values that others must have, a function from
its config to fields of :class:`~quest_jax.models.config.LlamaConfig`, and the names of tensors that Llama has not. What
it stores otherwise than one matrix a part is taken apart by ``views``. A tiny checkpoint in ``tests/parity/record.py``
then shows that it computes what transformers computes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from quest_jax.models.config import Experts
from quest_jax.weights.fields import Fields
from quest_jax.weights.views import Views, split_experts, split_rows

_MOST_EXPERTS = 4096  # before work that grows with a number that nothing has confirmed
_LAYER = "model.layers.{}."
LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "q_norm": _LAYER + "self_attn.q_norm.weight",
    "k_norm": _LAYER + "self_attn.k_norm.weight",
    "sinks": _LAYER + "self_attn.sinks",
    "out": _LAYER + "self_attn.o_proj.weight",
    "out_bias": _LAYER + "self_attn.o_proj.bias",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "expert_gate": _LAYER + "mlp.experts.{}.gate_proj.weight",
    "expert_up": _LAYER + "mlp.experts.{}.up_proj.weight",
    "expert_down": _LAYER + "mlp.experts.{}.down_proj.weight",
}
"""The tensor of every part, ``{}`` for the layer and, of an expert, for its number."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of decoders.

    Attributes:
      name: for people.
      architecture, model_type: as its ``config.json`` names it.
      reads: keys that ``differences`` reads, besides Llama's.
      ignores: keys without effect here.
      defaults: what transformers takes for keys that are absent, where that is not Llama's.
      differences: from the config's fields and the number of layers to fields of the decoder's config.
      names: tensors that are called otherwise than in Llama.
      views: takes apart tensors that hold several parts; None where there are none.
    """

    name: str
    architecture: str
    model_type: str
    reads: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    differences: Callable[[Fields, int], dict[str, Any]] = lambda fields, layers: {}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    views: Views | None = None


def _windows(fields: Fields, layers: int, windowed: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of every layer: by ``layer_types`` where the config has it, else by a rule; none if all see all."""
    window, kinds = fields.integer("sliding_window", None), fields.layer_types(layers)
    if kinds is None:
        kinds = ["sliding_attention" if window and windowed(i) else "full_attention" for i in range(layers)]
    if "sliding_attention" not in kinds:
        return ()
    if not window:
        raise fields.error("sliding_window", "a number of tokens, because layer_types has sliding_attention", window)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _mistral(fields, layers):
    return {"windows": _windows(fields, layers, lambda layer: True)}


def _qwen_windows(fields, layers):
    if not fields.flag("use_sliding_window", False):
        if "sliding_attention" in (fields.layer_types(layers) or ()):
            raise fields.error("use_sliding_window", "true, because layer_types has sliding_attention", False)
        return ()
    first = fields.integer("max_window_layers", 28)
    return _windows(fields, layers, lambda layer: layer >= first)


def _qwen2(fields, layers):
    return {"qkv_bias": True, "windows": _qwen_windows(fields, layers)}


def _qwen3(fields, layers):
    bias = fields.flag("attention_bias", False)
    return {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "windows": _qwen_windows(fields, layers)}


def _count_experts(fields: Fields, *keys: str) -> int:
    """The first of the keys that the config has, 128 by default."""
    count = next((fields.integer(key) for key in keys if fields.integer(key, None) is not None), 128)
    if count > _MOST_EXPERTS:
        raise fields.error(keys[0], f"at most {_MOST_EXPERTS} experts", count)
    return count


def _qwen3_moe(fields, layers):
    if fields.integer("decoder_sparse_step", 1) != 1 or fields.sequence("mlp_only_layers"):
        raise NotImplementedError(
            f"{fields.where}: decoder_sparse_step and mlp_only_layers: expected 1 and none, experts in every layer."
        )
    # All layers share one window here: this model has no layer_types.
    windows = (fields.integer("sliding_window"),) * layers if fields.flag("use_sliding_window", False) else ()
    bias = fields.flag("attention_bias", False)
    experts = Experts(
        count=_count_experts(fields, "num_experts", "num_local_experts"),
        per_token=fields.integer("num_experts_per_tok", 8),
        size=fields.integer("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob", False),
    )
    return {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "windows": windows, "experts": experts}


def _smollm3(fields, layers):
    interval, rotated = fields.integer("no_rope_layer_interval", 4), fields.sequence("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) if interval else 1 for layer in range(layers)]
    if len(rotated) != layers or not all(type(flag) is int and flag in (0, 1) for flag in rotated):
        raise fields.error("no_rope_layers", f"{layers} numbers, 1 for a layer with RoPE and 0 without", rotated)
    windowed = fields.flag("use_sliding_window", False)
    bias = fields.flag("attention_bias", False)
    return {
        "unrotated_layers": tuple(layer for layer, flag in enumerate(rotated) if not flag),
        "windows": _windows(fields, layers, lambda layer: windowed and not rotated[layer]),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gpt_oss(fields, layers):
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(key, value) != value:
            raise NotImplementedError(f"{fields.where}: {key}: expected {value}, got {fields.number(key)}.")
    bias = fields.flag("attention_bias", True)
    per_token = fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4))
    experts = Experts(
        count=_count_experts(fields, "num_local_experts"),
        per_token=per_token,
        size=fields.integer("intermediate_size"),
        router="softmax_chosen",
        biased=True,
    )
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "activation": "swiglu_clamped",
        "experts": experts,
        "windows": _windows(fields, layers, lambda layer: layer % 2 == 0),
    }


def _gemma3(fields, layers):
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.number(key, None) is not None:
            raise NotImplementedError(
                f"{fields.where}: {key}: expected null, got a number; logits are not capped here."
            )
    if fields.flag("use_bidirectional_attention", False):
        raise NotImplementedError(f"{fields.where}: use_bidirectional_attention: expected false, got true.")
    pattern, scalar = fields.integer("sliding_window_pattern", 6), fields.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise fields.error("query_pre_attn_scalar", "a positive number", scalar)
    bias = fields.flag("attention_bias", False)
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "output_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embed_scale": float(fields.integer("hidden_size")) ** 0.5,
        "query_scale": scalar**-0.5,
        "windows": _windows(fields, layers, lambda layer: bool(pattern) and (layer + 1) % pattern != 0),
    }


_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
_ROUTER_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})  # of training

LLAMA = Family("Llama 2, 3, 3.1, 3.2, SmolLM2", "LlamaForCausalLM", "llama")
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        Family(
            "Mistral", "MistralForCausalLM", "mistral", frozenset({"sliding_window"}), differences=_mistral,
            defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        ),
        Family(
            "Qwen2, Qwen2.5", "Qwen2ForCausalLM", "qwen2", _WINDOW_KEYS, differences=_qwen2,
            defaults={"sliding_window": 4096, "max_position_embeddings": 32768, "bos_token_id": None},
        ),
        Family(
            "Qwen3", "Qwen3ForCausalLM", "qwen3", _WINDOW_KEYS | {"attention_bias"}, differences=_qwen3,
            defaults={
                "sliding_window": 4096, "head_dim": 128, "max_position_embeddings": 32768, "bos_token_id": None,
            },
        ),
        Family(
            "Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe",
            _WINDOW_KEYS | {
                "attention_bias", "decoder_sparse_step", "mlp_only_layers", "num_experts", "num_local_experts",
                "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
            },
            _ROUTER_KEYS, differences=_qwen3_moe,
            defaults={
                "sliding_window": 4096, "num_key_value_heads": 4, "max_position_embeddings": 32768,
                "bos_token_id": None,
            },
        ),
        Family(
            "SmolLM3", "SmolLM3ForCausalLM", "smollm3",
            _WINDOW_KEYS | {"attention_bias", "no_rope_layers", "no_rope_layer_interval"}, differences=_smollm3,
            defaults={
                "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0,
                "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
            },
        ),
        Family(
            "Phi-3", "Phi3ForCausalLM", "phi3", frozenset({"sliding_window", "partial_rotary_factor"}),
            frozenset({"resid_pdrop", "embd_pdrop"}), differences=_mistral, views=split_rows,
            defaults={
                "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                "eos_token_id": 32000,
            },
        ),
        Family(
            "Gemma 3 (text)", "Gemma3ForCausalLM", "gemma3_text",
            frozenset({
                "sliding_window", "sliding_window_pattern", "attention_bias", "query_pre_attn_scalar",
                "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention",
            }),
            frozenset({"cache_implementation"}), differences=_gemma3,
            defaults={
                "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096,
                "tie_word_embeddings": True, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
            },
            names={
                "attn_out_norm": _LAYER + "post_attention_layernorm.weight",
                "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
                "mlp_out_norm": _LAYER + "post_feedforward_layernorm.weight",
            },
        ),
        Family(
            "GPT-OSS", "GptOssForCausalLM", "gpt_oss",
            frozenset({
                "sliding_window", "attention_bias", "num_local_experts", "num_experts_per_tok", "experts_per_token",
                "swiglu_limit", "swiglu_alpha",
            }),
            _ROUTER_KEYS | {"initial_context_length"}, differences=_gpt_oss, views=split_experts,
            defaults={
                "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 128,
                "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "bos_token_id": None,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            names={
                "router": _LAYER + "mlp.router.weight",
                "router_bias": _LAYER + "mlp.router.bias",
                "expert_gate_bias": _LAYER + "mlp.experts.{}.gate_proj.bias",
                "expert_up_bias": _LAYER + "mlp.experts.{}.up_proj.bias",
                "expert_down_bias": _LAYER + "mlp.experts.{}.down_proj.bias",
            },
        ),
    )
}  # fmt: skip
"""By ``model_type``."""
