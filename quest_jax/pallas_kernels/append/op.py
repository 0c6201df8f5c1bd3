"""``append``: write new tokens into their pages and bring the pages' min/max up to date."""

from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append import reference, tpu
from quest_jax.pallas_kernels.metadata import Metadata, bounds_of, metadata_kind
from quest_jax.pallas_kernels.pages import KV, Layer, holds, pad_head_dim, pool_dtype, pool_layout, pool_shape

IMPLEMENTATIONS = (
    dispatch.Implementation("mosaic_tpu", tpu.append, tpu.why_not),
    dispatch.Implementation("xla", reference.append, dispatch.serves_everything),
)


def append(
    kv: KV,
    meta: Metadata,
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    page_table: Int[Array, "B P"] | None = None,
    *,
    layer: Layer = None,
    implementation: str | None = None,
) -> tuple[KV, Metadata]:
    """Writes token ``t`` of row ``b`` at position ``starts[b] + t`` while that is below ``ends[b]``.

    The metadata ``[min | max]`` of each touched page is recomputed from its real tokens, so that writing the same
    slots again gives the same bits whatever was there before. Tokens at or past ``ends`` or the row's last page are
    not written; a row with ``starts == ends`` changes nothing. In place when ``kv`` and ``meta`` are donated.

    Args:
      kv: pool of pages, see :mod:`quest_jax.pallas_kernels.pages`.
      meta: per row and KV head, in logical page order, the min and max of each stored key channel, in any form of
        :mod:`quest_jax.pallas_kernels.metadata`. Pages without tokens are never read.
      keys: rotated keys of the new tokens; padded with zeros where the pool stores more channels.
      values: values of the new tokens.
      starts: position of token 0 of each row.
      ends: length of each row after the write.
      page_table: logical to pool page; None is the identity.
      layer: index into a stacked pool and metadata.
      implementation: ``None``, ``"mosaic_tpu"`` or ``"xla"``.

    Returns:
      ``(kv, meta)`` after the write.

    Raises:
      ValueError: shapes or dtypes that do not fit the pool.
    """
    shape = pool_shape(kv)
    rows, _, pages, _ = bounds_of(meta).shape[-4:]
    fits = (keys.shape[0], keys.shape[2]) == (rows, shape.kv_heads)
    fits &= holds(shape.head_dim, keys.shape[3], pool_layout(kv))
    if keys.shape != values.shape or not fits:
        raise ValueError(
            f"append: expected keys and values [{rows}, T, {shape.kv_heads}, {shape.head_dim}] (rows, KV heads and "
            f"head dim of the cache), got {keys.shape} and {values.shape}."
        )
    if keys.dtype != pool_dtype(kv) or values.dtype != pool_dtype(kv):
        raise ValueError(
            f"append: expected keys and values in the cache's dtype {pool_dtype(kv)}, got {keys.dtype} and "
            f"{values.dtype}; cast them, or make the cache in their dtype."
        )
    call = dispatch.describe_call(
        shape, pool_dtype(kv), pool_layout(kv), shape.kv_heads, keys.shape[1],
        pages=pages, scalars=0 if page_table is None else page_table.size, metadata=metadata_kind(meta),
    )  # fmt: skip
    chosen = dispatch.resolve("append", IMPLEMENTATIONS, call, implementation)
    keys, values = pad_head_dim(keys, shape.head_dim), pad_head_dim(values, shape.head_dim)
    return chosen.run(kv, meta, keys, values, starts, ends, page_table, layer=layer)
