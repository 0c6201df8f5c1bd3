"""The metadata of a GGUF file of architecture ``llama`` as :class:`quest_jax.models.config.LlamaConfig`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Keys outside ``llama.`` describe the tokenizer or the
file and are not read here, but for the ids that end a text. A key within ``llama.`` that is not handled is an error.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.weights.fields import Fields, shown
from quest_jax.weights.llama3_factors import rope_from_factors

ARCHITECTURE = "llama"

_PREFIX = f"{ARCHITECTURE}."
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
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")


def check_architecture(metadata: Mapping[str, Any], where: str) -> None:
    """Raises NotImplementedError unless the file is one whole model of architecture ``llama``; names what it is."""
    fields = Fields(metadata, where)
    architecture = fields.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise NotImplementedError(
            f"{where}: architecture {shown(architecture)} is not implemented; the nearest supported one is 'llama'."
        )
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise NotImplementedError(f"{where}: expected a GGUF file of a model, got one of type {shown(kind)}.")
    if fields.integer("split.count", 1) > 1:
        raise NotImplementedError(
            f"{where}: expected the whole model in one file, got one of {metadata['split.count']} parts; "
            "join them with `llama-gguf-split --merge`."
        )


def parse_metadata(
    metadata: Mapping[str, Any], *, vocab_size: int, tied: bool, rope_factors: np.ndarray | None, where: str
) -> LlamaConfig:
    """Reads the config.

    Args:
      metadata: all key/value pairs of the file.
      vocab_size: rows of the embedding, which the file stores but need not name.
      tied: whether the file has no output projection.
      rope_factors: ``[D/2]`` the tensor ``rope_freqs.weight``, if there is one.
      where: the file, for errors.

    Raises:
      NotImplementedError: a variant this decoder does not compute; names it.
      ValueError: an unknown or missing key, or a value of the wrong type or range.
    """
    _check_keys(metadata, where)
    values = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    fields = Fields({key: _uniform(key, value, where) for key, value in values.items()}, f"{where}: {ARCHITECTURE}")
    tokens = Fields(metadata, where)
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if heads == 0:
        raise ValueError(f"{where}: expected at least one attention head, got 0.")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise NotImplementedError(
                f"{where}: expected {key} = {head_dim}, the width of a key, got {shown(values[key])}; "
                "heads of two widths and partial rotations are not implemented."
            )
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"{where}: vocab_size is {shown(values['vocab_size'])}, but the embedding has {vocab_size} rows."
        )
    max_positions = fields.integer("context_length")
    ends = [tokens.ids(f"tokenizer.ggml.{name}") or () for name in _ENDS]
    try:
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            n_layers=fields.integer("block_count"),
            n_heads=heads,
            n_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=_parse_rope(fields, head_dim, max_positions, rope_factors, where),
            tie_word_embeddings=tied,
            eos_token_ids=tuple(dict.fromkeys(token for group in ends for token in group)),
            bos_token_id=tokens.integer("tokenizer.ggml.bos_token_id", None),
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error


def _check_keys(metadata: Mapping[str, Any], where: str) -> None:
    for key, value in metadata.items():
        name = key.removeprefix(_PREFIX)
        if name == key or name in _READ or name in _IGNORED:
            continue
        if name not in _ONLY:
            raise ValueError(f"{where}: unknown key {key[:80]!r}; it may change what the model computes.")
        expected, meaning = _ONLY[name]
        if value != expected:
            raise NotImplementedError(
                f"{where}: {key}: expected {expected}, got {shown(value)}, "
                f"which means {meaning}; this decoder has no such thing."
            )


def _uniform(key: str, value: Any, where: str) -> Any:
    """Some writers give one number a layer; equal ones are one number."""
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise NotImplementedError(f"{where}: {key}: expected the same value in all layers, got {shown(value)}.")
    return value[0]


def _parse_rope(
    fields: Fields, head_dim: int, max_positions: int, factors: np.ndarray | None, where: str
) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    linear = fields.number("rope.scale_linear", 1.0)  # the spelling of early files
    factor = fields.number("rope.scaling.factor", linear)
    kind = fields.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if factors is not None:
        if kind != "none":
            raise NotImplementedError(
                f"{where}: RoPE factors (rope_freqs.weight) and scaling {shown(kind)} in one file."
            )
        return rope_from_factors(factors, theta, head_dim, where)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=fields.integer("rope.scaling.original_context_length", max_positions),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise NotImplementedError(f"{where}: RoPE type: expected one of none, linear, yarn, got {shown(kind)}.")
