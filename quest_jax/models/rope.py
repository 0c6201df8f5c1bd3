"""Rotary position embedding in the rotate-half layout, with every way of stretching it that Llama checkpoints use.

A head of width D holds D/2 pairs ``(x[i], x[i + D/2])``; a token at position p turns pair i by the angle
``p * inverse_frequency[i]``:

    out[i]       = x[i] cos(angle_i) - x[i + D/2] sin(angle_i)
    out[i + D/2] = x[i + D/2] cos(angle_i) + x[i] sin(angle_i)

The values follow ``transformers`` (``modeling_rope_utils.py``), including what it rounds to float32 on the way: the
exponents, the powers and the angle. More exact frequencies would be *other* frequencies than those the checkpoints
were trained and evaluated with, and at position 1e6 one unit in the last place is already 0.06 radians.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from quest_jax.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float[np.ndarray, "half"]:
    """Static inverse frequencies, float32 ``[D/2]`` (of the channels that turn), computed with numpy while tracing.

    For ``dynamic`` and ``longrope`` these hold up to the trained length; :func:`rope_rotation` continues from there.

    Args:
      config: the rotary embedding.
      head_dim: [D], even.

    Raises:
      ValueError: a kind whose formula has no value for these numbers.
    """
    head_dim = head_dim if config.rotary_dim is None else config.rotary_dim
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(config.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if config.kind == "linear":
        return frequencies / np.float32(config.factor)
    if config.kind == "longrope":
        return np.float32(1) / (np.asarray(config.short_factors, np.float32) * powers)
    if config.kind == "yarn":
        return _yarn(config, head_dim, powers)
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "dynamic" and head_dim < 4:
        raise ValueError(f"dynamic NTK RoPE: expected head_dim >= 4 (its exponent is D / (D - 2)), got {head_dim}.")
    return frequencies


def attention_scaling(config: RopeConfig) -> float:
    """Factor on cosine and sine (so its square on the logits): the temperature of YaRN and LongRoPE, else 1.

    YaRN (2309.00071, eq. 22): ``0.1 ln(factor) + 1``; with ``mscale`` and ``mscale_all_dim`` (DeepSeek) the ratio of
    two such terms; an explicit ``attention_factor`` wins.
    """
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        assert config.original_max_positions is not None  # RopeConfig checks it
        grown = math.log(config.factor) / math.log(config.original_max_positions) if config.factor > 1 else 0.0
        return math.sqrt(1 + grown)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)


def rope_rotation(
    config: RopeConfig,
    head_dim: int,
    positions: Int[Array, "B T"],
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every token's angles, float32 ``[B, T, D/2]``; compute once, use in all layers.

    Args:
      config: the rotary embedding (static).
      head_dim: [D].
      positions: position of each token in its own sequence; exact up to 2**24.
      lengths: only read by ``dynamic`` and ``longrope``: sequence length that decides the base or the factors, per
        row. None: max(positions) + 1. A function of the length alone, where transformers also remembers the longest
        sequence it has seen.
    """
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))  # [D/2]
    if config.kind in ("dynamic", "longrope"):
        if lengths is None:
            lengths = positions.max(axis=-1) + 1
        beyond = _dynamic if config.kind == "dynamic" else _longrope
        width = head_dim if config.rotary_dim is None else config.rotary_dim
        frequencies = beyond(config, width, frequencies, lengths)[:, None, :]  # [B, 1, D/2]
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # [B, T, D/2]
    scaling = attention_scaling(config)
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def apply_rope(
    x: Float[Array, "B T heads D"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T heads D"]:
    """Turn ``x`` ``[B, T, heads, D]`` by ``rope_rotation``'s angles; computes in float32, keeps the dtype of ``x``.

    Where there are fewer angles than half the channels, the last channels stay as they are.
    """
    turning = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # [B, T, 1, D/2]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if turning == x.shape[-1] else jnp.concatenate([turned, x[..., turning:]], axis=-1)


def _dynamic(
    config: RopeConfig, head_dim: int, trained: Float[Array, "half"], lengths: Int[Array, "B"]
) -> Float[Array, "B half"]:
    """Dynamic NTK: beyond the trained length the base grows, so that the longest wavelength spans the sequence."""
    limit = config.original_max_positions
    assert limit is not None  # RopeConfig checks it
    stretch = config.factor * lengths.astype(jnp.float32) / limit - (config.factor - 1.0)  # [B]
    base = config.theta * jnp.maximum(stretch, 1.0) ** (head_dim / (head_dim - 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    grown = 1.0 / base[:, None] ** exponents
    # The numpy values where nothing is stretched: short rows then equal other kinds of RoPE bit for bit.
    return jnp.where(lengths[:, None] > limit, grown, trained)


def _longrope(
    config: RopeConfig, head_dim: int, trained: Float[Array, "half"], lengths: Int[Array, "B"]
) -> Float[Array, "B half"]:
    """LongRoPE: the long factors for rows beyond the trained length."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(config.theta), exponents.astype(np.float64)).astype(np.float32)
    stretched = np.float32(1) / (np.asarray(config.long_factors, np.float32) * powers)
    assert config.original_max_positions is not None  # RopeConfig checks it
    return jnp.where(lengths[:, None] > config.original_max_positions, stretched, trained)


def _yarn(config: RopeConfig, head_dim: int, powers: Float[np.ndarray, "half"]) -> Float[np.ndarray, "half"]:
    """YaRN: pairs that turn often within the trained length are kept, slow ones interpolated, a ramp between."""

    def dimension(rotations: float) -> float:
        """Index (of D) whose wavelength turns so many times within the trained length."""
        limit = config.original_max_positions
        assert limit is not None  # RopeConfig checks it
        return head_dim * math.log(limit / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    interpolated = np.float32(1) / (np.float32(config.factor) * powers)
    return interpolated * (1 - keep) + (np.float32(1) / powers) * keep


def _llama3(config: RopeConfig, frequencies: Float[np.ndarray, "half"]) -> Float[np.ndarray, "half"]:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    limit = config.original_max_positions
    assert limit is not None  # RopeConfig checks it
    low, high = config.low_freq_factor, config.high_freq_factor
    if high <= low:
        raise ValueError(f"llama3 RoPE: expected high_freq_factor > low_freq_factor, got {high} and {low}.")
    wavelengths = np.float32(2 * math.pi) / frequencies
    slow = frequencies / np.float32(config.factor)
    blend = (np.float32(limit) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * slow + blend * frequencies
    stretched = np.where(wavelengths > limit / low, slow, frequencies)
    medium = (wavelengths >= limit / high) & (wavelengths <= limit / low)
    return np.where(medium, blended, stretched)
