"""What a generation read, in pages and bytes."""

import numpy as np
from flax import struct
from jaxtyping import Array, Int

from quest_jax.attention import PageReads
from quest_jax.cache import meta_nbytes, page_nbytes
from quest_jax.decode import DecodeState


class DecodeStats(struct.PyTreeNode):
    """Reads of every decode step, counted from the selections that were attended.

    Attributes:
      reads: pages of every step, layer and row, each ``[steps, layers, B]``; zeros for a row that had ended.
      page_bytes: of one page of keys and values of one KV head; static.
      meta_bytes: of one page's min and max of one KV head; static.
    """

    reads: PageReads
    page_bytes: int = struct.field(pytree_node=False)
    meta_bytes: int = struct.field(pytree_node=False)

    @property
    def pages_read(self) -> Int[Array, "steps layers B"]:
        """Pages read, summed over the lists of a layer."""
        return self.reads.read

    @property
    def sparse(self):
        """bool ``[steps, layers, B]``: a page was left out (true only for rows that ran)."""
        return ~self.reads.whole & (self.reads.live > 0)

    def bytes_read(self) -> np.ndarray:
        """int64 ``[steps, layers, B]``: keys, values and metadata. On the host, not inside ``jit``."""
        read, scored = np.asarray(self.reads.read, np.int64), np.asarray(self.reads.scored, np.int64)
        return read * self.page_bytes + scored * self.meta_bytes

    def bytes_dense(self) -> np.ndarray:
        """int64 ``[steps, layers, B]``: what dense attention would have read of the same cache."""
        return np.asarray(self.reads.live, np.int64) * self.page_bytes

    def share_read(self) -> float:
        """Bytes read over the bytes of dense attention, all steps, layers and rows."""
        return float(self.bytes_read().sum() / max(1, self.bytes_dense().sum()))


def make_stats(state: DecodeState, reads: PageReads) -> DecodeStats:
    """Joins the counts of all steps with the sizes of the cache they were counted on."""
    cache = state.attention.cache
    return DecodeStats(reads, page_nbytes(cache), meta_nbytes(cache))
