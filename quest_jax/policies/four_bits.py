"""Keys in 4 bits a channel, each with a step and an offset of its own."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8


def to_4_bits(keys: Float[Array, "B T K D"]) -> tuple[UInt8[Array, "B T K half"], Float[Array, "B T K 2"]]:
    """Rounds each key to ``least + step * code``, codes 0 to 15, of its own least and largest channel.

    Byte i has the code of channel i in its low bits, and that of channel ``half + i`` in its high ones.
    """
    keys = keys.astype(jnp.float32)
    least, most = keys.min(axis=-1, keepdims=True), keys.max(axis=-1, keepdims=True)
    step = (most - least) / 15
    codes = jnp.round((keys - least) / jnp.where(step > 0, step, 1)).astype(jnp.uint8)
    half = -(-codes.shape[-1] // 2)
    high = jnp.pad(codes[..., half:], [(0, 0)] * (codes.ndim - 1) + [(0, 2 * half - codes.shape[-1])])
    return codes[..., :half] | high << 4, jnp.concatenate([step, least], axis=-1)


def from_4_bits(
    codes: UInt8[Array, "*keys half"], scales: Float[Array, "*keys 2"], width: int
) -> Float[Array, "*keys D"]:
    """The keys that :func:`to_4_bits` kept."""
    whole = jnp.concatenate([codes & 15, codes >> 4], axis=-1)[..., :width].astype(jnp.float32)
    return whole * scales[..., :1] + scales[..., 1:]
