"""Attention's own logits, for methods that look at few queries, and for measuring."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.page_attention.reference import dot
from quest_jax.pallas_kernels.pages import gather_pages, pad_head_dim, physical_pages, pool_shape
from quest_jax.policies.base import LayerView


def logits(q: Float[Array, "B T H D"], at: Int[Array, "B T"], view: LayerView) -> Float[Array, "B K G T L"]:
    """Scaled products of queries at the positions ``at`` with every key, float32; ``-inf`` for what they do not see.

    Copies a row's keys: for measuring, and for methods that look at few queries.
    """
    shape = pool_shape(view.kv)
    scale = q.shape[-1] ** -0.5
    q = pad_head_dim(q, shape.head_dim)

    def one(args):
        row, q, at, length = args
        keys = keys_of(view, row)
        by_head = q.reshape(len(q), shape.kv_heads, -1, shape.head_dim).transpose(1, 2, 0, 3)  # [K, G, T, D]
        flat = by_head.reshape(shape.kv_heads, -1, shape.head_dim).astype(keys.dtype)
        scores = dot("krd,kld->krl", flat, keys).reshape(*by_head.shape[:-1], -1) * scale
        place = jnp.arange(view.capacity)
        return jnp.where((place < length) & (place <= at[:, None]), scores, -jnp.inf)

    return lax.map(one, (jnp.arange(len(q)), q, at, view.lengths))


def keys_of(view: LayerView, row: Int[Array, ""]) -> Float[Array, "K L D"]:
    """A copy of one row's keys, by position; what lies past its length may be anything."""
    shape = pool_shape(view.kv)
    pages = physical_pages(view.page_table, row, jnp.arange(view.pages_per_row), view.pages_per_row)
    keys, _ = gather_pages(view.kv, jnp.arange(shape.kv_heads)[:, None], pages[None])
    return keys.reshape(shape.kv_heads, -1, shape.head_dim)


def column_mass(
    q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
) -> Float[Array, "B K L"]:
    """What every token got of the attention of ``q``, summed over the queries and the heads of a group.

    Args:
      q, seen, lse: as :meth:`~quest_jax.policies.base.Policy.observe` is given them.
      view: the layer's cache.
    """
    rows, tokens, heads, _ = q.shape
    at = view.starts[:, None] + jnp.arange(tokens)
    kv_heads = pool_shape(view.kv).kv_heads
    sums = lse.transpose(0, 2, 1).reshape(rows, kv_heads, heads // kv_heads, tokens, 1)
    real = (at < view.lengths[:, None])[:, None, None, :, None]
    weights = jnp.where(real & (sums > -jnp.inf), jnp.exp(logits(q, at, view) - sums), 0)
    mass = weights.sum(axis=(2, 3))
    return mass if seen is None else jnp.where(seen, mass, 0)
