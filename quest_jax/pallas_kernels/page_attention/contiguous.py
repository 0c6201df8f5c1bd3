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

# Independent parts of the softmax: what keeps both the products and the cores busy.
_PARTS = 32


def serves(kv, page_table, tokens, layer) -> bool:
    """Says whether :func:`attend_in_place` applies: one query token a row, keys and values apart and in row order.

    Only float32: XLA's CPU client would widen half precision values into a copy of all of them.
    """
    in_order = isinstance(kv, tuple) and page_table is None and layer is None
    return in_order and tokens == 1 and kv[0].dtype == jnp.float32 and dispatch.current_target().platform == "cpu"


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
    capacity = pool_shape(kv).pages // len(lengths) * pool_shape(kv).page_size
    shapes = q.shape, q.shape[:-1]

    def in_place():
        return _attend_all(q, kv, lengths, scale)

    def nothing():
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

    # Each row by its own length: no result depends on the rows beside it.
    fits = 2 * lengths > capacity
    out, lse = lax.cond(fits.any(), in_place, nothing)
    # Unused memory may hold NaN, and zero times NaN is NaN. To clear it from the values first would copy them, so it is
    # looked for in the result: the loop, which skips what is unused, then says whether it comes from real tokens.
    fits = fits & ~jnp.isnan(out).any(axis=(1, 2, 3))
    rest = lax.cond(fits.all(), nothing, lambda: loop(jnp.where(fits, 0, lengths)))
    return jnp.where(fits[:, None, None, None], out, rest[0]), jnp.where(fits[:, None, None], lse, rest[1])


def _attend_all(q, kv, lengths, scale):
    shape, rows = pool_shape(kv), len(lengths)
    parts = math.gcd(shape.pages // rows, _PARTS)
    keys, values = (leaf.reshape(shape.kv_heads, rows, parts, -1, shape.head_dim) for leaf in kv)
    q = q.swapaxes(0, 1)  # the pool's order of axes: otherwise the product would turn the pool around
    at = jnp.arange(parts * keys.shape[3]).reshape(parts, -1)
    scores = jnp.einsum("kbgd,kbnld->kbngl", q, keys, precision=lax.Precision.HIGHEST) * scale
    scores = jnp.where((at < lengths[:, None, None])[:, :, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(axis=-1), jnp.finfo(jnp.float32).min)  # finite in a part without tokens
    weights = jnp.exp(scores - top[..., None])
    highest = top.max(axis=2)
    kept = jnp.exp(top - highest[:, :, None])
    out = jnp.einsum("kbngl,kbnld->kbngd", weights, values, precision=lax.Precision.HIGHEST)
    total = (weights.sum(axis=-1) * kept).sum(axis=2)
    out, lse = (out * kept[..., None]).sum(axis=2) / total[..., None], highest + jnp.log(total)
    return out.swapaxes(0, 1), lse.swapaxes(0, 1)
