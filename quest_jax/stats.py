"""What a generation read, in pages and bytes."""

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from quest_jax.cache import Cache
from quest_jax.decode import DecodeState
from quest_jax.pallas_kernels.pages import pool_dtype, pool_shape
from quest_jax.policies.base import Missed, Policy
from quest_jax.reads import PageReads


class ReadStats(struct.PyTreeNode):
    """Reads of the steps of one phase, counted from the selections that were attended.

    Attributes:
      reads: pages (tokens, where the policy lists those) of every step, layer and row, each ``[steps, layers, B]``;
        zeros for a row that had ended.
      page_bytes: of the keys and values of one of them and one KV head; static.
      meta_bytes: that scoring one read: of a page its min and max, of a token its key; static.
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

    @property
    def missed_mass_bound(self) -> Float[Array, "steps layers B"]:
        """An upper bound of the share of the attention that was not read, of the head that may have lost most.

        It holds, and it is loose: near 1 in practice, where the truth is a few percent. Of what was read whole, and of
        a row that had ended, 0.

        Raises:
          ValueError: the policy was not :class:`quest_jax.Diagnosed`.
        """
        return self._missed().mass

    @property
    def output_error_bound(self) -> Float[Array, "steps layers B"]:
        """An upper bound of the 2-norm by which a head's output differs from dense attention's; as loose.

        Raises:
          ValueError: the policy was not :class:`quest_jax.Diagnosed`.
        """
        return self._missed().output

    def _missed(self) -> Missed:
        if self.reads.missed is None:
            raise ValueError(
                "stats: expected decode steps of a policy that bounds what it misses, got others; decode with "
                "policy=quest_jax.Diagnosed(budget)."
            )
        return self.reads.missed

    def bytes_read(self) -> np.ndarray:
        """int64 ``[steps, layers, B]``: keys, values and metadata. On the host, not inside ``jit``."""
        read, scored = np.asarray(self.reads.read, np.int64), np.asarray(self.reads.scored, np.int64)
        return read * self.page_bytes + scored * self.meta_bytes

    def bytes_dense(self) -> np.ndarray:
        """int64 ``[steps, layers, B]``: what dense attention would have read in the same steps, of the same chunks."""
        return np.asarray(self.reads.live, np.int64) * self.page_bytes

    def share_read(self) -> float:
        """Bytes read over the bytes of dense attention, all steps, layers and rows; above 1 where scoring outweighs.

        Of a prompt: over dense attention in the same chunks. In larger chunks any attention reads the cache less often.
        """
        return float(self.bytes_read().sum() / max(1, self.bytes_dense().sum()))


class DecodeStats(ReadStats):
    """Reads of every decode step; those of the prompt's chunks apart.

    Attributes:
      reads, page_bytes, meta_bytes: see :class:`ReadStats`.
      prefill: the same of the chunks in which the prompt was read; None where it was not read here.
    """

    prefill: ReadStats | None = None


def make_stats(state: DecodeState, reads: PageReads, prefill: PageReads | None = None) -> DecodeStats:
    """Joins the counts of all steps with the sizes of the cache they were counted on.

    Args:
      state: whose policies read.
      reads: of the decode steps, ``[steps, layers, B]``.
      prefill: of the chunks of the prompt, ``[chunks, layers, B]``.
    """
    stats = DecodeStats(reads, *_sizes(state.attention.policy, state.attention.cache))
    return stats if prefill is None else stats.replace(prefill=prompt_stats(state, prefill))


def prompt_stats(state: DecodeState, reads: PageReads) -> ReadStats:
    """The same of the chunks of a prompt alone."""
    reads = reads.replace(missed=None)  # no policy for prompts diagnoses
    return ReadStats(reads, *_sizes(state.attention.prefill_policy, state.attention.cache))


def _sizes(policy: Policy, cache: Cache) -> tuple[int, int]:
    shape, itemsize = pool_shape(cache.kv[0]), pool_dtype(cache.kv[0]).itemsize
    page_bytes = policy.unit(shape.page_size) * 2 * shape.head_dim * itemsize
    return page_bytes, policy.scored_nbytes(shape.head_dim, itemsize, cache.metadata)
