"""The paged KV cache of all layers, with the min/max of every page and the length of every row.

One tuple entry per layer, not one stacked array: with the layers unrolled XLA then updates every buffer in place.
All functions are functional; donate the cache at your ``jit`` boundary and no step copies it.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.blocks import block_metadata
from quest_jax.pallas_kernels.append.norms import inverse_norms
from quest_jax.pallas_kernels.append.reference import min_max
from quest_jax.pallas_kernels.metadata import (
    BlockMetadata,
    Kind,
    Metadata,
    ScaledMetadata,
    bounds_of,
    empty_metadata,
    encode,
    keep_used,
    metadata_kind,
    metadata_nbytes,
)
from quest_jax.pallas_kernels.pages import (
    KV,
    Layout,
    gather_pages,
    physical_pages,
    pool_shape,
    stored_head_dim,
)

# As Metadata, of any number of pages: in a compact state layers differ in it.
_OfLayer = Float[Array, "B K _ D2"] | ScaledMetadata


class Cache(struct.PyTreeNode):
    """Keys, values and page metadata.

    Attributes:
      kv: per layer, the pool of pages, fused ``[K, N, S, 2D]`` or split ``([K, N, S, D], [K, N, S, D])``.
      meta: per layer, ``[min | max]`` of each page's real keys, in logical page order: float32 ``[B, K, P, 2D]``, or
        narrower, see :mod:`quest_jax.pallas_kernels.metadata`.
      lengths: int32 ``[B]``, tokens in each row.
      page_table: int32 ``[B, P]``, logical to pool page; None when row ``b`` owns pages ``[b * P, (b + 1) * P)``.
      head_dim: of the model, at most the D that is stored; static.
      norms: per layer, float32 ``[B, K, P * S]``, the inverse norm of each real key by position; None where no policy
        needs them.
      blocks: per layer, the same as ``meta`` of each block of pages, ``[B, K, P / block_pages, 2D]``; None where no
        policy needs it.
      memory: per layer, what the decoding policy keeps besides; None where it keeps nothing.
      limit: tokens that a row of a compact state may come to, see :func:`quest_jax.compact`: its layers have fewer
        slots, and their own number of pages. None where every layer has room for all; static.
    """

    kv: tuple[KV, ...]
    meta: tuple[_OfLayer, ...]
    lengths: Int[Array, "B"]
    page_table: Int[Array, "B P"] | None
    head_dim: int = struct.field(pytree_node=False)
    norms: tuple[Float[Array, "B K L"], ...] | None = None
    blocks: tuple[BlockMetadata, ...] | None = None
    memory: tuple[Any, ...] | None = None
    limit: int | None = struct.field(pytree_node=False, default=None)

    @property
    def page_size(self) -> int:
        """[S] tokens of a page."""
        return pool_shape(self.kv[0]).page_size

    @property
    def pages_per_row(self) -> int:
        """[P] pages a row can have."""
        return bounds_of(self.meta[0]).shape[-2]

    @property
    def metadata(self) -> Kind:
        """How the page metadata is kept."""
        return metadata_kind(self.meta[0])

    @property
    def block_pages(self) -> int | None:
        """Pages of a block, None without :attr:`blocks`."""
        return None if self.blocks is None else self.pages_per_row // bounds_of(self.blocks[0]).shape[-2]

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and head dim of the model it was made for."""
        return len(self.kv), pool_shape(self.kv[0]).kv_heads, self.head_dim

    @property
    def capacity(self) -> int:
        """Tokens a row can come to."""
        return self.page_size * self.pages_per_row if self.limit is None else self.limit

    @property
    def nbytes(self) -> int:
        """Bytes of pages and metadata."""
        kept = self.kv, self.meta, self.norms, self.blocks, self.memory
        return sum(leaf.nbytes for leaf in jax.tree.leaves(kept))


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
    metadata: Kind = "float32",
    block_pages: int | None = None,
) -> Cache:
    """Makes an empty cache.

    Args:
      n_layers, n_kv_heads, head_dim: of the model.
      batch: [B] rows.
      capacity: tokens that each row must be able to hold; rounded up to whole pages, and whole blocks of them.
      page_size: [S] tokens of a page. 16 is Quest's; 32 halves the metadata and the selection's work.
      dtype: of keys and values, float32, bfloat16 or float16.
      layout: ``auto`` is ``split`` on a CPU and ``fused`` elsewhere; see :mod:`quest_jax.pallas_kernels.pages`.
      norms: keep the inverse norm of every key too, 4 bytes a token and KV head.
      metadata: of pages, ``float32``, or rounded outward to ``bfloat16`` or ``int8``; a bound in all three. Bytes of a
        page and KV head: 8 D, 4 D, 2 D + 8.
      block_pages: keep the min and max of every so many pages too, for a policy of two levels; None does not.

    On a TPU or GPU the fused layout stores ``head_dim`` rounded up to a multiple of 64, which is what the kernels read.

    Raises:
      ValueError: a size below 1, or an unknown dtype, layout or metadata.
    """
    sizes = dict(n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, batch=batch, capacity=capacity)
    sizes |= {"page_size": page_size} | ({} if block_pages is None else {"block_pages": block_pages})
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
    metadata_nbytes(head_dim, metadata)  # raises for a kind that is none
    layout, stored = _stored(head_dim, layout)
    pages = _pages_for(capacity, page_size, block_pages)
    pool = (n_kv_heads, batch * pages, page_size)

    def one_layer() -> KV:
        if layout == "split":
            return jnp.zeros((*pool, stored), dtype), jnp.zeros((*pool, stored), dtype)
        return jnp.zeros((*pool, 2 * stored), dtype)

    # Every layer its own buffer: one array shared by all could not be donated.
    return Cache(
        kv=tuple(one_layer() for _ in range(n_layers)),
        meta=tuple(empty_metadata(batch, n_kv_heads, pages, stored, metadata) for _ in range(n_layers)),
        lengths=jnp.zeros(batch, jnp.int32),
        page_table=None,
        head_dim=head_dim,
        norms=tuple(jnp.zeros((batch, n_kv_heads, pages * page_size), jnp.float32) for _ in range(n_layers))
        if norms
        else None,
        blocks=tuple(empty_metadata(batch, n_kv_heads, pages // block_pages, stored, metadata) for _ in range(n_layers))
        if block_pages
        else None,
    )


def _pages_for(capacity: int, page_size: int, block_pages: int | None) -> int:
    """Pages of a row: blocks of them are read as rows of a matrix, so there are whole ones only."""
    unit = block_pages or 1
    return -(-capacity // (page_size * unit)) * unit


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
    metadata: Kind = "float32",
    block_pages: int | None = None,
) -> int:
    """Returns the bytes that :func:`init_cache` of these sizes takes on the current target, without taking them."""
    _, stored = _stored(head_dim, layout)
    pages, bounds = _pages_for(capacity, page_size, block_pages), metadata_nbytes(stored, metadata)
    per_page = page_size * (2 * stored * jnp.dtype(dtype).itemsize + 4 * norms) + bounds
    per_head = pages * per_page + (pages // block_pages * bounds if block_pages else 0)
    return n_layers * batch * n_kv_heads * per_head


def _expect_all(cache: Cache, name: str) -> None:
    if cache.limit is not None:
        raise NotImplementedError(
            f"{name}: a compact cache has tokens where their position does not say; call it before quest_jax.compact."
        )


def rebuild_metadata(cache: Cache) -> tuple[Metadata, ...]:
    """Computes the metadata of every layer anew from the pages; pages without tokens get zeros.

    For tests and after loading pages from elsewhere: :func:`~quest_jax.pallas_kernels.append.op.append` keeps the
    metadata equal to this, bit for bit.
    """
    _expect_all(cache, "rebuild_metadata")
    rows = jnp.arange(cache.lengths.shape[0])[:, None, None]
    logical = jnp.arange(cache.pages_per_row)
    physical = physical_pages(cache.page_table, rows, logical, cache.pages_per_row)  # [B, 1, P]
    heads = jnp.arange(pool_shape(cache.kv[0]).kv_heads)[:, None]
    at = logical[:, None] * cache.page_size + jnp.arange(cache.page_size)
    real = (at < cache.lengths[:, None, None])[:, None, :, :, None]
    used = logical * cache.page_size < cache.lengths[:, None]

    def one_layer(kv: KV):
        keys, _ = gather_pages(kv, *jnp.broadcast_arrays(heads, physical))
        low, high = min_max(keys, real)
        return keep_used(encode(low, high, cache.metadata), used)

    return tuple(one_layer(kv) for kv in cache.kv)


def rebuild_blocks(cache: Cache) -> tuple[BlockMetadata, ...] | None:
    """Computes the metadata of the blocks of every layer anew from that of the pages; None where the cache has none."""
    _expect_all(cache, "rebuild_blocks")
    if cache.blocks is None:
        return None
    n_blocks = bounds_of(cache.blocks[0]).shape[-2]
    used = -(-cache.lengths // cache.page_size)
    every = jnp.broadcast_to(jnp.arange(n_blocks), (len(used), n_blocks))
    real = every * (cache.pages_per_row // n_blocks) < used[:, None]
    return tuple(keep_used(block_metadata(meta, every, n_blocks, used), real) for meta in cache.meta)


def rebuild_norms(cache: Cache) -> tuple[Float[Array, "B K L"], ...]:
    """Computes the inverse key norms of every layer anew from the pages; positions without a token get zeros."""
    _expect_all(cache, "rebuild_norms")
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
    _expect_all(cache, "token_slots")
    pages = pool_shape(cache.kv[0]).pages
    rows = jnp.arange(cache.lengths.shape[0])[:, None]
    logical = jnp.arange(cache.pages_per_row)
    physical = physical_pages(cache.page_table, rows, logical, cache.pages_per_row)
    at = logical[:, None] * cache.page_size + jnp.arange(cache.page_size)
    return jnp.zeros((pages, cache.page_size), bool).at[physical].set(at < cache.lengths[:, None, None])
