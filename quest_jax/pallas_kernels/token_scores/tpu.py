"""``token_scores`` for TPU: blocks of pages pass through VMEM once, each multiplied with the R queries of its KV head.

    best_j = max_r q_r . k_j

A page's keys and values are one row of memory, so the values pass through too; XLA would lay the whole pool out anew to
leave them out. Blocks past ``ends`` are neither copied nor computed: their index is that of the last real block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels import dispatch, mosaic_tpu
from quest_jax.pallas_kernels.mosaic_tpu import LANES
from quest_jax.pallas_kernels.pages import pool_dtype, pool_shape
from quest_jax.pallas_kernels.token_scores.reference import weigh

# Enough bytes that a copy takes longer than its latency; scores of a block are R float32 rows of this many.
_BLOCK_TOKENS = 2048


def why_not(call: dispatch.Call) -> str | None:
    """Returns why the kernel does not serve ``call``, or None."""
    if call.scalars:
        return "it copies pages that lie side by side, and a page table puts them anywhere."
    if call.pages is not None and not block_of(call.pages, call.page_size, _BLOCK_TOKENS):
        return f"a row of {call.pages} pages of {call.page_size} tokens has no block of a multiple of {LANES} tokens."
    return mosaic_tpu.why_not(call)


def block_of(pages: int, page_size: int, most_tokens: int) -> int:
    """Pages of a block: the most that divide a row, are whole lane tiles of scores, and hold ``most_tokens``; or 0."""
    fitting = [n for n in range(1, pages + 1) if not pages % n and not n * page_size % LANES]
    return max([n for n in fitting if n * page_size <= most_tokens], default=min(fitting, default=0))


@jax.named_scope("token_scores")
def token_scores(q, kv, weights, ends, page_table, *, layer, block_tokens=_BLOCK_TOKENS, interpret=False):
    """See :func:`quest_jax.pallas_kernels.token_scores.op.token_scores`.

    Args:
      q, kv, weights, ends, layer: as there.
      page_table: None.
      block_tokens: keys scored at once, at most.
      interpret: True or ``pltpu.InterpretParams`` runs the kernel on a CPU.
    """
    del page_table
    shape = pool_shape(kv)
    rows, kv_heads, queries, dim = q.shape
    pages, width = shape.pages // rows, 2 * shape.head_dim
    fitting = mosaic_tpu.BUFFER_BYTES // (width * pool_dtype(kv).itemsize)
    block_pages = block_of(pages, shape.page_size, min(block_tokens, fitting))
    tokens = block_pages * shape.page_size
    # Slicing a row before a whole lane tile would move lanes: instead the queries get zeros for the values.
    aligned = shape.head_dim % LANES == 0
    q = q.astype(pool_dtype(kv)).reshape(rows * kv_heads, queries, dim)
    if not aligned:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, width - dim)))

    def pool_index(row, block, head, ends, layer):
        last = jnp.maximum(pl.cdiv(ends[row], tokens) - 1, 0)
        head = jnp.where(block > last, kv_heads - 1, head)
        return layer[0] * kv_heads + head, row * (pages // block_pages) + jnp.minimum(block, last), 0, 0

    best = pl.pallas_call(
        functools.partial(_kernel, shape.head_dim if aligned else width),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Heads innermost: a block of scores holds all of them, which is the layout that the selection wants.
            grid=(rows, pages // block_pages, kv_heads),
            in_specs=[
                pl.BlockSpec((1, *q.shape[1:]), lambda row, block, head, *_: (row * kv_heads + head, 0, 0)),
                pl.BlockSpec((1, block_pages, shape.page_size, width), pool_index),
            ],
            out_specs=pl.BlockSpec((1, kv_heads, tokens), lambda row, block, head, *_: (row, 0, block)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, pages * shape.page_size), jnp.float32),
        compiler_params=mosaic_tpu.compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="token_scores",
    )(
        jnp.asarray(ends, jnp.int32),
        mosaic_tpu.flat_scalars(0 if layer is None else layer),
        q,
        mosaic_tpu.in_hbm(kv.reshape(-1, *kv.shape[-3:]), interpret),
    )
    return weigh(best, weights, ends)


def _kernel(used, ends, layer, q_ref, pages_ref, scores_ref):
    """Scores a block of pages ``[p, S, 2D]``, of whose rows ``used`` numbers meet the queries, for one KV head."""
    del layer  # of the index map
    _, n_pages, page_size, width = pages_ref.shape
    tokens = n_pages * page_size
    head = pl.ds(pl.program_id(2), 1)
    real = pl.program_id(1) * tokens < ends[pl.program_id(0)]

    @pl.when(real)
    def _():
        keys = pages_ref[0].reshape(tokens, width)[:, :used]
        scores_ref[0, head] = mosaic_tpu.dot(q_ref[0], keys, transposed=True).max(axis=0, keepdims=True)

    @pl.when(jnp.logical_not(real))
    def _():
        scores_ref[0, head] = jnp.full((1, tokens), -jnp.inf)
