"""Two levels of metadata: score blocks of pages first, and then only the pages of the blocks that could hold the best.

Scoring every page costs ``1 / S`` of the cache a step however small the budget is, and from about ``L = S * budget`` on
more than the attention. A block's box contains the boxes of its pages, so its bound is at least the score of each of
its pages: where blocks are ranked by their bound, a page that outranks a block outranks all of its pages. The shrunk
box of a block promises nothing, and ranks better: the corners of a large box are emptier than those of a small one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import BlockMetadata, Metadata, bounds_of, gather_blocks
from quest_jax.pallas_kernels.page_scores.op import Reduce, page_scores
from quest_jax.policies.ranking import largest


class Candidates(NamedTuple):
    """The pages of the best blocks of each row and KV head, as a cache of their own, in ascending order.

    All of its pages that hold tokens come first, and the last of those is the current page, as in the whole cache: what
    ranks and selects pages there does so here.

    Attributes:
      meta: of these pages only.
      lengths: tokens in these pages.
      blocks: which blocks they are.
      block_pages: pages of each.
    """

    meta: Metadata
    lengths: Int[Array, "B"]
    blocks: Int[Array, "B K n"]
    block_pages: int

    def pages(self, found: Int[Array, "B lists N"]) -> Int[Array, "B lists N"]:
        """Logical pages of the row for pages ``found`` among the candidates."""
        blocks = jnp.repeat(self.blocks, found.shape[1] // self.blocks.shape[1], axis=1)
        own = jnp.take_along_axis(blocks, found // self.block_pages, axis=-1)
        return own * self.block_pages + found % self.block_pages


def block_count(budget: int, page_size: int, block_pages: int, candidates: int, sink_pages: int) -> int:
    """Blocks to take: of ``candidates`` pages for every page of the budget, or the sinks, and the current one besides.

    Example:
      >>> block_count(budget=2048, page_size=16, block_pages=16, candidates=8, sink_pages=1)
      65
    """
    wanted = candidates * -(-budget // page_size)
    return -(-max(wanted, sink_pages) // block_pages) + 1


def lengths_within(lengths: Int[Array, "B"], count: int, block_tokens: int) -> Int[Array, "B"]:
    """Tokens in the ``count`` blocks that a row takes, the current one, alone not full, among them."""
    used = -(-lengths // block_tokens)
    return lengths - jnp.maximum(used - count, 0) * block_tokens


def find_candidates(
    q: Float[Array, "B H D"],
    meta: Metadata,
    blocks: BlockMetadata,
    lengths: Int[Array, "B"],
    count: int,
    *,
    page_size: int,
    reduce: Reduce,
    beta: float,
    sink_pages: int,
    implementation: str | None,
) -> Candidates:
    """Takes the ``count`` blocks of highest score of each KV head; the lowest wins a tie, but on a GPU.

    Args:
      q: queries of one token per row.
      meta: of the pages.
      blocks: of the blocks of pages, more than ``count`` of them.
      lengths: tokens of each row.
      count: of :func:`block_count`.
      page_size: [S] tokens of a page.
      reduce: ``mean`` or ``max`` of the scores over the heads of a group, which share the blocks.
      beta: size of the box, 1 for the bound.
      sink_pages: pages at the start whose blocks are always taken; so is the current one.
      implementation: of the scoring.
    """
    n_blocks = bounds_of(blocks).shape[-2]
    block_pages = bounds_of(meta).shape[-2] // n_blocks
    block_tokens = block_pages * page_size
    scores = page_scores(
        q, blocks, lengths, page_size=block_tokens, reduce=reduce, beta=beta, implementation=implementation
    )
    block, used = jnp.arange(n_blocks), -(-lengths // block_tokens)
    # A score that is infinite or NaN is among the highest, and below the blocks that are always taken.
    most = float(jnp.finfo(jnp.float32).max)
    scores = jnp.where(jnp.isnan(scores), most / 2, jnp.clip(scores, -most / 2, most / 2))
    always = (block * block_pages < sink_pages) | (block == used[:, None] - 1)
    scores = jnp.where(always[:, None], most, scores)
    scores = jnp.where((block < used[:, None])[:, None], scores, -jnp.inf)
    # Blocks without tokens are taken only where no others are left, and lie behind them.
    chosen = jnp.sort(largest(scores, count), axis=-1).astype(jnp.int32)
    within = lengths_within(lengths, count, block_tokens)
    return Candidates(gather_blocks(meta, chosen, block_pages), within, chosen, block_pages)
