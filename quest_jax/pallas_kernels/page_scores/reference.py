"""``page_scores`` in plain JAX: the specification, and the path of the CPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.metadata import ScaledMetadata, bounds_of

# A product this small costs no more than choosing a smaller one.
_LEAST_PAGES = 128
# Pages that are widened to float32 at a time where metadata is narrow: small enough to stay in a core's cache.
_BLOCK_PAGES = 256


@jax.named_scope("page_scores")
def page_scores(q, meta, lengths, *, page_size, reduce, beta, layer):
    """See :func:`quest_jax.pallas_kernels.page_scores.op.page_scores`."""
    if layer is not None:
        meta = jax.tree.map(lambda leaf: leaf[layer], meta)
    rows, kv_heads, pages, _ = bounds_of(meta).shape
    q = q.astype(jnp.float32).reshape(rows, kv_heads, -1, q.shape[-1])
    # The elementwise max turns into one product with [min | max], because only the sign of q decides which of the two
    # a channel takes: as matrices it moves 5x fewer bytes. At beta = 1 the halves are exactly min(q, 0) and relu(q).
    size = beta * jnp.abs(q)
    weights = jnp.concatenate([(q - size) / 2, (q + size) / 2], axis=-1)  # [B, K, G, 2D]
    if reduce == "mean":
        # The sum of the heads' bounds is the bound of the summed halves: one product instead of G.
        weights = weights.mean(axis=2, keepdims=True)

    on_cpu = dispatch.current_target().platform == "cpu"

    def score(n_pages):
        """Scores the first ``n_pages`` pages, and -inf for the others."""
        scores = _products(weights, bounds_of(meta), n_pages, on_cpu)
        if isinstance(meta, ScaledMetadata):
            steps, offsets = (leaf[:, :, None, :n_pages] for leaf in (meta.steps, meta.offsets))
            scores = steps * scores + offsets * weights.sum(axis=-1, keepdims=True)
        scores = scores.max(axis=2) if reduce == "max" else scores.reshape(rows, -1, n_pages)
        live = jnp.arange(n_pages) * page_size < lengths[:, None]
        scores = jnp.where(live[:, None], scores, -jnp.inf)
        return jnp.pad(scores, ((0, 0), (0, 0), (0, pages - n_pages)), constant_values=-jnp.inf)

    # A half, a quarter, ... of a large capacity where that holds the longest row. On an accelerator the length would
    # have to come to the host first.
    parts = [pages]
    while parts[0] > _LEAST_PAGES and on_cpu:
        parts.insert(0, -(-parts[0] // 2))
    smallest = jnp.searchsorted(jnp.array(parts) * page_size, lengths.max())
    return lax.switch(smallest, [functools.partial(score, n_pages) for n_pages in parts])


def _products(weights, bounds, n_pages, on_cpu):
    """``weights [B, K, G, 2D]`` times the first ``n_pages`` of ``bounds [B, K, P, 2D]``, in float32."""

    def product(part):
        part = part.astype(jnp.float32)
        return jnp.einsum("bkgd,bkpd->bkgp", weights, part, precision=lax.Precision.HIGHEST)

    if bounds.dtype == jnp.float32 or not on_cpu or n_pages <= _BLOCK_PAGES:
        return product(bounds[:, :, :n_pages])

    # A CPU writes the float32 operand of a product to memory: of all metadata at once, that is 2 to 10 times slower.
    def one_block(i, scores):
        start = jnp.minimum(i * _BLOCK_PAGES, n_pages - _BLOCK_PAGES)  # the last block scores some pages again
        part = lax.dynamic_slice_in_dim(bounds, start, _BLOCK_PAGES, axis=2)
        return lax.dynamic_update_slice_in_dim(scores, product(part), start, axis=3)

    scores = jnp.zeros((*weights.shape[:3], n_pages), jnp.float32)
    return lax.fori_loop(0, -(-n_pages // _BLOCK_PAGES), one_block, scores)
