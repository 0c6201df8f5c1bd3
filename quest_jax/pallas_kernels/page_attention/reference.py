"""``page_attention`` in plain JAX: the specification, and the path of the CPU.

Rows are served one after the other, each over its own length: no row reads for the sake of a longer neighbour, and a
row's result does not depend on the batch around it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.pallas_kernels.page_attention import contiguous
from quest_jax.pallas_kernels.pages import gather_pages, physical_pages, pool_shape

# Keys of a block and their scores stay in a core's cache; larger blocks were up to 3x slower, smaller ones pay the
# loop's fixed cost more often.
_BLOCK_TOKENS = 1024


@jax.named_scope("page_attention")
def page_attention(q, kv, starts, lengths, page_table, *, pages, counts, layer, scale, window=None):
    """See :func:`quest_jax.pallas_kernels.page_attention.op.page_attention`.

    Args:
      q: ``[B, T, H, D]`` with the D of the pool.
      kv, starts, lengths, page_table, pages, counts, layer, window: as there.
      scale: factor of the scores, ``1 / sqrt`` of the model's head dim.
    """
    shape = pool_shape(kv)
    rows, tokens, heads, head_dim = q.shape
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    lists = shape.kv_heads if pages is None else pages.shape[1]
    # One list serves `group` consecutive query heads: [B, lists, group * T, D], query token fastest.
    group = heads // lists
    stacked = q.transpose(0, 2, 1, 3).reshape(rows, lists, group * tokens, head_dim)

    def read(row, list_ids, logical):
        physical = physical_pages(page_table, row, logical, pages_per_row)
        return gather_pages(kv, list_ids * shape.kv_heads // lists, physical, layer)

    def positions_of(row):
        """[group * T]; a padded query stands before everything and so sees nothing."""
        at = starts[row] + jnp.arange(tokens)
        return jnp.tile(jnp.where(at < lengths[row], at, -1), group)

    def visible(row, logical, live):
        """[.., keys]: which slots of the listed pages hold a token; and their positions."""
        at = logical[..., None] * shape.page_size + jnp.arange(shape.page_size)
        real = live[..., None] & (at < lengths[row])
        return real.reshape(*logical.shape[:-1], -1), at.reshape(*logical.shape[:-1], -1)

    def dense(row, length):
        per_block = min(max(1, _BLOCK_TOKENS // shape.page_size), pages_per_row)
        query = positions_of(row)

        def attend_lists(list_ids, rows_q):
            """Online softmax of ``rows_q [n, R, D]`` over the blocks of the lists ``list_ids [n]``."""

            def block(i, carry):
                # The last block is moved back to end with the row; what it would see twice is not live.
                first = jnp.minimum(i * per_block, pages_per_row - per_block)
                logical = first + jnp.arange(per_block)
                real, at = visible(row, logical, logical >= i * per_block)
                keys, values = read(row, list_ids[:, None], logical[None])
                return merge(carry, rows_q, flat(keys), flat(values), real[None], at[None], query, scale, window)

            blocks = -(-length // (per_block * shape.page_size))
            return lax.fori_loop(0, blocks, block, empty(rows_q))

        if tokens == 1:  # few query rows: all heads in one batched product
            return finish(attend_lists(jnp.arange(lists), stacked[row]))
        # Many query rows: head by head, so that a block's scores stay in cache.
        return lax.map(
            lambda one: jax.tree.map(lambda x: x[0], finish(attend_lists(one[0][None], one[1][None]))),
            (jnp.arange(lists), stacked[row]),
        )

    def listed(row, pages, counts):
        query = positions_of(row)

        def one(args):
            list_id, rows_q, logical, count = args
            real, at = visible(row, logical, jnp.arange(logical.shape[0]) < count)
            keys, values = read(row, list_id, logical)
            carry = merge(empty(rows_q), rows_q, flat(keys), flat(values), real, at, query, scale, window)
            return finish(carry)

        # List by list: the gathered pages stay in cache until they are attended.
        return lax.map(one, (jnp.arange(lists), stacked[row], pages, counts))

    def dense_rows(lengths):
        return lax.map(lambda row: dense(*row), (jnp.arange(rows), lengths))

    if pages is None and window is None and contiguous.serves(kv, page_table, heads, tokens, layer):
        out, lse = contiguous.attend_in_place(stacked, kv, lengths, scale, dense_rows)
    elif pages is None:
        out, lse = dense_rows(lengths)
    else:
        out, lse = lax.map(lambda row: listed(*row), (jnp.arange(rows), pages, counts))
    out = out.reshape(rows, heads, tokens, head_dim).transpose(0, 2, 1, 3)
    return out.astype(q.dtype), lse.reshape(rows, heads, tokens).transpose(0, 2, 1)


def flat(pages):
    """``[.., N, S, D] -> [.., N * S, D]``."""
    return pages.reshape(*pages.shape[:-3], -1, pages.shape[-1])


def empty(q):
    """Softmax state before any key: (running max, sum of weights, weighted sum of values)."""
    # A finite start, so that the difference of two maxima is never inf - inf.
    return (
        jnp.full(q.shape[:-1], jnp.finfo(jnp.float32).min),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )


def merge(carry, q, keys, values, real, at, query, scale, window=None):
    """Folds a block of keys into the softmax state.

    Args:
      carry: as :func:`empty` returns it.
      q: ``[.., R, D]`` query rows.
      keys, values: ``[.., L, D]``.
      real: bool ``[.., L]``, slots that hold a token.
      at: int32 ``[.., L]``, positions of the slots.
      query: int32 ``[R]``, positions of the query rows.
      scale: factor of the scores.
      window: how many positions up to its own a query sees; None is all.
    """
    top, total, out = carry
    # 0 * NaN is NaN: what lies in unused memory must be taken out of the values, not only given weight zero.
    values = jnp.where(real[..., None], values, 0)
    scores = dot("...rd,...ld->...rl", q, keys) * scale
    # One comparison tells what is empty and what comes later. The running maximum is finite: exp(-inf - it) is zero.
    at = jnp.where(real, at, jnp.iinfo(jnp.int32).max)
    seen = at[..., None, :] <= query[:, None]
    if window is not None:
        seen = seen & (at[..., None, :] > query[:, None] - window)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    kept = jnp.exp(top - new_top)
    out = out * kept[..., None] + dot("...rl,...ld->...rd", weights.astype(values.dtype), values)
    return new_top, total * kept + weights.sum(axis=-1), out


def finish(carry):
    """Returns ``(out, lse)`` of a softmax state; zeros and -inf where no key was seen."""
    top, total, out = carry
    seen = total != 0  # true of NaN: what real keys say is not turned into zeros
    safe = jnp.where(seen, total, 1)
    return jnp.where(seen[..., None], out / safe[..., None], 0), jnp.where(seen, top + jnp.log(safe), -jnp.inf)


def dot(spec, left, right):
    """A product with float32 accumulation and result."""
    if left.dtype == jnp.float32:
        # The default on TPU is a single bfloat16 pass.
        return jnp.einsum(spec, left, right, precision=lax.Precision.HIGHEST)
    if left.shape[-2] == 1:
        # XLA's CPU backend turns a one-row bfloat16 product into a float32 copy of the right side; two rows it
        # multiplies as they are, 5x faster and more.
        return jnp.einsum(spec, jnp.repeat(left, 2, axis=-2), right, preferred_element_type=jnp.float32)[..., :1, :]
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
