"""``token_scores`` in plain JAX: the specification, and the path of the CPU."""

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention.reference import dot
from quest_jax.pallas_kernels.pages import gather_pages, pool_dtype, pool_shape

# The keys of a block and their scores stay in a core's cache.
_BLOCK_TOKENS = 1024


@jax.named_scope("token_scores")
def token_scores(q, kv, weights, ends, page_table, *, layer):
    """See :func:`quest_jax.pallas_kernels.token_scores.op.token_scores`."""
    shape = pool_shape(kv)
    rows = q.shape[0]
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    room = pages_per_row * shape.page_size
    per_block = min(max(1, _BLOCK_TOKENS // shape.page_size), pages_per_row)
    tokens = per_block * shape.page_size
    heads = jnp.arange(shape.kv_heads)[:, None]
    q = q.astype(pool_dtype(kv))
    if q.shape[2] == 1 and q.dtype != jnp.float32:
        # One column is no matrix to XLA's CPU backend: it would write the keys in float32. Doubled, the max stays.
        q = jnp.repeat(q, 2, axis=2)

    def read(row, first):
        """Keys of ``per_block`` pages from ``first`` on, ``[K, per_block, S, D]``."""
        if page_table is not None:
            return gather_pages(kv, heads, page_table[row, first + jnp.arange(per_block)], layer)[0]
        # Pages that lie side by side are sliced: for a gather XLA lays the pool out anew on a TPU, all of it.
        keys = kv[0] if isinstance(kv, tuple) else kv
        at = (0, row * pages_per_row + first, 0, 0)
        size = (shape.kv_heads, per_block, *keys.shape[-2:])
        if layer is not None:
            return lax.dynamic_slice(keys, (layer, *at), (1, *size))[0, ..., : shape.head_dim]
        return lax.dynamic_slice(keys, at, size)[..., : shape.head_dim]

    def by_block():
        def score_row(row):
            def block(i, scores):
                # The last block is moved back to end with the row; what it scores twice is the same.
                first = jnp.minimum(i * per_block, pages_per_row - per_block)
                keys = read(row, first).reshape(shape.kv_heads, tokens, shape.head_dim)
                best = dot("kld,krd->klr", keys, q[row]).max(axis=-1)
                return lax.dynamic_update_slice_in_dim(scores, best, first * shape.page_size, axis=1)

            nothing = jnp.full((shape.kv_heads, room), -jnp.inf)
            return lax.fori_loop(0, -(-ends[row] // tokens), block, nothing)

        return lax.map(score_row, jnp.arange(rows))

    def whole():
        keys = kv[0].reshape(shape.kv_heads, rows, room, shape.head_dim)
        # The pool's order of axes: otherwise the product would turn the pool around.
        return dot("kbld,kbrd->kblr", keys, q.swapaxes(0, 1)).max(axis=-1).swapaxes(0, 1)

    # A block is copied before it is scored, which costs as much as scoring it: worth it while at least half of the
    # capacity is empty. Whole rows are scored where they lie, which is possible where keys lie by themselves.
    on_cpu = dispatch.current_target().platform == "cpu"
    if on_cpu and isinstance(kv, tuple) and page_table is None and layer is None:
        scores = lax.cond(2 * ends.max() > room, whole, by_block)
    else:
        scores = by_block()
    return weigh(scores, weights, ends)


def weigh(scores, weights, ends):
    """Multiplies ``scores [B, K, L]`` by the weights, if any, and takes out what lies at or past ``ends``."""
    if weights is not None:
        scores = scores * weights
    return jnp.where((jnp.arange(scores.shape[-1]) < ends[:, None])[:, None], scores, -jnp.inf)
