"""``page_attention``: softmax attention over listed pages, or over all of them."""

from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention import gpu, reference, tpu
from quest_jax.pallas_kernels.pages import KV, Layer, holds, pad_head_dim, pool_dtype, pool_layout, pool_shape

IMPLEMENTATIONS = (
    dispatch.Implementation("mosaic_tpu", tpu.page_attention, tpu.why_not),
    dispatch.Implementation("mosaic_gpu", gpu.page_attention, gpu.why_not),
    dispatch.Implementation("xla", reference.page_attention, dispatch.serves_everything),
)


def page_attention(
    q: Float[Array, "B T H D"],
    kv: KV,
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    page_table: Int[Array, "B P"] | None = None,
    *,
    pages: Int[Array, "B lists N"] | None = None,
    counts: Int[Array, "B lists"] | None = None,
    layer: Layer = None,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    r"""Attends each query to the tokens of its row that are not after it and lie in a listed page.

    .. math:: o_t = \frac{\sum_j e^{s_{tj}} v_j}{\sum_j e^{s_{tj}}}, \qquad s_{tj} = q_t \cdot k_j / \sqrt{D}

    over positions ``j <= starts + t``, ``j < lengths``. A query that sees no token (an empty row, a padded query at
    or past ``lengths``) gives zeros. Memory outside real tokens may hold anything, NaN included.

    Dense attention is the same op with ``pages=None``. Its work grows with ``lengths``, not with the capacity.

    Args:
      q: rotated queries; token ``t`` of row ``b`` stands at position ``starts[b] + t``. Their D is the one of the
        equation.
      kv: pool of pages, in the dtype of ``q``; its rows may be padded, see :mod:`quest_jax.pallas_kernels.pages`.
      starts: position of the first query of each row.
      lengths: tokens in each row, the queries' own included.
      page_table: logical to pool page; None is the identity.
      pages: logical pages to read, in range; ``lists`` is K (a list per KV head, shared by its group) or H. Entries
        past ``counts`` are not attended, but must be in range. No page twice.
      counts: live entries of each list.
      layer: index into a stacked pool.
      window: of the tokens up to its own, each query sees this many, and no earlier ones; static. None is all.
      implementation: ``None``, ``"mosaic_tpu"``, ``"mosaic_gpu"`` or ``"xla"``.

    Returns:
      ``(out, lse)``: output in the dtype of ``q``, and float32 log-sum-exp of the scaled scores (``-inf`` for a query
      that sees no token), with which partial results can be merged.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    shape = pool_shape(kv)
    rows, tokens, heads, head_dim = q.shape
    if not holds(shape.head_dim, head_dim, pool_layout(kv)) or heads % shape.kv_heads:
        raise ValueError(
            f"page_attention: expected q [B, T, H, {shape.head_dim}] with H a multiple of {shape.kv_heads} KV heads, "
            f"got {q.shape}."
        )
    if q.dtype != pool_dtype(kv):
        raise ValueError(f"page_attention: expected q in the cache's dtype {pool_dtype(kv)}, got {q.dtype}.")
    if (pages is None) != (counts is None):
        raise ValueError("page_attention: pages and counts go together, got only one of them.")
    if pages is not None and pages.shape[:2] not in ((rows, shape.kv_heads), (rows, heads)):
        raise ValueError(
            f"page_attention: expected pages [{rows}, {shape.kv_heads} or {heads}, N] (a list per KV head or per "
            f"query head), got {pages.shape}."
        )
    if page_table is None and shape.pages % rows:
        raise ValueError(
            f"page_attention: without a page table the pool is divided evenly among the rows; got {shape.pages} pages "
            f"for {rows} rows."
        )
    if window is not None and window < 1:
        raise ValueError(f"page_attention: expected a window of at least 1 token or None, got {window}.")
    scalars = sum(array.size for array in (page_table, pages, counts) if array is not None)
    call = dispatch.describe_call(shape, pool_dtype(kv), pool_layout(kv), heads, tokens, scalars=scalars, window=window)
    chosen = dispatch.resolve("page_attention", IMPLEMENTATIONS, call, implementation)
    within = {} if window is None else {"window": window}  # the kernels that know of none serve no such call
    out, lse = chosen.run(
        pad_head_dim(q, shape.head_dim), kv, starts, lengths, page_table,
        pages=pages, counts=counts, layer=layer, scale=head_dim**-0.5, **within,
    )  # fmt: skip
    return out if head_dim == shape.head_dim else out[..., :head_dim], lse
