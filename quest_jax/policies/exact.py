"""Attention's own logits, for methods that look at few queries, and for measuring."""

import jax
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
    rows = jnp.arange(len(q))
    return lax.map(lambda one: logits_of_row(view, *one), (rows, q, at, view.lengths))


def logits_of_row(
    view: LayerView, row: Int[Array, ""], q: Float[Array, "T H D"], at: Int[Array, "T"], length: Int[Array, ""]
) -> Float[Array, "K G T L"]:
    """As :func:`logits`, of one row of ``length`` tokens."""
    shape = pool_shape(view.kv)
    scale = q.shape[-1] ** -0.5
    keys, q = keys_of(view, row), pad_head_dim(q, shape.head_dim)
    by_head = q.reshape(len(q), shape.kv_heads, -1, shape.head_dim).transpose(1, 2, 0, 3)  # [K, G, T, D]
    flat = by_head.reshape(shape.kv_heads, -1, shape.head_dim).astype(keys.dtype)
    scores = dot("krd,kld->krl", flat, keys).reshape(*by_head.shape[:-1], -1) * scale
    place = jnp.arange(view.capacity)
    return jnp.where((place < length) & (place <= at[:, None]), scores, -jnp.inf)


def keys_of(view: LayerView, row: Int[Array, ""]) -> Float[Array, "K L D"]:
    """A copy of one row's keys, by position; what lies past its length may be anything."""
    shape = pool_shape(view.kv)
    pages = physical_pages(view.page_table, row, jnp.arange(view.pages_per_row), view.pages_per_row)
    keys, _ = gather_pages(view.kv, jnp.arange(shape.kv_heads)[:, None], pages[None])
    return keys.reshape(shape.kv_heads, -1, shape.head_dim)


def mass(q: Float[Array, "B T H D"], view: LayerView) -> Float[Array, "B K L"]:
    """What every token gets of the attention of ``q``, summed over the queries and the heads of a group, float32.

    Args:
      q: queries of the tokens from ``view.starts`` on; those at or past ``view.lengths`` do not count.
      view: the layer's cache; all of it is attended.
    """
    at = view.starts[:, None] + jnp.arange(q.shape[1])

    def one(args):
        row, q, at, length = args
        weights = jax.nn.softmax(logits_of_row(view, row, q, at, length), axis=-1)
        return jnp.where((at < length)[:, None], weights, 0).sum(axis=(1, 2))

    return lax.map(one, (jnp.arange(len(q)), q, at, view.lengths))


def column_mass(
    q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
) -> Float[Array, "B K L"]:
    """What every token got of the attention of ``q``, summed over the queries and the heads of a group.

    Args:
      q, seen, lse: as :meth:`~quest_jax.policies.base.Policy.observe` is given them.
      view: the layer's cache.
    """
    at = view.starts[:, None] + jnp.arange(q.shape[1])
    kv_heads = pool_shape(view.kv).kv_heads

    def one(args):
        row, q, at, lse, length = args
        sums = lse.T.reshape(kv_heads, -1, len(q), 1)
        real = (at < length)[:, None] & (sums > -jnp.inf)
        return jnp.where(real, jnp.exp(logits_of_row(view, row, q, at, length) - sums), 0).sum(axis=(1, 2))

    mass = lax.map(one, (jnp.arange(len(q)), q, at, lse, view.lengths))
    return mass if seen is None else jnp.where(seen, mass, 0)
