"""``page_scores`` in plain JAX: the specification, and the path of the CPU."""

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels import dispatch

_BLOCK_PAGES = 256


@jax.named_scope("page_scores")
def page_scores(q, meta, lengths, *, page_size, reduce, beta, layer):
    """See :func:`quest_jax.pallas_kernels.page_scores.op.page_scores`."""
    if layer is not None:
        meta = meta[layer]
    rows, kv_heads, pages, _ = meta.shape
    q = q.astype(jnp.float32).reshape(rows, kv_heads, -1, q.shape[-1])
    # The elementwise max turns into one product with [min | max], because only the sign of q decides which of the two
    # a channel takes: as matrices it moves 5x fewer bytes. At beta = 1 the halves are exactly min(q, 0) and relu(q).
    size = beta * jnp.abs(q)
    weights = jnp.concatenate([(q - size) / 2, (q + size) / 2], axis=-1)  # [B, K, G, 2D]
    if reduce == "mean":
        # The sum of the heads' bounds is the bound of the summed halves: one product instead of G.
        weights = weights.mean(axis=2, keepdims=True)
    lists = kv_heads * (1 if reduce == "max" else weights.shape[2])

    def score(first, part):
        """Scores of ``part``, the pages from ``first`` on."""
        scores = jnp.einsum("bkgd,bkpd->bkgp", weights, part.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        scores = scores.max(axis=2) if reduce == "max" else scores.reshape(rows, lists, -1)
        live = (first + jnp.arange(part.shape[2])) * page_size < lengths[:, None]
        return jnp.where(live[:, None], scores, -jnp.inf)

    def whole():
        return score(0, meta)

    def by_block():
        def block(i, scores):
            # The last block is moved back to end with the pages; what it scores twice is the same.
            first = jnp.minimum(i * _BLOCK_PAGES, pages - _BLOCK_PAGES)
            part = lax.dynamic_slice_in_dim(meta, first, _BLOCK_PAGES, axis=2)
            return lax.dynamic_update_slice_in_dim(scores, score(first, part), first, axis=2)

        blocks = -(-lengths.max() // (_BLOCK_PAGES * page_size))
        return lax.fori_loop(0, blocks, block, jnp.full((rows, lists, pages), -jnp.inf))

    # A block is copied before it is scored: worth it while at least half of the capacity is empty. On an accelerator
    # the length would have to come to the host first.
    if pages <= 2 * _BLOCK_PAGES or dispatch.current_target().platform != "cpu":
        return whole()
    return lax.cond(2 * lengths.max() > pages * page_size, whole, by_block)
