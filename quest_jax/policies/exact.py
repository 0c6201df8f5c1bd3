"""Attention's own logits, for methods that look at few queries, and for measuring."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
        pages = physical_pages(view.page_table, row, jnp.arange(view.pages_per_row), view.pages_per_row)
        keys, _ = gather_pages(view.kv, jnp.arange(shape.kv_heads)[:, None], pages[None])
        keys = keys.reshape(shape.kv_heads, -1, shape.head_dim)
        by_head = q.reshape(len(q), shape.kv_heads, -1, shape.head_dim).transpose(1, 2, 0, 3)  # [K, G, T, D]
        flat = by_head.reshape(shape.kv_heads, -1, shape.head_dim).astype(keys.dtype)
        scores = dot("krd,kld->krl", flat, keys).reshape(*by_head.shape[:-1], -1) * scale
        place = jnp.arange(view.capacity)
        return jnp.where((place < length) & (place <= at[:, None]), scores, -jnp.inf)

    return lax.map(one, (jnp.arange(len(q)), q, at, view.lengths))
