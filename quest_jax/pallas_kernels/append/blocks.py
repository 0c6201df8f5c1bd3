"""The second level of the metadata: the min and max of every block of pages, kept beside those of the pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from quest_jax.pallas_kernels.metadata import (
    BlockMetadata,
    Metadata,
    bounds_of,
    decode,
    encode,
    gather_blocks,
    metadata_kind,
)


@jax.named_scope("append_blocks")
def append_blocks(
    blocks: BlockMetadata,
    meta: Metadata,
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    *,
    tokens: int,
    page_size: int,
) -> BlockMetadata:
    """Brings the blocks up to date in which :func:`~quest_jax.pallas_kernels.append.op.append` wrote.

    Made anew from the pages' metadata, as that is from the keys, and of its kind. In place when ``blocks`` is donated.

    Args:
      blocks: metadata of the blocks of one layer; P is a multiple of their number.
      meta: of the pages, after the write.
      starts, ends: positions written in each row, at most ``tokens`` of them.
      tokens: T.
      page_size: [S] tokens of a page.
    """
    n_blocks = bounds_of(blocks).shape[-2]
    block_tokens = bounds_of(meta).shape[-2] // n_blocks * page_size
    touched = starts[:, None] // block_tokens + jnp.arange(-(-tokens // block_tokens) + 1)
    live = (touched * block_tokens < ends[:, None]) & (touched < n_blocks) & (starts < ends)[:, None]
    new = block_metadata(meta, jnp.where(live, touched, 0), n_blocks, -(-ends // page_size))
    rows, kv_heads = bounds_of(blocks).shape[:2]
    written = jnp.where(live, touched, n_blocks)[:, None]  # out of range: the scatter drops it
    index = (jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None], written)
    return jax.tree.map(lambda old, leaf: old.at[index].set(leaf, mode="drop"), blocks, new)


def block_metadata(meta: Metadata, chosen: Int[Array, "B n"], n_blocks: int, used: Int[Array, "B"]) -> BlockMetadata:
    """Returns the metadata ``[B, K, n, 2D]`` of the blocks ``chosen`` of each row, of which ``used`` pages have tokens.

    A block's bounds contain those that its pages' metadata says, not only the keys.
    """
    rows, kv_heads, pages, width = bounds_of(meta).shape
    size = pages // n_blocks
    every_head = jnp.broadcast_to(chosen[:, None], (rows, kv_heads, chosen.shape[1]))
    bounds = decode(gather_blocks(meta, every_head, size)).reshape(*every_head.shape, size, width)
    real = chosen[..., None] * size + jnp.arange(size) < used[:, None, None]
    real = real[:, None, ..., None]  # of all heads and channels
    low = jnp.where(real, bounds[..., : width // 2], jnp.inf).min(axis=-2)
    high = jnp.where(real, bounds[..., width // 2 :], -jnp.inf).max(axis=-2)
    return encode(low, high, metadata_kind(meta))
