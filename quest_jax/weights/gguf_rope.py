"""The rotary embedding that the metadata of a GGUF file and its tensors of frequency divisors describe."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from quest_jax.models.config import RopeConfig
from quest_jax.models.rope import attention_scaling
from quest_jax.weights.fields import Fields
from quest_jax.weights.gguf_families import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Architecture
from quest_jax.weights.llama3_factors import rope_from_factors

_FLOAT32 = 1e-6  # files keep numbers in float32


def parse_rope(
    fields: Fields,
    architecture: Architecture,
    head_dim: int,
    max_positions: int,
    factors: Mapping[str, np.ndarray],
    where: str,
) -> RopeConfig:
    """Reads the rotary embedding.

    Args:
      fields: the keys of the architecture, without its prefix.
      architecture: whose file it is.
      head_dim: channels of a head.
      max_positions: trained context length.
      factors: those of the architecture's ``rope_tensors`` that the file has.
      where: the file, for errors.

    Raises:
      NotImplementedError: a variant that is not computed here; names it.
      ValueError: a value out of range, or divisors that do not fit a head.
    """
    theta = fields.number("rope.freq_base", 10000.0)
    linear = fields.number("rope.scale_linear", 1.0)  # the spelling of early files
    factor = fields.number("rope.scaling.factor", linear)
    kind = fields.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    turning = _turning(fields, architecture, head_dim, where)
    trained = fields.integer("rope.scaling.original_context_length", max_positions)
    if ROPE_LONG in factors or ROPE_SHORT in factors:
        return _longrope(
            fields, RopeConfig(theta=theta, rotary_dim=turning), kind, trained, max_positions, factors, where
        )
    if (temperature := fields.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise NotImplementedError(
            f"{where}: rope.scaling.attn_factor: expected 1.0 where there are no LongRoPE factors, got {temperature}."
        )
    if ROPE_FREQS in factors:
        if kind != "none":
            raise NotImplementedError(f"{where}: RoPE factors ({ROPE_FREQS}) and scaling {kind!r} in one file.")
        rope = rope_from_factors(factors[ROPE_FREQS], theta, turning or head_dim, where)
        return dataclasses.replace(rope, rotary_dim=turning)
    if kind == "none":
        return RopeConfig(theta=theta, rotary_dim=turning)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, rotary_dim=turning)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=trained,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            truncate=architecture.truncate,
            rotary_dim=turning,
        )
    raise NotImplementedError(f"{where}: RoPE type: expected one of none, linear, yarn, got {kind!r}.")


def _turning(fields: Fields, architecture: Architecture, head_dim: int, where: str) -> int | None:
    """How many channels of a head turn; None for all."""
    turning = fields.integer("rope.dimension_count", head_dim)
    if turning == head_dim:
        return None
    if architecture.interleaved:
        raise NotImplementedError(
            f"{where}: expected rope.dimension_count = {head_dim}, the width of a key, got {turning}; "
            f"partial rotations are not implemented for {architecture.name!r}."
        )
    return turning


def _longrope(
    fields: Fields,
    plain: RopeConfig,
    kind: str,
    trained: int,
    max_positions: int,
    factors: Mapping[str, np.ndarray],
    where: str,
) -> RopeConfig:
    """The file names one list of divisors up to the trained length and one beyond; the type need not be written."""
    for name in (ROPE_LONG, ROPE_SHORT):
        if name not in factors:
            raise ValueError(f"{where}: expected {ROPE_LONG} and {ROPE_SHORT}, {name} is missing; fetch it again.")
    if kind not in ("none", "longrope"):
        raise NotImplementedError(f"{where}: RoPE factors ({ROPE_LONG}) and scaling {kind!r} in one file.")
    if trained < 1:
        raise ValueError(f"{where}: rope.scaling.original_context_length: expected at least 1, got {trained}.")
    rope = dataclasses.replace(
        plain,
        kind="longrope",
        factor=max_positions / trained,
        original_max_positions=trained,
        short_factors=tuple(factors[ROPE_SHORT].astype(np.float64).tolist()),
        long_factors=tuple(factors[ROPE_LONG].astype(np.float64).tolist()),
    )
    # Early Phi-3 has the temperature of YaRN instead of LongRoPE's.
    written = fields.number("rope.scaling.attn_factor", None)
    if written is None or math.isclose(written, attention_scaling(rope), rel_tol=_FLOAT32):
        return rope
    return dataclasses.replace(rope, attention_factor=written)
