"""``page_attention`` for TPU: pages are copied from HBM by id while the pages before them are attended.

The work is cut into *items*: one list of pages (a KV head's, or a query head's) of one row, and one tile of the
queries that share it. An item reads its pages in *blocks*. All copies of a block are started together and awaited
together, one block ahead of the computation, across the items too: only the very first block is waited for.

    item (row, list, tile)    q [R, D]: R = tile of tokens x group, token slowest
      block 0 .. n            kv [L, 2D] = L / S pages, in VMEM twice
        s = q k^T / sqrt(D)   [R, L], left out where the key's position is past the query's
        top' = max(top, s)    online softmax: running maximum, sum of weights, weighted sum of values
        total    = total e^(top - top') + sum e^(s - top')
        weighted = weighted e^(top - top') + e^(s - top') v
    out = weighted / total    lse = top + log(total)

Page ids, page table, lengths and counts lie in scalar memory before the kernel starts; the logical page of a list is
looked up in the table where its copy is started, and the position of its first token is noted beside the buffer. So a
partial page may stand anywhere in a list, and dense attention is the list ``0, 1, 2, ...``, never written down.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels import dispatch, mosaic_tpu
from quest_jax.pallas_kernels.mosaic_tpu import LANES, dot, round_up, sublanes
from quest_jax.pallas_kernels.pages import pool_shape

# Position of a token that no query sees; a page more does not overflow.
_NOWHERE = 1 << 30
_LOWEST = float(jnp.finfo(jnp.float32).min)


def why_not(call: dispatch.Call) -> str | None:
    """Returns why the kernel does not serve ``call``, or None."""
    if call.window is not None:
        return "it masks what comes later, not what lies before a window."
    return mosaic_tpu.why_not(call)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of a call.

    Attributes:
      kv_heads, pool_pages, page_size, head_dim: of the pool.
      scale: factor of the scores.
      pages_per_row: logical pages of a row.
      lists, width: lists of a row, and entries of a list; ``width = pages_per_row`` when dense.
      listed, table: whether page lists and a page table are given.
      group, tokens: query heads of a list, and query tokens [T].
      tile_tokens, tiles: query tokens of an item, and items of a list.
      block_pages: pages of a block.
      steps: items of a core.
    """

    kv_heads: int
    pool_pages: int
    page_size: int
    head_dim: int
    scale: float
    pages_per_row: int
    lists: int
    width: int
    listed: bool
    table: bool
    group: int
    tokens: int
    tile_tokens: int
    tiles: int
    block_pages: int
    steps: int

    @property
    def aligned(self) -> bool:
        """Whether keys and values are whole lane tiles of their own."""
        return self.head_dim % LANES == 0


