"""``token_scores`` in plain JAX: the specification, and so far the path of every device."""

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels.page_attention.reference import dot
from quest_jax.pallas_kernels.pages import gather_pages, physical_pages, pool_shape

# The keys of a block and their scores stay in a core's cache.
_BLOCK_TOKENS = 1024


@jax.named_scope("token_scores")
def token_scores(q, kv, weights, ends, page_table, *, layer):
    """See :func:`quest_jax.pallas_kernels.token_scores.op.token_scores`."""
    shape = pool_shape(kv)
    rows = q.shape[0]
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    per_block = min(max(1, _BLOCK_TOKENS // shape.page_size), pages_per_row)
    tokens = per_block * shape.page_size
    heads = jnp.arange(shape.kv_heads)[:, None]

    def score_row(row):
        def block(i, scores):
            # The last block is moved back to end with the row; what it scores twice is the same.
            first = jnp.minimum(i * per_block, pages_per_row - per_block)
            physical = physical_pages(page_table, row, first + jnp.arange(per_block), pages_per_row)
            keys, _ = gather_pages(kv, heads, physical, layer)  # [K, per_block, S, D]
            keys = keys.reshape(shape.kv_heads, tokens, shape.head_dim)
            best = dot("krd,kld->krl", q[row].astype(keys.dtype), keys).max(axis=1)
            return lax.dynamic_update_slice_in_dim(scores, best, first * shape.page_size, axis=1)

        nothing = jnp.full((shape.kv_heads, pages_per_row * shape.page_size), -jnp.inf)
        return lax.fori_loop(0, -(-ends[row] // tokens), block, nothing)

    scores = lax.map(score_row, jnp.arange(rows))
    if weights is not None:
        scores = scores * weights
    return jnp.where((jnp.arange(scores.shape[-1]) < ends[:, None])[:, None], scores, -jnp.inf)
