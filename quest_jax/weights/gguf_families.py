"""The architectures that GGUF files come in, each as what sets it apart from ``llama``.

Conventions are those of llama.cpp: its ``conversion/`` writes the files and its ``src/models/`` reads them. What a file
has no key for is what llama.cpp takes for granted. Where llama.cpp computes something else than the original model, the
original is followed: YaRN of GPT-OSS is not rounded, and Phi-3's window is kept.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from quest_jax.models.config import Experts, LlamaConfig, RopeConfig
from quest_jax.weights.fields import Fields
from quest_jax.weights.views import Tensors, Views, split_fused

_LAYER = "blk.{}."
NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": _LAYER + "attn_norm.weight",
    "q": _LAYER + "attn_q.weight",
    "k": _LAYER + "attn_k.weight",
    "v": _LAYER + "attn_v.weight",
    "q_bias": _LAYER + "attn_q.bias",
    "k_bias": _LAYER + "attn_k.bias",
    "v_bias": _LAYER + "attn_v.bias",
    "q_norm": _LAYER + "attn_q_norm.weight",
    "k_norm": _LAYER + "attn_k_norm.weight",
    "sinks": _LAYER + "attn_sinks.weight",
    "out": _LAYER + "attn_output.weight",
    "out_bias": _LAYER + "attn_output.bias",
    "attn_out_norm": _LAYER + "post_attention_norm.weight",
    "mlp_norm": _LAYER + "ffn_norm.weight",
    "gate": _LAYER + "ffn_gate.weight",
    "up": _LAYER + "ffn_up.weight",
    "down": _LAYER + "ffn_down.weight",
    "mlp_out_norm": _LAYER + "post_ffw_norm.weight",
    "router": _LAYER + "ffn_gate_inp.weight",
    "router_bias": _LAYER + "ffn_gate_inp.bias",
    "expert_gate": _LAYER + "ffn_gate_exps.weight[{}]",
    "expert_up": _LAYER + "ffn_up_exps.weight[{}]",
    "expert_down": _LAYER + "ffn_down_exps.weight[{}]",
    "expert_gate_bias": _LAYER + "ffn_gate_exps.bias[{}]",
    "expert_up_bias": _LAYER + "ffn_up_exps.bias[{}]",
    "expert_down_bias": _LAYER + "ffn_down_exps.bias[{}]",
}
"""The tensor of every part; ``[{}]`` is one expert of a stack, as ``gguf_tensors.split_stacks`` names it."""

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
      name: value of ``general.architecture`` and prefix of the keys.
      reads: keys that ``differences`` reads, besides Llama's.
      differences: from the keys and the number of layers to fields of the decoder's config.
      names: tensors that are called otherwise than in :data:`NAMES`.
      views: takes apart tensors that hold several parts; None where there are none.
      rope_tensors: tensors with divisors of the rotary frequencies that it may have.
      interleaved: q and k have the two numbers of a rotary pair side by side, which the converter did.
      truncate: YaRN rounds the range of pairs between which it blends.
    """

    name: str
    reads: frozenset[str] = frozenset()
    differences: Callable[[Fields, int], dict[str, Any]] = lambda fields, layers: {}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    views: Views | None = None
    rope_tensors: tuple[str, ...] = (ROPE_FREQS,)
    interleaved: bool = False
    truncate: bool = True


def _windows(fields: Fields, layers: int, window: int, period: int) -> tuple[int, ...]:
    """The window of every layer: all but each ``period``-th have one, unless the file has a pattern of its own."""
    if not window:
        return ()
    pattern = fields.pattern("attention.sliding_window_pattern", layers, period)
    if not isinstance(pattern, tuple):
        period = pattern
        pattern = tuple(period == 0 or layer % period < period - 1 for layer in range(layers))
    return tuple(window if windowed else 0 for windowed in pattern) if any(pattern) else ()


def _phi3(fields, layers):
    # Before August 2024 the window was not written; of what was published with 4096 positions all have this one.
    early = 2047 if fields.integer("context_length") == 4096 and layers in (32, 40) else 0
    window = fields.integer("attention.sliding_window", early)
    return {"windows": (window,) * layers if window else ()}


def _qwen3_moe(fields, layers):
    return {"qk_norm": True, "experts": _experts(fields)}


def _gemma3(fields, layers):
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    windows = _windows(fields, layers, fields.integer("attention.sliding_window", 0), 6)
    # Scores are scaled by the width of a head, but for the 27B size, which only its number of layers tells apart.
    scaled = hidden // heads if layers == 62 else head_dim
    return {
        "qk_norm": True,
        "output_norms": True,  # the norms' weights have had 1 added by the converter
        "activation": "gelu_tanh",
        "embed_scale": float(hidden) ** 0.5,
        "query_scale": max(scaled, 1) ** -0.5,  # a width of 0 is refused later
        "windows": windows,
        "window_rope": RopeConfig(theta=fields.number("rope.freq_base_swa", 10000.0)) if windows else None,
    }


def _gpt_oss(fields, layers):
    theta = fields.number("rope.freq_base", 10000.0)
    if fields.number("rope.freq_base_swa", theta) != theta:
        raise NotImplementedError(f"{fields.where}: rope.freq_base_swa: expected rope.freq_base, {theta}, got another.")
    return {
        "qkv_bias": True,
        "out_bias": True,
        "sinks": True,
        "activation": "swiglu_clamped",
        "experts": dataclasses.replace(_experts(fields), router="softmax_chosen", biased=True),
        "windows": _windows(fields, layers, fields.integer("attention.sliding_window"), 2),
    }


def _experts(fields: Fields) -> Experts:
    return Experts(
        count=fields.integer("expert_count"),
        per_token=fields.integer("expert_used_count"),
        size=fields.integer("expert_feed_forward_length"),
    )


def _split_phi3(config: LlamaConfig, stored: Tensors, where: str) -> Tensors:
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        ".attn_qkv.weight": {".attn_q.weight": queries, ".attn_k.weight": keys, ".attn_v.weight": keys},
        ".ffn_up.weight": {".ffn_gate.weight": inner, ".ffn_up.weight": inner},
    }
    return split_fused(stored, fused, config.hidden_size, where)


_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", interleaved=True),
        Architecture("qwen2", differences=lambda fields, layers: {"qkv_bias": True}),
        Architecture("qwen3", differences=lambda fields, layers: {"qk_norm": True}),
        Architecture("qwen3moe", _EXPERT_KEYS, _qwen3_moe),
        Architecture(
            "smollm3",
            differences=lambda fields, layers: {"unrotated_layers": tuple(range(3, layers, 4))},
            interleaved=True,
        ),
        Architecture(
            "phi3",
            frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
            _phi3,
            views=_split_phi3,
            rope_tensors=(ROPE_LONG, ROPE_SHORT),
        ),
        Architecture("gemma3", _WINDOW_KEYS, _gemma3),
        Architecture(
            "gpt-oss",
            _EXPERT_KEYS | _WINDOW_KEYS,
            _gpt_oss,
            names={"mlp_norm": _LAYER + "post_attention_norm.weight"},
            truncate=False,  # so its Hugging Face config; files cannot say it
        ),
    )
}
"""By ``general.architecture``."""
