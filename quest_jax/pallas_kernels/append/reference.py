"""``append`` in plain JAX: the specification, and the path of the CPU."""

import jax
import jax.numpy as jnp

from quest_jax.pallas_kernels.metadata import bounds_of, encode, metadata_kind
from quest_jax.pallas_kernels.pages import gather_pages, physical_pages, pool_shape, scatter_tokens


@jax.named_scope("append")
def append(kv, meta, keys, values, starts, ends, page_table, *, layer):
    """See :func:`quest_jax.pallas_kernels.append.op.append`."""
    shape = pool_shape(kv)
    pages_per_row = bounds_of(meta).shape[-2]
    rows = jnp.arange(keys.shape[0])[:, None]

    positions = starts[:, None] + jnp.arange(keys.shape[1])
    page = positions // shape.page_size
    written = (positions < ends[:, None]) & (page < pages_per_row)
    physical = physical_pages(page_table, rows, jnp.where(written, page, 0), pages_per_row)
    physical = jnp.where(written, physical, shape.pages)  # out of range: the scatter drops it
    head_major = (2, 0, 1, 3)
    kv = scatter_tokens(
        kv, keys.transpose(head_major), values.transpose(head_major), physical, positions % shape.page_size, layer
    )

    # T tokens touch at most ceil(T / S) + 1 pages. They are read back and reduced rather than folded into the old
    # min/max: a fold cannot forget a token that is overwritten.
    touched = starts[:, None] // shape.page_size + jnp.arange(-(-keys.shape[1] // shape.page_size) + 1)
    live = (touched * shape.page_size < ends[:, None]) & (touched < pages_per_row) & (starts < ends)[:, None]
    physical = physical_pages(page_table, rows, jnp.where(live, touched, 0), pages_per_row)
    heads = jnp.arange(shape.kv_heads)[:, None, None]
    stored, _ = gather_pages(kv, heads, physical[None], layer)  # [K, B, touched, S, D]
    real = touched[:, :, None] * shape.page_size + jnp.arange(shape.page_size) < ends[:, None, None]
    low, high = min_max(stored, real[None, ..., None])
    bounds = encode(low, high, metadata_kind(meta))
    index = (rows[None], heads, jnp.where(live, touched, pages_per_row)[None])
    if layer is not None:
        index = (jnp.full_like(heads, layer), *index)
    return kv, jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), meta, bounds)


def min_max(keys, real):
    """Reduces ``keys [..., S, D]`` over the slots where ``real`` (broadcastable, ``[..., S, 1]``) holds.

    Returns:
      ``(low, high)``, each ``[..., D]``; infinities of the wrong sign where no slot is real.
    """
    low = jnp.where(real, keys, jnp.inf).min(axis=-2)
    high = jnp.where(real, keys, -jnp.inf).max(axis=-2)
    return low, high
