"""``page_scores`` in plain JAX: the specification, and the path of the CPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels import dispatch

# A product this small costs no more than choosing a smaller one.
_LEAST_PAGES = 128


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

    def score(n_pages):
        """Scores the first ``n_pages`` pages, and -inf for the others."""
        part = meta[:, :, :n_pages].astype(jnp.float32)
        scores = jnp.einsum("bkgd,bkpd->bkgp", weights, part, precision=lax.Precision.HIGHEST)
        scores = scores.max(axis=2) if reduce == "max" else scores.reshape(rows, -1, n_pages)
        live = jnp.arange(n_pages) * page_size < lengths[:, None]
        scores = jnp.where(live[:, None], scores, -jnp.inf)
        return jnp.pad(scores, ((0, 0), (0, 0), (0, pages - n_pages)), constant_values=-jnp.inf)

    # A half, a quarter, ... of a large capacity where that holds the longest row. On an accelerator the length would
    # have to come to the host first.
    parts = [pages]
    while parts[0] > _LEAST_PAGES and dispatch.current_target().platform == "cpu":
        parts.insert(0, -(-parts[0] // 2))
    smallest = jnp.searchsorted(jnp.array(parts) * page_size, lengths.max())
    return lax.switch(smallest, [functools.partial(score, n_pages) for n_pages in parts])
