r"""``page_attention`` on NVIDIA GPUs (Mosaic GPU).

Decoding reads every key and value once, so it is bound by memory; the arithmetic only has to stay out of the way. The
pages of a list are dealt out to ``splits`` thread blocks (split-K), so that a batch of one fills the device too. A
block reads its pages in steps of T tokens and keeps, for the G query heads of its list, an online softmax in base 2:

.. math::

    S^T = K Q^T \frac{\log_2 e}{\sqrt D}, \quad m' = \max(m, \max_t S^T), \quad
    P^T = 2^{S^T - m'}, \quad \ell \leftarrow \ell 2^{m - m'} + \sum_t P^T, \quad
    O^T \leftarrow O^T 2^{m - m'} + V^T P^T

and in the end ``out = O / l`` and ``lse = m + log2(l)``. The code calls these ``scores``, ``top``, ``weights``,
``total``, ``out``, and the factor ``2^(m - m')`` of what was there before ``kept``.

Both products are transposed: the long axis (tokens, then channels) is the tensor core's 64 rows, and the query heads
are its 8 columns, so one to eight heads cost the same and no row is wasted on padding. Several query tokens are cut
into tiles of more columns (:mod:`quest_jax.pallas_kernels.page_attention.gpu_columns`), which see what is not after
them; a tile reads its keys again, and of all pages only those up to its last query. A second kernel merges the splits
by their log-sum-exp. One split writes the result directly.

A page is one copy of S contiguous rows ``[key | value]`` into shared memory: by the copy engine (TMA) from compute
capability 9.0, by ``cp.async`` below. Page numbers are looked up in the page table by the kernel. Two steps are in
flight while memory allows, the next one being copied while this one is attended.

The whole contract of the op is served: pages in any order, the partial page anywhere among them, dead entries never
read, lists that are empty.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.mosaic_gpu import (
    EMPTY,
    GROUP,
    across,
    dot,
    filled,
    layouts,
    store,
    why_not_device,
)
from quest_jax.pallas_kernels.page_attention.gpu_columns import (
    Columns,
    columns_of,
    copy,
    load_heads,
    pack,
    unpack,
    write_heads,
)
from quest_jax.pallas_kernels.pages import pool_shape

# Rows of one tensor-core product over four warps; a larger step takes more registers for its scores and values.
_STEP_TOKENS = 64
# Bytes of pages that a thread block keeps in shared memory. The smallest devices served (8.6, 8.9, 12.0) have 99 KiB
# for a block; half of an 8.0's or 9.0's, so that two blocks share a multiprocessor.
_SHARED_BYTES = 96 * 1024
# Thread blocks to aim for: about four for each multiprocessor of the largest devices (132 to 188), as many as share
# one. More splits than this only add to what the second kernel reads.
_BLOCKS = 512
_MOST_SPLITS = 32
# Channels, then tokens, of the operands that a product of many columns loads at once.
_CHUNK = 32
# A position after all queries.
_NOWHERE = 2**30


def why_not(call: dispatch.Call) -> str | None:
    """See :class:`quest_jax.pallas_kernels.dispatch.Implementation`."""
    reason = why_not_device(call)
    if reason is not None:
        return reason
    if call.window is not None:
        return "it masks what comes later, not what lies before a window."
    if call.dtype not in ("bfloat16", "float16"):
        return f"it serves keys and values in bfloat16 or float16, got {call.dtype}."
    if call.layout != "fused":
        return f"it reads the fused layout ([key | value] in one array), got {call.layout!r}."
    if call.page_size not in (8, 16, 32, 64, 128):
        return f"it serves pages of 8, 16, 32, 64 or 128 tokens, got {call.page_size}."
    if _step_bytes(call.page_size, call.head_dim) > _SHARED_BYTES:
        return (
            f"a page of {call.page_size} tokens with head dim {call.head_dim} does not fit in {_SHARED_BYTES >> 10} "
            "KiB of shared memory."
        )
    step = step_tokens(call.page_size)
    columns = columns_of(call.query_tokens, call.group, call.head_dim, step)
    if columns.several and shared_bytes(Cut(step, 1, 1), call.head_dim, columns) > _SHARED_BYTES:
        return (
            f"a page of {call.page_size} tokens with head dim {call.head_dim}, and beside it the queries of several "
            f"tokens, do not fit in {_SHARED_BYTES >> 10} KiB of shared memory."
        )
    if call.compute_capability is not None and call.compute_capability < (9, 0):
        # cp.async deals a page out as 8 x 64 tiles, one for each of the four warps.
        if call.page_size * call.head_dim < 1024:
            return "below compute capability 9.0 it needs page_size * head_dim of at least 1024 for its copies."
    return None


class Cut(NamedTuple):
    """How a list is divided: tokens of a step, thread blocks that share them, steps in shared memory at once."""

    step: int
    splits: int
    stages: int


def cut(lists: int, width: int, page_size: int, head_dim: int, splits: int | None = None) -> Cut:
    """Divides ``lists`` lists (or tiles) of up to ``width`` pages; ``splits`` overrides the choice of thread blocks."""
    step = step_tokens(page_size)
    steps = -(-width // (step // page_size))
    if splits is None:
        splits = min(-(-_BLOCKS // lists), _MOST_SPLITS)
    splits = max(1, min(splits, steps))
    # A second stage is of use where a thread block has a second step.
    stages = 2 if steps > splits and 2 * _step_bytes(page_size, head_dim) <= _SHARED_BYTES else 1
    return Cut(step, splits, stages)


def step_tokens(page_size: int) -> int:
    """Tokens of a step: whole pages."""
    return max(_STEP_TOKENS, page_size)


def shared_bytes(cut: Cut, head_dim: int, columns: Columns) -> int:
    """Shared memory of a thread block: pages in flight, weights, queries; without what the compiler adds."""
    queries = columns.width * head_dim if columns.several else 0
    return 2 * (cut.step * (cut.stages * 2 * head_dim + columns.width) + queries)


def page_attention(
    q, kv, starts, lengths, page_table, *, pages, counts, layer, scale, splits: int | None = None, interpret=None
):
    """See :func:`quest_jax.pallas_kernels.page_attention.op.page_attention`.

    Args:
      q, kv, starts, lengths, page_table, pages, counts, layer: as for the op; ``q`` has the head dim of the pool.
      scale: factor of the scores, ``1 / sqrt`` of the model's head dim.
      splits: thread blocks that share a list; None chooses.
      interpret: ``plgpu.InterpretGPUParams`` to run without a GPU.
    """
    shape = pool_shape(kv)
    rows, tokens, heads, head_dim = q.shape
    lists = shape.kv_heads if pages is None else pages.shape[1]
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    width = pages_per_row if pages is None else pages.shape[2]
    group = heads // lists
    columns = columns_of(tokens, group, head_dim, step_tokens(shape.page_size))
    blocks = rows * lists * columns.tiles
    step, splits, stages = cut(blocks, width, shape.page_size, head_dim, splits)
    capability = dispatch.current_target().compute_capability
    copy_engine = interpret is not None or (capability is not None and capability >= (9, 0))

    operands = {
        "q": pack(q, lists, columns) if columns.several else q.reshape(rows * heads, head_dim),
        "kv": kv.reshape(-1, shape.page_size, 2 * head_dim),
        "starts": starts.astype(jnp.int32),
        "lengths": lengths.astype(jnp.int32),
    }
    if page_table is not None:
        operands["table"] = page_table.astype(jnp.int32)
    if pages is not None:
        operands |= {"pages": pages.astype(jnp.int32), "counts": counts.astype(jnp.int32)}
    if layer is not None:
        operands["layer"] = jnp.asarray(layer, jnp.int32).reshape(1)
    result = {
        "out": jax.ShapeDtypeStruct((blocks * (columns.width if columns.several else group), head_dim), q.dtype),
        "lse": jax.ShapeDtypeStruct((blocks, columns.width), jnp.float32),
    }
    partial = {
        "out": jax.ShapeDtypeStruct((blocks, splits, head_dim, columns.width), jnp.float32),
        "lse": jax.ShapeDtypeStruct((blocks, splits, columns.width), jnp.float32),
    }
    written = result if splits == 1 else partial
    scratch: dict[str, Any] = {
        "kv_memory": plgpu.SMEM((stages, step, 2 * head_dim), kv.dtype),
        "weights_memory": plgpu.SMEM((step, columns.width), kv.dtype),
    }
    if columns.several:
        scratch["query_memory"] = plgpu.SMEM((columns.width, head_dim), kv.dtype)
    if copy_engine:
        scratch["barrier"] = plgpu.Barrier(num_arrivals=step // shape.page_size, num_barriers=stages)

    def body(*refs):
        ins = dict(zip(operands, refs, strict=False))
        outs = dict(zip(written, refs[len(operands) :], strict=False))
        memory = dict(zip(scratch, refs[len(operands) + len(written) :], strict=True))
        _attend(
            ins, outs, **memory, columns=columns, kv_heads=shape.kv_heads, lists=lists, pool_pages=shape.pages,
            pages_per_row=pages_per_row, splits=splits, scale=scale, interpret=interpret is not None,
        )  # fmt: skip

    # An axis that only several query tokens need.
    tiles, eights = ((columns.tiles,), (columns.width // GROUP,)) if columns.several else ((), ())
    found = plgpu.kernel(
        body, out_type=tuple(written.values()), scratch_types=list(scratch.values()),
        grid=(rows * lists, *tiles, splits), grid_names=("lists", *("tiles" for _ in tiles), "splits"),
        kernel_name="page_attention", interpret=interpret,
    )(*operands.values())  # fmt: skip
    if splits > 1:
        found = plgpu.kernel(
            functools.partial(_merge, columns=columns, splits=splits), out_type=tuple(result.values()),
            grid=(blocks, head_dim // _STEP_TOKENS, *eights),
            grid_names=("lists", "channels", *("eights" for _ in eights)),
            kernel_name="page_attention_merge", interpret=interpret,
        )(*found)  # fmt: skip
    out, lse = found
    if columns.several:
        out = out.reshape(blocks, columns.width, head_dim)
        return unpack(out, rows, lists, columns), unpack(lse, rows, lists, columns)
    return out.reshape(rows, 1, heads, head_dim), lse[:, :group].reshape(rows, 1, heads)


def _attend(
    ins, outs, kv_memory, weights_memory, query_memory=None, barrier=None, *,
    columns, kv_heads, lists, pool_pages, pages_per_row, splits, scale, interpret,
):  # fmt: skip
    """The thread block of one list, one tile of its queries, and one split."""
    index, split = lax.axis_index("lists"), lax.axis_index("splits")
    tile = lax.axis_index("tiles") if columns.several else 0
    block = index * columns.tiles + tile if columns.several else index
    row, list_id = index // lists, lax.rem(index, lists)
    stages, step, width = kv_memory.shape
    head_dim, page_size = width // 2, ins["kv"].shape[1]
    per_step = step // page_size
    dtype = kv_memory.dtype
    lay = layouts(dtype)

    # Token t stands at `starts` + t, sees what is not after it, and nothing at all when it is padding. The limit is
    # that of the last query.
    start, length = ins["starts"][row], ins["lengths"][row]
    if columns.several:
        first_at, last_at = start + columns.first_token(tile), start + columns.last_token(tile)
    else:
        first_at = last_at = start
    limit = jnp.where(first_at < length, jnp.minimum(last_at + 1, length), 0)
    count = ins["counts"][row, list_id] if "pages" in ins else (limit + page_size - 1) // page_size
    # Whole steps for each split; the last ones may get nothing.
    share = (count + splits * per_step - 1) // (splits * per_step) * per_step
    first = split * share
    last = jnp.minimum(first + share, count)
    steps = jnp.maximum(0, last - first + per_step - 1) // per_step

    head_row = list_id * kv_heads // lists
    if "layer" in ins:
        head_row = head_row + ins["layer"][0] * kv_heads

    def logical_pages(i):
        # Past the end the last page again: what is copied in vain must be some page of this list.
        at = [jnp.minimum(first + i * per_step + j, last - 1) for j in range(per_step)]
        return [ins["pages"][row, list_id, n] for n in at] if "pages" in ins else at

    def start_copies(i):
        # All page numbers before the first copy: their loads then overlap.
        logical = logical_pages(i)
        physical = [ins["table"][row, n] if "table" in ins else row * pages_per_row + n for n in logical]
        sources = [head_row * pool_pages + n for n in physical]
        stage = lax.rem(i, stages)

        def copy(j, **how):
            target = kv_memory.at[stage, pl.ds(j * page_size, page_size)]
            plgpu.copy_gmem_to_smem(ins["kv"].at[sources[j]], target, **how)

        if barrier is None:
            for j in range(per_step):
                copy(j, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            return

        arrived = barrier.at[stage]

        # One warp, so that each copy is started once and by itself.
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                for j in range(per_step):
                    copy(j, barrier=arrived)

    def wait_for_copies(i):
        if barrier is not None:
            plgpu.barrier_wait(barrier.at[lax.rem(i, stages)])
        else:  # each copy is a group of its own; the next step's may still be on their way
            plgpu.wait_gmem_to_smem(per_step * (stages - 1))

    def real(shape, axis, layout, logical, i, offset=0):
        """Which tokens of step ``i``, from ``offset`` on, are listed and seen; ``axis`` of ``shape`` counts them."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        if columns.several:
            token = token + offset
        end = jnp.zeros(shape, jnp.int32)
        for j, page in enumerate(logical):
            live = jnp.where(first + i * per_step + j < last, limit - page * page_size, 0)
            end = jnp.where(token // page_size == j, j * page_size + live, end)
        return token < end

    def seen_by_columns(logical, i):
        """Which tokens of step ``i`` are listed, and not after the query of the column."""
        shape = (step, columns.width)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=lay.sum)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=lay.sum)
        query_at = start + (tile * columns.width + column) // columns.group
        end = jnp.where(query_at < length, query_at + 1, 0)
        at = jnp.full(shape, _NOWHERE, jnp.int32)
        for j, page in enumerate(logical):
            begin = jnp.where(first + i * per_step + j < last, page * page_size, _NOWHERE) - j * page_size
            at = jnp.where(token // page_size == j, begin + token, at)
        return at < end

    def attend_step(i, carry):
        top, total, out_before = carry
        ahead = i + stages - 1

        @pl.when((ahead > 0) & (ahead < steps))
        def _():
            if barrier is not None:
                # What was read from this memory before comes before what the copy engine writes to it.
                plgpu.commit_smem()
            start_copies(ahead)

        if barrier is None and stages > 1:
            # cp.async counts groups, not names them: the last step has no successor, so it waits for all.
            @pl.when(i + 1 == steps)
            def _():
                plgpu.wait_gmem_to_smem(0)

        logical = logical_pages(i)
        wait_for_copies(i)
        stage = lax.rem(i, stages)

        def keys_and_queries(channel):
            keys = plgpu.load(kv_memory.at[stage, :, pl.ds(channel, channels)], layout=lay.left)
            if query_memory is not None:
                queries = query_memory.at[:, pl.ds(channel, channels)].T
                return keys, plgpu.load(queries, layout=lay.right, optimized=False)
            return keys, heads

        nothing = functools.partial(filled, (step, columns.width), 0.0, lay.sum)
        scores = _product(head_dim, channels, keys_and_queries, nothing, interpret)
        seen = seen_by_columns(logical, i) if columns.several else real(scores.shape, 0, lay.sum, logical, i)
        scores = jnp.where(seen, scores * (math.log2(math.e) * scale), EMPTY)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp2(scores - across(new_top, scores.shape)), 0.0)
        kept = jnp.exp2(top - new_top)
        total = total * kept + jnp.sum(weights, axis=0)
        # The second product wants the weights in another layout: every warp needs all tokens of them.
        store(weights_memory, weights.astype(dtype))

        def values_and_weights(token):
            weights = plgpu.load(weights_memory.at[pl.ds(token, tokens)], layout=lay.right, optimized=False)
            values = plgpu.load(kv_memory.at[stage, pl.ds(token, tokens), pl.ds(head_dim, head_dim)].T, layout=lay.left)
            # 0 * NaN is NaN: weight zero does not take unused memory out of a product.
            known = real((head_dim, tokens), 1, lay.left, logical, i, token)
            return jnp.where(known, values, jnp.zeros((), dtype)), weights

        out = _product(step, tokens, values_and_weights, lambda: out_before * across(kept, out_before.shape), interpret)
        return new_top, total, out

    @pl.when(steps > 0)
    def _():
        start_copies(0)

    # What a product loads at once: for one query token all, which registers hold.
    channels, tokens = (_CHUNK, _CHUNK) if columns.several else (head_dim, step)
    if query_memory is not None:
        copy(ins["q"].at[block], query_memory)
    else:
        heads = load_heads(ins["q"], index * columns.group, columns.group, head_dim, lay)
    carry = (
        filled((columns.width,), EMPTY, lay.sum.reduce(0)),
        filled((columns.width,), 0.0, lay.sum.reduce(0)),
        filled((head_dim, columns.width), 0.0, lay.sum),
    )
    top, total, out = lax.fori_loop(0, steps, attend_step, carry)
    seen = total != 0  # true of NaN: what real keys say is not hidden
    safe = jnp.where(seen, total, 1.0)
    out = out / across(safe, out.shape)
    lse = jnp.where(seen, top + jnp.log2(safe), EMPTY)
    if splits > 1:
        store(outs["out"].at[block, split], out)
        store(outs["lse"].at[block, split], lse)
        return
    if query_memory is not None:
        # Through shared memory, so that what is written is whole rows; the queries are needed no more.
        store(query_memory.T, out.astype(dtype))
        copy(query_memory, outs["out"].at[pl.ds(block * columns.width, columns.width)])
    else:
        write_heads(outs["out"], out, index * columns.group, columns.group, pl.ds(0, head_dim), lay)
    _write_lse(outs["lse"].at[block], lse)


