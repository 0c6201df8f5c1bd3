"""Dense decode attention over a row's pages where they lie, for the CPU.

The loop of :mod:`~quest_jax.pallas_kernels.page_attention.reference` copies every block of keys and values before it
multiplies them, because XLA's CPU client cannot hand a part of an array to a product. The whole array it can: without
a page table a row's pages are one array, and where the row fills more than half of it, reading all of it is cheaper.
"""

import math

import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.pages import pool_shape

# Independent parts of the softmax: what keeps both the products and the cores busy. The part in which a row ends is
# copied, and with fewer of them it would be too large.
_PARTS, _FEWEST_PARTS = 32, 8

# Scores and weights take eight bytes a query head and token: with this many channels a query head, a sixteenth of what
# the keys and values take. Together with the copied part it is less than a tenth.
_CHANNELS_PER_HEAD = 16


def serves(kv, page_table, heads, tokens, layer) -> bool:
    """Says whether :func:`attend_in_place` applies: one query token a row, keys and values apart and in row order.

    Only float32: XLA's CPU client would widen half precision values into a copy of all of them.
    """
    shape = pool_shape(kv)
    in_order = isinstance(kv, tuple) and page_table is None and layer is None
    one_pass = tokens == 1 and scores_are_few(heads, shape.kv_heads, shape.head_dim)
    here = dispatch.current_target().platform == "cpu"
    return in_order and one_pass and here and kv[0].dtype == jnp.float32


def scores_are_few(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Says whether the scores of all keys at once are few beside the keys and values themselves."""
    return heads * _CHANNELS_PER_HEAD <= kv_heads * head_dim


def attend_in_place(q, kv, lengths, scale, loop):
    """Attends each row to all of its tokens.

    Args:
      q: ``[B, K, G, D]``, one query token a row.
      kv: keys and values ``[K, B * P, S, D]``.
      lengths: int32 ``[B]``.
      scale: factor of the scores.
      loop: a function of lengths that does the same, and nothing for rows of length 0; for the rows that are not full
        enough.

    Returns:
      ``(out, lse)``, float32 ``[B, K, G, D]`` and ``[B, K, G]``.
    """
    shape = pool_shape(kv)
    pages = shape.pages // len(lengths)
    parts = math.gcd(pages, _PARTS)
    if parts < _FEWEST_PARTS:
        return loop(lengths)
    # Each row by its own length: no result depends on the rows beside it.
    fits = 2 * lengths > pages * shape.page_size
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:-1], jnp.float32)
    out, lse = lax.cond(fits.any(), lambda: _attend_all(q, kv, lengths, scale, parts), lambda: nothing)
    rest = lax.cond(fits.all(), lambda: nothing, lambda: loop(jnp.where(fits, 0, lengths)))
    return jnp.where(fits[:, None, None, None], out, rest[0]), jnp.where(fits[:, None, None], lse, rest[1])


def _attend_all(q, kv, lengths, scale, parts):
    shape, rows = pool_shape(kv), len(lengths)
    keys, values = (leaf.reshape(shape.kv_heads, rows, parts, -1, shape.head_dim) for leaf in kv)
    q = q.swapaxes(0, 1)  # the pool's order of axes: otherwise the product would turn the pool around
    at = jnp.arange(parts * keys.shape[3]).reshape(parts, -1)
    real = at < lengths[:, None, None]
    scores = jnp.einsum("kbgd,kbnld->kbngl", q, keys, precision=lax.Precision.HIGHEST) * scale
    scores = jnp.where(real[:, :, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(axis=-1), jnp.finfo(jnp.float32).min)  # finite in a part without tokens
    weights = jnp.exp(scores - top[..., None])
    highest = top.max(axis=2)
    kept = jnp.exp(top - highest[:, :, None])
    out = jnp.einsum("kbngl,kbnld->kbngd", weights, values, precision=lax.Precision.HIGHEST)
    # Unused memory may hold NaN, and zero times NaN is NaN. Only the part in which the row ends holds both: its values
    # are cleared first, in a copy; the parts after it are left out.
    end = jnp.maximum(lengths - 1, 0) // keys.shape[3]
    row = jnp.arange(rows)
    cleared = jnp.where(real[row, end][..., None], values[:, row, end], 0)
    last = jnp.einsum("kbgl,kbld->kbgd", weights[:, row, end], cleared, precision=lax.Precision.HIGHEST)
    part = jnp.arange(parts)[:, None, None]
    end = end[:, None, None, None]
    out = jnp.where(part < end, out, jnp.where(part == end, last[:, :, None], 0))
    total = (weights.sum(axis=-1) * kept).sum(axis=2)
    out, lse = (out * kept[..., None]).sum(axis=2) / total[..., None], highest + jnp.log(total)
    return out.swapaxes(0, 1), lse.swapaxes(0, 1)
