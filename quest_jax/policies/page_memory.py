"""Memories of pages: what a method keeps of each page's keys or values, made anew wherever tokens were written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.pages import gather_pages, physical_pages, pool_shape
from quest_jax.policies.base import LayerView, Sizes
from quest_jax.policies.quest import Quest, Ranking, Reduce

Pages = Float[Array, "B K n S D"]
Real = Bool[Array, "B 1 n S 1"]


def rewrite(
    memory: Float[Array, "B K P *width"],
    k: Float[Array, "B T K D"],
    view: LayerView,
    summarize: Callable[[Pages, Pages, Real], Float[Array, "B K n *width"]],
) -> Float[Array, "B K P *width"]:
    """Returns ``memory`` with new entries for the pages that the tokens ``k`` were written to.

    An entry is made of the page as it is in the cache, as its min and max are. Nothing is folded into the old one: a
    mean and a distance from it cannot forget a token that is overwritten, and tokens that are written twice count once.

    Args:
      memory: an entry a page.
      k: the new keys, for their number and their head dim.
      view: the layer's cache, the tokens written.
      summarize: makes entries of the keys and values of pages, float32, and of which of their slots hold a token; the
        other slots may hold anything.
    """
    shape, tokens, width = pool_shape(view.kv), k.shape[1], k.shape[-1]
    touched = view.starts[:, None] // shape.page_size + jnp.arange(-(-(tokens - 1) // shape.page_size) + 1)
    live = (touched * shape.page_size < view.lengths[:, None]) & (view.starts < view.lengths)[:, None]
    row, head = jnp.arange(len(k))[:, None, None], jnp.arange(shape.kv_heads)[:, None]
    found = physical_pages(view.page_table, row, jnp.where(live, touched, 0)[:, None], view.pages_per_row)
    keys, values = (x[..., :width].astype(jnp.float32) for x in gather_pages(view.kv, head, found))
    real = touched[..., None] * shape.page_size + jnp.arange(shape.page_size) < view.lengths[:, None, None]
    entries = summarize(keys, values, real[:, None, ..., None])
    at = row, head, jnp.where(live, touched, view.pages_per_row)[:, None]  # out of range: dropped
    return memory.at[at].set(entries, mode="drop")


@dataclasses.dataclass(frozen=True)
class Summarized(Quest):
    """Quest, which ranks pages by another summary of their keys than their min and max. Not a method by itself.

    A subclass has :meth:`width` and :meth:`summarize`, and ranks by ``view.memory`` in :meth:`choose`.

    Attributes: those of :class:`~quest_jax.policies.quest.Quest`; one level only. ``ranking`` and ``beta`` are about
      the size of what the subclass puts around a page's keys, all of it by default, and ``reduce`` is the mean.
    """

    ranking: Ranking | None = "box"
    reduce: Reduce | None = "mean"

    def __post_init__(self):
        super().__post_init__()
        if self.block_pages is not None:
            raise ValueError(
                f"{type(self).__name__}: expected block_pages None, since blocks have no such summary, got "
                f"{self.block_pages}."
            )

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A page's entry."""
        del itemsize, metadata
        return 4 * self.width(head_dim)

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """An entry a page, float32 ``[B, K, P, width]``."""
        del layer
        return jnp.zeros((sizes.rows, sizes.kv_heads, sizes.pages, self.width(sizes.head_dim)), jnp.float32)

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Makes the entries of the pages that were written to."""
        del v
        return rewrite(view.memory, k, view, lambda keys, values, real: self.summarize(keys, real))

    def width(self, head_dim: int) -> int:
        """Numbers of an entry."""
        raise NotImplementedError(f"{type(self).__name__} has no summary; a subclass defines width and summarize.")

    def summarize(self, keys: Pages, real: Real) -> Float[Array, "B K n width"]:
        """The entries of pages with these keys; see :func:`rewrite`."""
        raise NotImplementedError(f"{type(self).__name__} has no summary; a subclass defines width and summarize.")
