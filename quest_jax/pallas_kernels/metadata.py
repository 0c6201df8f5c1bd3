r"""How the min and max of a page are kept: as they are, or in fewer bytes, rounded outward so that they stay a bound.

* ``float32``: ``[min | max]`` in one array, ``8 D`` bytes a page and KV head. Exact.
* ``bfloat16``: the same array, min rounded down and max up: ``4 D`` bytes. Exact too where the keys are bfloat16.
* ``int8``: :class:`ScaledMetadata`, ``2 D + 8`` bytes: an integer a bound, and a step and an offset for the page.

A page's bounds are always made from its keys, which are in the cache and are read back when one is appended: rounding
what was rounded before would move them outward with every token, and a fold could not forget an overwritten key.

**The arithmetic of int8.** A bound is ``offset + step * code``, ``code`` in [-128, 127], and must hold after that was
computed in float32, fused or not. So it is made exact: ``step`` has 5 significant bits, ``offset`` is a whole number of
steps, and ``step`` is at least ``2**-19`` of the page's largest key; then no sum needs more than 24 bits. The step is
``(max - min) / 251`` of all channels of the page, rounded up by a sixteenth at most. One step for all channels lets one
with large keys widen the others: what that costs in recall is measured by ``quest-jax eval metadata``.

Keys count as the device's arithmetic counts them: where it flushes denormals (a CPU under XLA does), they are zero. A
page with a key that is NaN or infinite has such bounds too, in int8 in all its channels. Keys beyond the largest
bfloat16 (``3.39e38``), in int8 beyond ``2**126``, count as infinite.
"""

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

Kind = Literal["float32", "bfloat16", "int8"]


class ScaledMetadata(NamedTuple):
    """Bounds as integers: ``offset + step * code``.

    Attributes:
      codes: ``[min | max]`` of each stored key channel, in steps from the offset.
      steps, offsets: float32, of each page and KV head.
    """

    codes: Int8[Array, "*layers B K P D2"]
    steps: Float[Array, "*layers B K P"]
    offsets: Float[Array, "*layers B K P"]


Metadata = Float[Array, "*layers B K P D2"] | ScaledMetadata
BlockMetadata = Float[Array, "B K blocks D2"] | ScaledMetadata
"""The same of blocks of pages."""


def bounds_of(meta: Metadata | BlockMetadata) -> Array:
    """The array ``[.., B, K, P, 2D]`` that has the sizes: the bounds themselves, or their codes."""
    return meta.codes if isinstance(meta, ScaledMetadata) else meta


def metadata_kind(meta: Metadata) -> Kind:
    """Returns how ``meta`` is kept."""
    return cast(Kind, bounds_of(meta).dtype.name)


