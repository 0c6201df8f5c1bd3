"""The metadata of a GGUF file as :class:`quest_jax.models.config.LlamaConfig`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Keys outside the architecture's prefix, as ``llama.``,
describe the tokenizer or the file and are not read here, but for the ids that end a text. A key within it that is not
handled is an error.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quest_jax.models.config import Experts, LlamaConfig
from quest_jax.weights.fields import Fields, shown
from quest_jax.weights.gguf_families import ARCHITECTURES, Architecture
from quest_jax.weights.gguf_rope import parse_rope

_MOST_LAYERS = 4096  # before work that grows with a number that nothing has confirmed
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# Key -> (the value under which the model is what this decoder computes, what another value would mean).
_ONLY: dict[str, tuple[Any, str]] = {
    "expert_count": (0, "a mixture of experts"),
    "expert_used_count": (0, "a mixture of experts"),
    "expert_shared_count": (0, "experts that all tokens go through"),
    "expert_shared_feed_forward_length": (0, "experts that all tokens go through"),
    "expert_group_count": (0, "experts in groups"),
    "expert_group_used_count": (0, "experts in groups"),
    "expert_gating_func": (1, "experts weighed otherwise than by a softmax"),
    "expert_weights_norm": (True, "experts whose weights do not add up to one"),
    "expert_weights_scale": (1.0, "experts whose weights do not add up to one"),
    "leading_dense_block_count": (0, "layers of different shapes"),
    "nextn_predict_layers": (0, "layers that predict later tokens"),
    "pooling_type": (0, "an embedding model"),
    "attn_logit_softcapping": (0.0, "scores that are capped"),
    "final_logit_softcapping": (0.0, "logits that are capped"),
    "use_parallel_residual": (False, "parallel residuals"),
    "attention.causal": (True, "attention to later tokens"),
    "attention.sliding_window": (0, "attention within a window"),
    "attention.clamp_kqv": (0.0, "clamped q, k and v"),
    "attention.max_alibi_bias": (0.0, "ALiBi"),
    "rope.scaling.attn_factor": (1.0, "another attention temperature"),
    "rope.scaling.yarn_attn_factor": (1.0, "another attention temperature"),
    "rope.scaling.yarn_ext_factor": (1.0, "another blend of YaRN"),
    "rope.scaling.yarn_log_multiplier": (0.0, "another attention temperature"),
}
_IGNORED = {
    "tensor_data_layout": "a note on the origin; this version converts q and k from the one layout in use",
    "rope.scaling.finetuned": "a note on the training",
}
_OF_LAYERS = {"attention.sliding_window_pattern"}  # keys that may have a list, one value a layer
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")


def check_architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Returns the architecture of a file.

    Raises:
      NotImplementedError: another one than those here, or not one whole model; names it.
      ValueError: none is given.
    """
    fields = Fields(metadata, where)
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise NotImplementedError(
            f"{where}: architecture {shown(name)} is not implemented; expected one of {', '.join(ARCHITECTURES)}."
        )
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise NotImplementedError(f"{where}: expected a GGUF file of a model, got one of type {shown(kind)}.")
    if fields.integer("split.count", 1) > 1:
        raise NotImplementedError(
            f"{where}: expected the whole model in one file, got one of {metadata['split.count']} parts; "
            "join them with `llama-gguf-split --merge`."
        )
    return ARCHITECTURES[name]


def parse_metadata(
    metadata: Mapping[str, Any], *, vocab_size: int, tied: bool, rope_factors: Mapping[str, np.ndarray], where: str
) -> LlamaConfig:
    """Reads the config.

    Args:
      metadata: all key/value pairs of the file.
      vocab_size: rows of the embedding, which the file stores but need not name.
      tied: whether the file has no output projection.
      rope_factors: ``[D/2]`` those of the architecture's ``rope_tensors`` that the file has, by name.
      where: the file, for errors.

    Raises:
      NotImplementedError: a variant this decoder does not compute; names it.
      ValueError: an unknown or missing key, or a value of the wrong type or range.
    """
    architecture = check_architecture(metadata, where)
    prefix = f"{architecture.name}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _check_keys(values, architecture, where)
    values = {key: value if key in _OF_LAYERS else _uniform(key, value, where) for key, value in values.items()}
    fields = Fields(values, f"{where}: {architecture.name}")
    tokens = Fields(metadata, where)
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if heads == 0:
        raise ValueError(f"{where}: expected at least one attention head, got 0.")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise NotImplementedError(
            f"{where}: expected attention.value_length = {head_dim}, the width of a key, got "
            f"{shown(values['attention.value_length'])}; heads of two widths are not implemented."
        )
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"{where}: vocab_size is {shown(values['vocab_size'])}, but the embedding has {vocab_size} rows."
        )
    layers = fields.integer("block_count")
    if layers > _MOST_LAYERS:
        raise ValueError(f"{where}: block_count: expected at most {_MOST_LAYERS} layers, got {layers}.")
    max_positions = fields.integer("context_length")
    ends = [tokens.ids(f"tokenizer.ggml.{name}") or () for name in _ENDS]
    try:
        differences = architecture.differences(fields, layers)
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_inner(fields, differences.get("experts")),
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=parse_rope(fields, architecture, head_dim, max_positions, rope_factors, where),
            tie_word_embeddings=tied,
            eos_token_ids=tuple(dict.fromkeys(token for group in ends for token in group)),
            bos_token_id=tokens.integer("tokenizer.ggml.bos_token_id", None),
            **differences,
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error


def _check_keys(values: Mapping[str, Any], architecture: Architecture, where: str) -> None:
    for name, value in values.items():
        if name in _READ or name in architecture.reads or name in _IGNORED:
            continue
        key = f"{architecture.name}.{name}"
        if name not in _ONLY:
            raise ValueError(f"{where}: unknown key {key[:80]!r}; it may change what the model computes.")
        expected, meaning = _ONLY[name]
        if value != expected:
            raise NotImplementedError(
                f"{where}: {key}: expected {expected}, got {shown(value)}, "
                f"which means {meaning}; {architecture.name!r} has no such thing here."
            )


def _inner(fields: Fields, experts: Experts | None) -> int:
    """Width of the MLP, which files of experts need not name."""
    if experts is None:
        return fields.integer("feed_forward_length")
    return fields.integer("feed_forward_length", experts.size)


def _uniform(key: str, value: Any, where: str) -> Any:
    """Some writers give one number a layer; equal ones are one number."""
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise NotImplementedError(f"{where}: {key}: expected the same value in all layers, got {shown(value)}.")
    return value[0]
