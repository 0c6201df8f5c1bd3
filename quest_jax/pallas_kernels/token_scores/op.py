"""``token_scores``: the best product of a few queries with every key of the cache."""

from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.pages import KV, Layer, holds, pad_head_dim, pool_dtype, pool_layout, pool_shape
from quest_jax.pallas_kernels.token_scores import reference, tpu

IMPLEMENTATIONS = (
    dispatch.Implementation("mosaic_tpu", tpu.token_scores, tpu.why_not),
    dispatch.Implementation("xla", reference.token_scores, dispatch.serves_everything),
)


def token_scores(
    q: Float[Array, "B K R D"],
    kv: KV,
    weights: Float[Array, "B K L"] | None,
    ends: Int[Array, "B"],
    page_table: Int[Array, "B P"] | None = None,
    *,
    layer: Layer = None,
    implementation: str | None = None,
) -> Float[Array, "B K L"]:
    r"""Scores every key of a row before ``ends`` by the best of R queries.

    .. math:: s_j = w_j \max_r q_r \cdot k_j

    With unit queries and :math:`w_j = 1 / |k_j|` these are the cosines of QuoKA (arXiv 2602.08722, Algorithm 1, lines
    9 and 10). Queries are rounded to the dtype of the keys, products accumulate in float32. The work grows with
    ``ends``, not with the capacity.

    Args:
      q: R queries for each KV head.
      kv: pool of pages, see :mod:`quest_jax.pallas_kernels.pages`; its rows may be padded.
      weights: of each position of a row, not negative; None is 1.
      ends: positions from here on score ``-inf``, and may hold anything.
      page_table: logical to pool page; None is the identity.
      layer: index into a stacked pool.
      implementation: ``None``, ``"mosaic_tpu"`` or ``"xla"``.

    Returns:
      float32 scores of all L positions that a row has room for.

    Raises:
      ValueError: shapes that do not fit.
    """
    shape = pool_shape(kv)
    rows, kv_heads, queries, head_dim = q.shape
    if kv_heads != shape.kv_heads or not holds(shape.head_dim, head_dim, pool_layout(kv)) or queries < 1:
        raise ValueError(
            f"token_scores: expected q [B, {shape.kv_heads}, R, {shape.head_dim}] (KV heads and head dim of the cache) "
            f"with at least one query, got {q.shape}."
        )
    pages = shape.pages // rows if page_table is None else page_table.shape[1]
    if weights is not None and weights.shape != (rows, kv_heads, pages * shape.page_size):
        raise ValueError(
            f"token_scores: expected weights [{rows}, {kv_heads}, {pages * shape.page_size}], got {weights.shape}."
        )
    scalars = 0 if page_table is None else page_table.size
    call = dispatch.describe_call(shape, pool_dtype(kv), pool_layout(kv), kv_heads, queries, pages, scalars)
    chosen = dispatch.resolve("token_scores", IMPLEMENTATIONS, call, implementation)
    q = pad_head_dim(q, shape.head_dim)
    return chosen.run(q, kv, weights, ends, page_table, layer=layer)