@jax.named_scope("page_attention")
def page_attention(
    q, kv, starts, lengths, page_table, *, pages, counts, layer, scale,
    block_tokens=None, tile_rows=None, cores=None, interpret=False,
):  # fmt: skip
    """See :func:`quest_jax.pallas_kernels.page_attention.op.page_attention`.

    Args:
      q, kv, starts, lengths, page_table, pages, counts, layer: as there; ``q`` has the head dim of the pool.
      scale: factor of the scores, ``1 / sqrt`` of the model's head dim.
      block_tokens: tokens that are copied and attended at once.
      tile_rows: query rows (tokens x group) that attend to a block at once.
      cores: among which the items are divided; None is what the target has.
      interpret: True or ``pltpu.InterpretParams`` runs the kernel on a CPU.
    """
    shape = pool_shape(kv)
    rows, tokens, heads, dim = q.shape
    listed = pages is not None
    lists = pages.shape[1] if listed else shape.kv_heads
    group = heads // lists
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    width = pages.shape[2] if listed else pages_per_row

    # A tile of queries reads all keys before it, so a larger one reads the cache less often: 512 rows make 512 x 4D
    # operations of every 4D bytes, which is where the matrix units, not HBM, are the limit on v5e (240) and v6e (560).
    tile_tokens = min(tokens, max(1, (tile_rows or 512) // group))
    tiles = -(-tokens // tile_tokens)
    real_rows = tile_tokens * group
    padded_rows = round_up(real_rows, sublanes(q.dtype))
    # A block must be large enough that its computation and the issue of its copies cost more than their latency (about
    # a microsecond, 800 KB on v5e), and small enough that the row's last block, always copied whole, wastes little.
    # With many query rows the scores [R, L] are what fills VMEM.
    row_bytes = 2 * dim * q.dtype.itemsize
    block_tokens = block_tokens or min(1024 if padded_rows <= 128 else 512, mosaic_tpu.BUFFER_BYTES // row_bytes)
    block_pages = min(max(1, block_tokens // shape.page_size), width)

    items = rows * lists * tiles
    cores = mosaic_tpu.cores() if cores is None else cores
    cores = cores if items % cores == 0 else 1
    plan = _Plan(
        shape.kv_heads, shape.pages, shape.page_size, dim, scale, pages_per_row, lists, width, listed,
        page_table is not None, group, tokens, tile_tokens, tiles, block_pages, items // cores,
    )  # fmt: skip

    # [B, T, H, D] -> [items, R, D]. Without lane tiles of their own, keys are not cut out of [K | V]: the query is
    # zero where the values stand, and the output is cut out of p [K | V] instead.
    lanes = dim if plan.aligned else 2 * dim
    tiled = jnp.pad(q, ((0, 0), (0, tiles * tile_tokens - tokens), (0, 0), (0, 0)))
    tiled = tiled.reshape(rows, tiles, tile_tokens, lists, group, dim).transpose(0, 3, 1, 2, 4, 5)
    tiled = tiled.reshape(items, real_rows, dim)
    tiled = jnp.pad(tiled, ((0, 0), (0, padded_rows - real_rows), (0, lanes - dim)))

    def of_item(width):
        return pl.BlockSpec((1, padded_rows, width), lambda core, step, *_: (core * plan.steps + step, 0, 0))

    block = block_pages * shape.page_size
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(cores, plan.steps),
            in_specs=[of_item(lanes), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[of_item(lanes), of_item(1)],
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, shape.page_size, 2 * dim), q.dtype),  # the blocks
                pltpu.VMEM((2, 1, block), jnp.int32),  # position of every token in them
                pltpu.SMEM((2,), jnp.int32),  # position of the last of them
                pltpu.SMEM((1,), jnp.int32),  # the buffer whose turn it is
                pltpu.VMEM((padded_rows, 1), jnp.float32),  # top
                pltpu.VMEM((padded_rows, 1), jnp.float32),  # total
                pltpu.VMEM((padded_rows, lanes), jnp.float32),  # weighted
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((items, padded_rows, lanes), q.dtype),
            jax.ShapeDtypeStruct((items, padded_rows, 1), jnp.float32),
        ],
        # Items are chained by the copy that each starts for the next, so within a core their order is fixed.
        compiler_params=mosaic_tpu.compiler_params("parallel", "arbitrary"),
        interpret=interpret,
        name="page_attention",
    )(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        mosaic_tpu.flat_scalars(0 if layer is None else layer),
        mosaic_tpu.flat_scalars(page_table),
        mosaic_tpu.flat_scalars(pages),
        mosaic_tpu.flat_scalars(counts),
        tiled,
        mosaic_tpu.in_hbm(kv.reshape(-1, shape.page_size, 2 * dim), interpret),
    )

    def untile(x):
        x = x[:, :real_rows].reshape(rows, lists, tiles, tile_tokens, group, -1).transpose(0, 2, 3, 1, 4, 5)
        return x.reshape(rows, tiles * tile_tokens, heads, -1)[:, :tokens]

    return untile(out[..., lanes - dim :]), untile(lse)[..., 0]


def _kernel(
    plan, starts, lengths, layer, table, pages, counts, q_ref, pool_ref, out_ref, lse_ref,
    blocks, positions, last_position, turn, top, total, weighted, arrived,
):  # fmt: skip
    """One item; see the module. ``starts`` to ``counts`` are scalars, then inputs, outputs and scratch."""
    size, n_pages = plan.page_size, plan.block_pages
    step = pl.program_id(1)
    item = pl.program_id(0) * plan.steps + step

    def split(item):
        """Row, list and tile of an item."""
        return item // (plan.lists * plan.tiles), item // plan.tiles % plan.lists, item % plan.tiles

    def blocks_of(item):
        """At least one, whose tokens may all be unseen: then no item breaks the chain of copies."""
        row, list_id, tile = split(item)
        if plan.listed:
            n = counts[row * plan.lists + list_id]
        else:
            end = jnp.minimum(lengths[row], starts[row] + (tile + 1) * plan.tile_tokens)
            n = pl.cdiv(end, size)
        return jnp.maximum(1, pl.cdiv(n, n_pages))

    def page_of(item, block, j):
        """Logical page ``j`` of a block, in range even where the list has ended; and where its first token stands."""
        row, list_id, _ = split(item)
        index = block * n_pages + j
        logical = jnp.minimum(index, plan.width - 1)
        live = index < plan.width
        if plan.listed:
            logical = pages[(row * plan.lists + list_id) * plan.width + logical]
            live = index < counts[row * plan.lists + list_id]
        return logical, jnp.where(live, logical * size, _NOWHERE)

    def start(item, block, buffer):
        """Starts the copies of a block and notes where its tokens stand."""
        row, list_id, _ = split(item)
        head = list_id * plan.kv_heads // plan.lists
        base = (layer[0] * plan.kv_heads + head) * plan.pool_pages
        slot = lax.broadcasted_iota(jnp.int32, (1, size), 1)
        last = 0
        for j in range(n_pages):
            logical, first = page_of(item, block, j)
            index = row * plan.pages_per_row + logical
            physical = table[index] if plan.table else index
            pltpu.make_async_copy(pool_ref.at[base + physical], blocks.at[buffer, j], arrived.at[buffer]).start()
            positions[buffer, :, j * size : (j + 1) * size] = first + slot
            last = jnp.maximum(last, first + size - 1)
        last_position[buffer] = last

    def clear(block, buffer):
        """Zeroes tokens that are not real: their weight is zero, but 0 * NaN is NaN."""

        def one(j, _):
            _, first = page_of(item, block, j)
            slot = lax.broadcasted_iota(jnp.int32, blocks.shape[2:], 0)
            # By way of float32: it is rarely done, and every chip can select there.
            page = jnp.where(first + slot < length, blocks[buffer, j].astype(jnp.float32), 0)
            blocks[buffer, j] = page.astype(blocks.dtype)
            return 0

        lax.fori_loop(0, n_pages, one, 0)

    @pl.when(step == 0)
    def _():
        turn[0] = 0
        start(item, 0, 0)

    row, _, tile = split(item)
    length = lengths[row]
    # Query row r is token r // group of the tile; a padded token stands before everything and so sees nothing.
    at = starts[row] + tile * plan.tile_tokens
    if plan.tokens > 1:
        at = at + lax.broadcasted_iota(jnp.int32, (q_ref.shape[1], 1), 0) // plan.group
    at = jnp.where(at < length, at, -1)

    top[...] = jnp.full(top.shape, _LOWEST)
    total[...] = jnp.zeros(total.shape)
    weighted[...] = jnp.zeros(weighted.shape)
    n_blocks = blocks_of(item)

    def attend(block, buffer):
        ended = block + 1 == n_blocks

        @pl.when(~ended | (step + 1 < plan.steps))
        def _():
            start(jnp.where(ended, item + 1, item), jnp.where(ended, 0, block + 1), 1 - buffer)

        # One wait for the bytes of all pages of the block.
        pltpu.make_async_copy(blocks.at[buffer], blocks.at[buffer], arrived.at[buffer]).wait()

        @pl.when(last_position[buffer] >= length)
        def _():
            clear(block, buffer)

        kv = blocks[buffer].reshape(n_pages * size, 2 * plan.head_dim)
        keys, values = (kv[:, : plan.head_dim], kv[:, plan.head_dim :]) if plan.aligned else (kv, kv)
        seen = positions[buffer] <= at
        scores = jnp.where(seen, dot(q_ref[0], keys, transposed=True) * plan.scale, _LOWEST)
        new_top = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        kept = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * kept + weights.sum(axis=1, keepdims=True)
        weighted[...] = weighted[...] * kept + dot(weights.astype(values.dtype), values)
        return 1 - buffer

    turn[0] = lax.fori_loop(0, n_blocks, attend, turn[0])
    seen = total[...] != 0  # true of NaN: what real keys say is not hidden
    safe = jnp.where(seen, total[...], 1)
    out_ref[0] = (weighted[...] / safe).astype(out_ref.dtype)
    lse_ref[0] = jnp.where(seen, top[...] + jnp.log(safe), -jnp.inf)