def metadata_nbytes(head_dim: int, kind: Kind) -> int:
    """Returns the bytes of one page and KV head.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in Kind.__args__:
        known = ", ".join(repr(name) for name in Kind.__args__)
        raise ValueError(f"metadata: expected one of {known}, got {kind!r}.")
    return 2 * head_dim * jnp.dtype(kind).itemsize + (8 if kind == "int8" else 0)


def empty_metadata(rows: int, kv_heads: int, pages: int, head_dim: int, kind: Kind) -> Metadata:
    """Makes the metadata of one layer without tokens, zeros."""
    bounds = jnp.zeros((rows, kv_heads, pages, 2 * head_dim), kind)
    if kind != "int8":
        return bounds
    return ScaledMetadata(bounds, jnp.zeros(bounds.shape[:-1]), jnp.zeros(bounds.shape[:-1]))


def encode(low: Float[Array, "*pages D"], high: Float[Array, "*pages D"], kind: Kind) -> Any:
    """Rounds exact bounds outward to what ``kind`` keeps; the leading axes are those of the result."""
    if kind == "int8":
        return _scaled(low.astype(jnp.float32), high.astype(jnp.float32))
    bounds = jnp.concatenate([low, high], axis=-1).astype(jnp.float32)
    return bounds if kind == "float32" else _outward_bfloat16(bounds)


def decode(meta: Metadata) -> Float[Array, "*layers B K P D2"]:
    """Returns the bounds in float32, exactly."""
    if not isinstance(meta, ScaledMetadata):
        return meta.astype(jnp.float32)
    return meta.offsets[..., None] + meta.steps[..., None] * meta.codes.astype(jnp.float32)


def keep_used(meta: Metadata, used: Bool[Array, "B P"]) -> Metadata:
    """Returns ``meta`` with zeros for the pages that are not ``used``."""

    def one(leaf):
        return jnp.where(used.reshape(len(used), 1, -1, *(1,) * (leaf.ndim - 3)), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(one, meta)


def gather_blocks(
    meta: Metadata, chosen: Int[Array, "B lists n"], block_pages: int
) -> Float[Array, "B lists pages D2"] | ScaledMetadata:
    """Reads the metadata of whole blocks of ``block_pages`` pages, each a contiguous row.

    Args:
      meta: of one layer, ``[B, K, P, 2D]``; P a multiple of ``block_pages``.
      chosen: blocks of each list, in range (not checked). A KV head has one list, or one for each head of its group.

    Returns:
      metadata ``[B, lists, n * block_pages, 2D]``, in the order of ``chosen``.
    """
    rows, kv_heads, pages = bounds_of(meta).shape[:3]
    lists, n_blocks = chosen.shape[1], pages // block_pages
    head = jnp.arange(rows)[:, None] * kv_heads + jnp.arange(lists) // (lists // kv_heads)
    index = head[..., None] * n_blocks + chosen

    def read(leaf):
        flat = leaf.reshape(rows * kv_heads * n_blocks, -1)
        found = flat.at[index].get(mode="promise_in_bounds")
        return found.reshape(*chosen.shape[:2], -1, *leaf.shape[3:])

    return jax.tree.map(read, meta)


def _outward_bfloat16(bounds):
    bits = jax.lax.bitcast_convert_type(bounds, jnp.uint32)
    # bfloat16 is the upper half of float32. Dropping the lower half moves towards zero, and adding what fills it first
    # moves away: that is outward for a negative min and a positive max.
    is_max = jnp.arange(bounds.shape[-1]) >= bounds.shape[-1] // 2
    away = jnp.signbit(bounds) != is_max
    bits = jnp.where(away, bits + jnp.uint32(0xFFFF), bits) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(bounds), rounded, bounds).astype(jnp.bfloat16)


def _scaled(low, high):
    least, most = low.min(axis=-1), high.max(axis=-1)
    largest = jnp.maximum(jnp.abs(least), jnp.abs(most))
    # Halved exponents first: the difference of two large numbers may not overflow.
    step = (most * 2.0**-8 - least * 2.0**-8) * (2.0**8 / 251)
    step = jnp.maximum(jnp.maximum(step, largest * 2.0**-19), 2.0**-122)
    bits = jax.lax.bitcast_convert_type(step, jnp.uint32)
    step = jax.lax.bitcast_convert_type((bits + jnp.uint32((1 << 19) - 1)) & jnp.uint32(0xFFF80000), jnp.float32)

    def whole(bound, outward):
        """Steps from zero to ``bound``, rounded by ``outward``; a quotient that was rounded the other way is undone."""
        steps = outward(bound / step[..., None])
        reached = steps * step[..., None]
        if outward is jnp.floor:
            return jnp.where(reached > bound, steps - 1, steps)
        return jnp.where(reached < bound, steps + 1, steps)

    below, above = whole(low, jnp.floor), whole(high, jnp.ceil)
    first = below.min(axis=-1) + 128
    finite = largest < 2.0**126  # below it no sum overflows
    codes = jnp.concatenate([below, above], axis=-1) - first[..., None]
    # The others reach from -inf to inf, or are NaN: -1 and 1 times a step that is not finite.
    sides = jnp.where(jnp.arange(codes.shape[-1]) < low.shape[-1], -1, 1)
    codes = jnp.where(finite[..., None], codes, sides).astype(jnp.int8)
    return ScaledMetadata(codes, jnp.where(finite, step, largest * jnp.inf), jnp.where(finite, first * step, 0))
