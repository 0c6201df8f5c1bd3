"""The pool of KV pages: its two layouts, and where a page of a sequence lies in it.

A pool holds the pages of all sequences of one layer, KV-head-major:

* ``fused``: one array ``[K, N, S, 2D]`` with ``[key | value]`` on the last axis: one contiguous read per page, and
  the only form whose last axis fills TPU lanes at ``D = 64``.
* ``split``: a pair ``(keys [K, N, S, D], values [K, N, S, D])``. On a CPU, dense attention over it is 15 % (D = 128)
  to 2x (D = 64) faster, because a matrix product needs no strided half of the fused array copied first.

Either may be stacked, ``[layers, K, N, S, ...]``; then every op takes ``layer``, and no layer is ever sliced out (a
slice of the cache is a copy of it).

A kernel copies whole pages, so their rows must be whole tiles. A fused pool for a TPU or GPU therefore has its head dim
rounded up to :data:`TILE`: ``D`` is then what is *stored*, and channels past the model's head dim are zeros, in the
metadata too. The ops take queries, keys and values of the model's head dim.

Pages are addressed logically: page ``p`` of row ``b`` holds its tokens ``[p * S, (p + 1) * S)``. ``page_table``
``[B, P]`` maps to the pool; ``None`` is the identity, row ``b`` owning pages ``[b * P, (b + 1) * P)``.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KV = Array | tuple[Array, Array]
Layout = Literal["fused", "split"]
Layer = int | Int[Array, ""] | None
TILE = 64
"""Of a stored head dim: ``[key | value]`` rows fill the 128 lanes of a TPU, keys the 64 rows of a GPU's products."""


class PoolShape(NamedTuple):
    """Sizes of a pool: KV heads [K], pages [N], page size in tokens [S], stored head dim [D]."""

    kv_heads: int
    pages: int
    page_size: int
    head_dim: int


def pool_shape(kv: KV) -> PoolShape:
    """Returns the sizes of ``kv``, stacked or not, whichever layout it has."""
    leaf = kv[0] if isinstance(kv, tuple) else kv
    kv_heads, pages, page_size, width = leaf.shape[-4:]
    return PoolShape(kv_heads, pages, page_size, width if isinstance(kv, tuple) else width // 2)


def stored_head_dim(head_dim: int, layout: Layout, platform: str) -> int:
    """Returns the head dim of the pool that a model's cache has on ``platform``: whole tiles where kernels read it."""
    padded = layout == "fused" and platform in ("tpu", "gpu")
    return -(-head_dim // TILE) * TILE if padded else head_dim


def holds(stored: int, head_dim: int, layout: Layout = "fused") -> bool:
    """Says whether a pool or metadata of head dim ``stored`` is one for ``head_dim``, as it is or padded."""
    return stored in (head_dim, stored_head_dim(head_dim, layout, "tpu"))


def pad_head_dim(array: Float[Array, "*shape D"], stored: int) -> Float[Array, "*shape D2"]:
    """Appends zeros to the last axis up to ``stored``; what has that width is returned as it is."""
    missing = stored - array.shape[-1]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def pool_dtype(kv: KV):
    """Returns the dtype of the keys and values."""
    return (kv[0] if isinstance(kv, tuple) else kv).dtype


def pool_layout(kv: KV) -> Layout:
    """Returns the name of the pool's layout."""
    return "split" if isinstance(kv, tuple) else "fused"


def as_tokens(kv: KV, page_table: Array | None) -> tuple[KV, Array | None]:
    """Views a pool, and its page table, as one whose pages are single tokens: position and page are then the same.

    Nothing is copied but the table, which grows to an entry a token.
    """

    def view(leaf):
        *front, pages, size, width = leaf.shape
        return leaf.reshape(*front, pages * size, 1, width)

    if page_table is not None:
        size = pool_shape(kv).page_size
        page_table = (page_table[..., None] * size + jnp.arange(size)).reshape(len(page_table), -1)
    return (view(kv[0]), view(kv[1])) if isinstance(kv, tuple) else view(kv), page_table


def physical_pages(page_table: Array | None, row: Array, logical: Array, pages_per_row: int) -> Array:
    """Maps logical pages of ``row`` to pool pages; ``row`` broadcasts against ``logical``."""
    if page_table is None:
        return row * pages_per_row + logical
    return page_table[row, logical]


def gather_pages(kv: KV, heads: Array, physical: Array, layer: Layer = None) -> tuple[Array, Array]:
    """Reads whole pages.

    Args:
      kv: pool.
      heads, physical: int32, broadcast to a common shape ``[...]``; must be in range (not checked).
      layer: index into a stacked pool.

    Returns:
      keys and values, each ``[..., S, D]``.
    """
    shape = pool_shape(kv)
    rows = heads * shape.pages + physical
    if layer is not None:
        rows = rows + layer * (shape.kv_heads * shape.pages)

    # Whole pages as rows of a matrix: a gather of contiguous rows is a memcpy each on every backend.
    def read(leaf):
        flat = leaf.reshape(-1, leaf.shape[-2] * leaf.shape[-1])
        return flat.at[rows].get(mode="promise_in_bounds").reshape(*rows.shape, *leaf.shape[-2:])

    if isinstance(kv, tuple):
        return read(kv[0]), read(kv[1])
    fused = read(kv)
    return fused[..., : shape.head_dim], fused[..., shape.head_dim :]


def scatter_tokens(kv: KV, keys: Array, values: Array, physical: Array, slots: Array, layer: Layer = None) -> KV:
    """Writes tokens, in place when ``kv`` is donated.

    Args:
      kv: pool.
      keys, values: ``[K, ..., D]``.
      physical, slots: int32 ``[...]``, page of the pool and slot in it; a page out of range drops the token.
      layer: index into a stacked pool.
    """
    # Vector indices on every axis: the form that XLA updates in place. A slice or an integer index here makes it
    # copy the whole cache on some backends.
    heads = jnp.arange(keys.shape[0]).reshape(-1, *(1,) * physical.ndim)
    index = (heads, physical[None], slots[None])
    if layer is not None:
        index = (jnp.full_like(heads, layer), *index)

    def write(leaf, new):
        return leaf.at[index].set(new.astype(leaf.dtype), mode="drop")

    if isinstance(kv, tuple):
        return write(kv[0], keys), write(kv[1], values)
    return write(kv, jnp.concatenate([keys, values], axis=-1))
