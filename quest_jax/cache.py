"""The paged KV cache of all layers, with the min/max of every page and the length of every row.

One tuple entry per layer, not one stacked array: with the layers unrolled XLA then updates every buffer in place.
All functions are functional; donate the cache at your ``jit`` boundary and no step copies it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.norms import inverse_norms
from quest_jax.pallas_kernels.append.reference import min_max
from quest_jax.pallas_kernels.pages import (
    KV,
    Layout,
    gather_pages,
    physical_pages,
    pool_shape,
    stored_head_dim,
)


class Cache(struct.PyTreeNode):
    """Keys, values and page metadata.

    Attributes:
      kv: per layer, the pool of pages, fused ``[K, N, S, 2D]`` or split ``([K, N, S, D], [K, N, S, D])``.
      meta: per layer, float32 ``[B, K, P, 2D]``: ``[min | max]`` of each page's real keys, in logical page order.
      lengths: int32 ``[B]``, tokens in each row.
      page_table: int32 ``[B, P]``, logical to pool page; None when row ``b`` owns pages ``[b * P, (b + 1) * P)``.
      head_dim: of the model, at most the D that is stored; static.
      norms: per layer, float32 ``[B, K, P * S]``, the inverse norm of each real key by position; None where no policy
        needs them.
    """

    kv: tuple[KV, ...]
    meta: tuple[Float[Array, "B K P D2"], ...]
    lengths: Int[Array, "B"]
    page_table: Int[Array, "B P"] | None
    head_dim: int = struct.field(pytree_node=False)
    norms: tuple[Float[Array, "B K L"], ...] | None = None

    @property
    def page_size(self) -> int:
        """[S] tokens of a page."""
        return pool_shape(self.kv[0]).page_size

    @property
    def pages_per_row(self) -> int:
        """[P] pages a row can have."""
        return self.meta[0].shape[-2]

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and head dim of the model it was made for."""
        return len(self.kv), pool_shape(self.kv[0]).kv_heads, self.head_dim

    @property
    def capacity(self) -> int:
        """Tokens a row can hold."""
        return self.page_size * self.pages_per_row

    @property
    def nbytes(self) -> int:
        """Bytes of pages and metadata."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.kv, self.meta, self.norms)))


def init_cache(
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    batch: int,
    capacity: int,
    page_size: int = 16,
    dtype=jnp.float32,
    layout: Layout | Literal["auto"] = "auto",
    norms: bool = False,
) -> Cache:
    """Makes an empty cache.

    Args:
      n_layers, n_kv_heads, head_dim: of the model.
      batch: [B] rows.
      capacity: tokens that each row must be able to hold; rounded up to whole pages.
      page_size: [S] tokens of a page. 16 is Quest's; 32 halves the metadata and the selection's work.
      dtype: of keys and values, float32, bfloat16 or float16. The metadata is float32, so that the bound holds.
      layout: ``auto`` is ``split`` on a CPU and ``fused`` elsewhere; see :mod:`quest_jax.pallas_kernels.pages`.
      norms: keep the inverse norm of every key too, 4 bytes a token and KV head.

    On a TPU or GPU the fused layout stores ``head_dim`` rounded up to a multiple of 64, which is what the kernels read.

    Raises:
      ValueError: a size below 1, or an unknown dtype or layout.
    """
    sizes = dict(n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, batch=batch, capacity=capacity)
    sizes["page_size"] = page_size
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"init_cache: expected {name} to be an integer of at least 1, got {size!r}.")
    if jnp.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"init_cache: expected dtype float32, bfloat16 or float16, got {jnp.dtype(dtype).name}; keys of another "
            "dtype have no bound that the metadata keeps."
        )
    if layout not in ("auto", "fused", "split"):
        raise ValueError(f"init_cache: expected layout 'auto', 'fused' or 'split', got {layout!r}.")
    layout, stored = _stored(head_dim, layout)
    pages = -(-capacity // page_size)
    pool = (n_kv_heads, batch * pages, page_size)

    def one_layer() -> KV:
        if layout == "split":
            return jnp.zeros((*pool, stored), dtype), jnp.zeros((*pool, stored), dtype)
        return jnp.zeros((*pool, 2 * stored), dtype)

    # Every layer its own buffer: one array shared by all could not be donated.
    return Cache(
        kv=tuple(one_layer() for _ in range(n_layers)),
        meta=tuple(jnp.zeros((batch, n_kv_heads, pages, 2 * stored), jnp.float32) for _ in range(n_layers)),
        lengths=jnp.zeros(batch, jnp.int32),
        page_table=None,
        head_dim=head_dim,
        norms=tuple(jnp.zeros((batch, n_kv_heads, pages * page_size), jnp.float32) for _ in range(n_layers))
        if norms
        else None,
    )


def _stored(head_dim: int, layout: Layout | Literal["auto"]) -> tuple[Layout, int]:
    """The layout and the head dim that a pool has on the current target."""
    platform = dispatch.current_target().platform
    if layout == "auto":
        layout = "split" if platform == "cpu" else "fused"
    return layout, stored_head_dim(head_dim, layout, platform)


def cache_nbytes(
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    batch: int,
    capacity: int,
    page_size: int = 16,
    dtype=jnp.float32,
    layout: Layout | Literal["auto"] = "auto",
    norms: bool = False,
) -> int:
    """Returns the bytes that :func:`init_cache` of these sizes takes on the current target, without taking them."""
    _, stored = _stored(head_dim, layout)
    pages = batch * -(-capacity // page_size)
    per_page = page_size * (2 * stored * jnp.dtype(dtype).itemsize + 4 * norms) + 2 * stored * 4
    return n_layers * n_kv_heads * pages * per_page


def rebuild_metadata(cache: Cache) -> tuple[Float[Array, "B K P D2"], ...]:
    """Computes the metadata of every layer anew from the pages; pages without tokens get zeros.

    For tests and after loading pages from elsewhere: :func:`~quest_jax.pallas_kernels.append.op.append` keeps the
    metadata equal to this, bit for bit.
    """
    rows = jnp.arange(cache.lengths.shape[0])[:, None, None]
    logical = jnp.arange(cache.pages_per_row)
    physical = physical_pages(cache.page_table, rows, logical, cache.pages_per_row)  # [B, 1, P]
    heads = jnp.arange(pool_shape(cache.kv[0]).kv_heads)[:, None]
    at = logical[:, None] * cache.page_size + jnp.arange(cache.page_size)
    real = (at < cache.lengths[:, None, None])[:, None, :, :, None]

    def one_layer(kv: KV):
        keys, _ = gather_pages(kv, *jnp.broadcast_arrays(heads, physical))
        low, high = min_max(keys, real)
        return jnp.where(real.any(axis=-2), jnp.concatenate([low, high], axis=-1).astype(jnp.float32), 0)

    return tuple(one_layer(kv) for kv in cache.kv)


def rebuild_norms(cache: Cache) -> tuple[Float[Array, "B K L"], ...]:
    """Computes the inverse key norms of every layer anew from the pages; positions without a token get zeros."""
    rows = jnp.arange(cache.lengths.shape[0])[:, None, None]
    physical = physical_pages(cache.page_table, rows, jnp.arange(cache.pages_per_row), cache.pages_per_row)
    heads = jnp.arange(pool_shape(cache.kv[0]).kv_heads)[:, None]
    real = (jnp.arange(cache.capacity) < cache.lengths[:, None])[:, None]

    def one_layer(kv: KV):
        keys, _ = gather_pages(kv, *jnp.broadcast_arrays(heads, physical))
        return jnp.where(real, inverse_norms(keys).reshape(*keys.shape[:2], -1), 0)

    return tuple(one_layer(kv) for kv in cache.kv)


def token_slots(cache: Cache) -> Bool[Array, "N S"]:
    """Marks the slots of the pool that hold a real token."""
    pages = pool_shape(cache.kv[0]).pages
    rows = jnp.arange(cache.lengths.shape[0])[:, None]
    logical = jnp.arange(cache.pages_per_row)
    physical = physical_pages(cache.page_table, rows, logical, cache.pages_per_row)
    at = logical[:, None] * cache.page_size + jnp.arange(cache.page_size)
    return jnp.zeros((pages, cache.page_size), bool).at[physical].set(at < cache.lengths[:, None, None])
