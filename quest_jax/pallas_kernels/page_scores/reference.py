"""``page_scores`` in plain JAX: the specification, and the path of the CPU."""

import jax
import jax.numpy as jnp


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
    scores = jnp.einsum("bkgd,bkpd->bkgp", weights, meta.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    scores = scores.max(axis=2) if reduce == "max" else scores.reshape(rows, -1, pages)
    live = jnp.arange(pages) * page_size < lengths[:, None]
    return jnp.where(live[:, None], scores, -jnp.inf)
