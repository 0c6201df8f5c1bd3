"""What attention read: counts of pages, one of each step, layer and row."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from quest_jax.policies.base import Missed


class PageReads(struct.PyTreeNode):
    """What attention read, counted from what was attended; ``[layers, B]`` is the last call of each layer.

    Attributes:
      read: int32, pages of keys and values, summed over the lists (per KV head, or per query head).
      live: int32, pages that hold tokens, summed over the KV heads: what dense attention reads; in a layer with a
        window, the pages of that.
      scored: int32, pages (by min and max) or keys that were scored, summed over the KV heads; 0 without selection.
      whole: bool, no page was left out.
      missed: bounds of what was lost, where the policy for decoding ``diagnoses``; NaN in a chunk of a prompt that was
        not read whole. None where it does not.

    Where the policy lists tokens, ``read`` and ``live`` count these: :meth:`~quest_jax.policies.base.Policy.unit`.
    """

    read: Int[Array, "*steps B"]
    live: Int[Array, "*steps B"]
    scored: Int[Array, "*steps B"]
    whole: Bool[Array, "*steps B"]
    missed: Missed | None = None


def init_reads(*shape: int, diagnosed: bool = False) -> PageReads:
    """Makes counts of nothing read, e.g. of shape ``(layers, batch)``; ``diagnosed`` ones have bounds."""
    # An array each, not one under many names: that could not be donated.
    counts = [jnp.zeros(shape, jnp.int32) for _ in range(3)]
    missed = Missed(jnp.zeros(shape), jnp.zeros(shape)) if diagnosed else None
    return PageReads(*counts, whole=jnp.zeros(shape, bool), missed=missed)


def room_for(steps: int, reads: PageReads) -> PageReads:
    """Makes counts of nothing read in ``steps`` steps, each like ``reads``."""
    return jax.tree.map(lambda one: jnp.zeros((steps, *one.shape), one.dtype), reads)


def with_bounds(diagnosed: bool, reads: PageReads) -> PageReads:
    """Returns ``reads``, or counts of nothing read where they have bounds and should not, or have none and should."""
    if diagnosed == (reads.missed is not None):
        return reads
    return init_reads(*reads.read.shape, diagnosed=diagnosed)
