"""``page_scores``: an upper bound of every page's attention logits from the min and max of its keys."""

from typing import Literal

from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.metadata import Metadata, bounds_of
from quest_jax.pallas_kernels.page_scores import gpu, reference, tpu
from quest_jax.pallas_kernels.pages import Layer, PoolShape, holds, pad_head_dim

IMPLEMENTATIONS = (
    dispatch.Implementation("mosaic_tpu", tpu.page_scores, tpu.why_not),
    dispatch.Implementation("mosaic_gpu", gpu.page_scores, gpu.why_not),
    dispatch.Implementation("xla", reference.page_scores, dispatch.serves_everything),
)

Reduce = Literal["mean", "max", "none"]


def page_scores(
    q: Float[Array, "B H D"],
    meta: Metadata,
    lengths: Int[Array, "B"],
    *,
    page_size: int,
    reduce: Reduce = "mean",
    beta: float = 1.0,
    layer: Layer = None,
    implementation: str | None = None,
) -> Float[Array, "B lists P"]:
    r"""Scores pages for one query token per row.

    With ``m``, ``M`` the per-channel min and max of a page's keys (Quest, arXiv 2406.10774, section 3.2)

    .. math:: U = \sum_i \max(q_i m_i, q_i M_i) = \min(q, 0) \cdot m + \mathrm{relu}(q) \cdot M \ge q \cdot k

    for every key ``k`` of the page, up to float32 rounding. ``beta < 1`` shrinks the box around its middle,
    ``q . (m + M) / 2 + beta |q| . (M - m) / 2``: no bound any more, but a better ranking.

    Args:
      q: rotated queries, unscaled; any float dtype. Computed in float32.
      meta: ``[min | max]`` per page, as :func:`~quest_jax.pallas_kernels.append.op.append` writes it; both may be
        padded with zeros. Kept narrow, it is a wider box: still a bound.
      lengths: tokens of each row; pages at or past them score ``-inf``.
      page_size: [S] tokens of a page.
      reduce: over the query heads of a group. ``mean`` and ``max`` give K lists, ``none`` gives H.
      beta: size of the box, 1 for the bound.
      layer: index into stacked metadata.
      implementation: ``None``, ``"mosaic_tpu"``, ``"mosaic_gpu"`` or ``"xla"``.

    Returns:
      float32 scores of ``q . k``, not divided by ``sqrt(D)``.

    Raises:
      ValueError: shapes that do not fit, or an unknown ``reduce``.
    """
    rows, heads, head_dim = q.shape
    bounds = bounds_of(meta)
    meta_rows, kv_heads, pages, width = bounds.shape[-4:]
    if meta_rows != rows or width % 2 or not holds(width // 2, head_dim) or heads % kv_heads:
        raise ValueError(
            "page_scores: expected q [B, H, D] and metadata [.., B, K, P, 2D] with H a multiple of K, "
            f"got {q.shape} and {bounds.shape}."
        )
    if reduce not in ("mean", "max", "none"):
        raise ValueError(f"page_scores: expected reduce 'mean', 'max' or 'none', got {reduce!r}.")
    shape = PoolShape(kv_heads, pages, page_size, width // 2)
    call = dispatch.describe_call(shape, bounds.dtype, "fused", heads, pages=pages)
    chosen = dispatch.resolve("page_scores", IMPLEMENTATIONS, call, implementation)
    q = pad_head_dim(q, shape.head_dim)
    return chosen.run(q, meta, lengths, page_size=page_size, reduce=reduce, beta=beta, layer=layer)