def _product(size: int, chunk: int, operands, before, interpret: bool):
    """``before() + left @ right``, where ``operands(begin)`` loads ``chunk`` of the ``size`` that are summed over.

    A loop, unless there is one chunk: the compilers would load them all before the first product.
    """

    def add(i, before):
        left, right = operands(i * chunk)
        return dot(before(), left, right, interpret)

    if size == chunk:
        return add(0, before)
    return lax.fori_loop(0, size // chunk, lambda i, total: add(i, lambda: total), before())


def _merge(partial_out, partial_lse, out, lse, *, columns, splits):
    """Weighs the splits of eight columns by their share of the softmax, for 64 channels.

    ``out = sum_s 2^(lse_s - top) out_s / sum_s 2^(lse_s - top)``, all loads independent of each other.
    """
    index, chunk = lax.axis_index("lists"), lax.axis_index("channels")
    channels = pl.ds(chunk * _STEP_TOKENS, _STEP_TOKENS)
    lay = layouts(out.dtype)
    begin = 0
    if columns.several:
        begin = lax.axis_index("eights") * GROUP
        eight = pl.ds(begin, GROUP)
        partial_out, partial_lse, lse = partial_out.at[:, :, :, eight], partial_lse.at[:, :, eight], lse.at[:, eight]
    parts = [plgpu.load(partial_lse.at[index, s], layout=lay.sum.reduce(0), optimized=False) for s in range(splits)]
    top = functools.reduce(jnp.maximum, parts)
    total, merged = filled((GROUP,), 0.0, lay.sum.reduce(0)), filled((_STEP_TOKENS, GROUP), 0.0, lay.sum)
    for s, part in enumerate(parts):
        weight = jnp.exp2(part - top)
        total = total + weight
        one = plgpu.load(partial_out.at[index, s, channels], layout=lay.sum, optimized=False)
        merged = merged + one * across(weight, merged.shape)
    # At least one weight is 1; where all splits were empty their outputs are zero.
    merged, merged_lse = merged / across(total, merged.shape), top + jnp.log2(total)
    writes_lse = chunk == 0
    if columns.several:
        write_heads(out, merged, index * columns.width + begin, GROUP, channels, lay)
    else:
        write_heads(out, merged, index * columns.group, columns.group, channels, lay)

    @pl.when(writes_lse)
    def _():
        _write_lse(lse.at[index], merged_lse)


def _write_lse(ref, lse) -> None:
    """Writes the log-sum-exp in base e, ``-inf`` where nothing was seen."""
    store(ref, jnp.where(lse < EMPTY / 2, -jnp.inf, lse * math.log(2)))


def _step_bytes(page_size: int, head_dim: int) -> int:
    return step_tokens(page_size) * 2 * head_dim * 2
