"""``page_scores`` for TPU: one product of the split query with ``[min | max]``, reduced over the group and masked.

    U = [min(q, 0) | relu(q)] . [m | M]      for beta = 1; in general [(q - beta |q|) / 2 | (q + beta |q|) / 2]

The metadata passes through VMEM once, in blocks of pages; XLA would need a copy of it first where it is one layer of a
stack. Blocks past a row's length are neither copied nor computed: their index is that of the row's last real block,
which is in VMEM already, and their scores are the constant ``-inf``.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels import dispatch, mosaic_tpu
from quest_jax.pallas_kernels.mosaic_tpu import LANES


def why_not(call: dispatch.Call) -> str | None:
    """Returns why the kernel does not serve ``call``, or None."""
    if call.dtype == "int8":
        return "it serves metadata in float32 or bfloat16, got int8."
    tile = mosaic_tpu.sublanes(call.dtype)
    if call.pages is not None and call.pages % tile:
        return f"a row has metadata of {call.pages} pages, no multiple of the {tile} rows of a tile: XLA would copy it."
    return mosaic_tpu.why_not(call)


@jax.named_scope("page_scores")
def page_scores(q, meta, lengths, *, page_size, reduce, beta, layer, block_pages=None, interpret=False):
    """See :func:`quest_jax.pallas_kernels.page_scores.op.page_scores`.

    Args:
      q, meta, lengths, page_size, reduce, beta, layer: as there.
      block_pages: pages scored at once.
      interpret: True or ``pltpu.InterpretParams`` runs the kernel on a CPU.
    """
    rows, heads, dim = q.shape
    _, kv_heads, pages, width = meta.shape[-4:]
    group = heads // kv_heads
    lists = group if reduce == "none" else 1
    # Enough bytes that a copy takes longer than its latency; whole lane tiles of scores unless one block is all.
    fitting = mosaic_tpu.BUFFER_BYTES // (width * meta.dtype.itemsize)
    block_pages = min(block_pages or max(LANES, min(1024, fitting // LANES * LANES)), pages)
    block_tokens = block_pages * page_size

    def meta_index(row, block, head, lengths, layer):
        last = jnp.maximum(pl.cdiv(lengths[row], block_tokens) - 1, 0)
        head = jnp.where(block > last, kv_heads - 1, head)
        return (layer[0] * rows + row) * kv_heads + head, jnp.minimum(block, last), 0

    # The query twice side by side, so that the kernel makes both halves of the weights without moving lanes.
    twice = jnp.tile(q.astype(jnp.float32).reshape(rows * kv_heads, group, dim), 2)
    return pl.pallas_call(
        functools.partial(_kernel, page_size, reduce, beta),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # Heads innermost: a block of scores holds all of them, which is the layout that the selection wants.
            grid=(rows, -(-pages // block_pages), kv_heads),
            in_specs=[
                pl.BlockSpec((1, group, width), lambda row, block, head, *_: (row * kv_heads + head, 0, 0)),
                pl.BlockSpec((1, block_pages, width), meta_index),
            ],
            out_specs=pl.BlockSpec((1, kv_heads * lists, block_pages), lambda row, block, head, *_: (row, 0, block)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads * lists, pages), jnp.float32),
        compiler_params=mosaic_tpu.compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="page_scores",
    )(
        jnp.asarray(lengths, jnp.int32),
        mosaic_tpu.flat_scalars(0 if layer is None else layer),
        twice,
        mosaic_tpu.in_hbm(meta.reshape(-1, pages, width), interpret),
    )


def _kernel(page_size, reduce, beta, lengths, layer, q_ref, meta_ref, scores_ref):
    """Scores a block of pages ``[p, 2D]`` for one KV head: its rows of ``[lists, p]``."""
    del layer  # of the index map
    length = lengths[pl.program_id(0)]
    n_pages, width = meta_ref.shape[1:]
    lists = scores_ref.shape[1] // pl.num_programs(2)
    first_list = pl.program_id(2) * lists
    first = pl.program_id(1) * n_pages

    def store(scores):
        # Row by row: several at once must begin at a multiple of 8.
        for i in range(lists):
            scores_ref[0, pl.ds(first_list + i, 1)] = scores[i : i + 1]

    @pl.when(first * page_size >= length)
    def _():
        store(jnp.full((lists, n_pages), -jnp.inf))

    @pl.when(first * page_size < length)
    def _():
        q = q_ref[0]
        size = beta * jnp.abs(q)
        low_half = lax.broadcasted_iota(jnp.int32, q.shape, 1) < width // 2
        weights = jnp.where(low_half, q - size, q + size) / 2
        if reduce == "mean":
            # The sum of the heads' bounds is the bound of the summed halves: one row of products instead of G.
            weights = weights.mean(axis=0, keepdims=True)
        scores = mosaic_tpu.dot(weights, meta_ref[0].astype(jnp.float32), transposed=True)
        if reduce == "max":
            scores = scores.max(axis=0, keepdims=True)
        page = first + lax.broadcasted_iota(jnp.int32, (1, n_pages), 1)
        store(jnp.where(page * page_size < length, scores, -jnp.inf))
