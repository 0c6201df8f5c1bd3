r"""``page_attention`` for one query token a row on NVIDIA GPUs (Mosaic GPU).

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
are its 8 columns, so one to eight heads cost the same and no row is wasted on padding. A second kernel merges the
splits by their log-sum-exp. One split writes the result directly.

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
    along,
    dot,
    filled,
    layouts,
    store,
    why_not_device,
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


def why_not(call: dispatch.Call) -> str | None:
    """See :class:`quest_jax.pallas_kernels.dispatch.Implementation`."""
    reason = why_not_device(call)
    if reason is not None:
        return reason
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
    if call.compute_capability is not None and call.compute_capability < (9, 0):
        # cp.async deals a page out as 8 x 64 tiles, one for each of the four warps.
        if call.page_size * call.head_dim < 1024:
            return "below compute capability 9.0 it needs page_size * head_dim of at least 1024 for its copies."
    return None


class Cut(NamedTuple):
    """How a list is divided: tokens of a step, thread blocks that share the list, steps in shared memory at once."""

    step: int
    splits: int
    stages: int


def cut(lists: int, width: int, page_size: int, head_dim: int, splits: int | None = None) -> Cut:
    """Divides ``lists`` lists of up to ``width`` pages; ``splits`` overrides the choice of thread blocks."""
    step = max(_STEP_TOKENS, page_size)
    steps = -(-width // (step // page_size))
    if splits is None:
        splits = min(-(-_BLOCKS // lists), _MOST_SPLITS)
    splits = max(1, min(splits, steps))
    # A second stage is of use where a thread block has a second step.
    stages = 2 if steps > splits and 2 * _step_bytes(page_size, head_dim) <= _SHARED_BYTES else 1
    return Cut(step, splits, stages)


def shared_bytes(cut: Cut, head_dim: int) -> int:
    """Shared memory of a thread block: the pages in flight and the weights, without what the compiler adds."""
    return 2 * cut.step * (cut.stages * 2 * head_dim + GROUP)


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
    rows, _, heads, head_dim = q.shape
    lists = shape.kv_heads if pages is None else pages.shape[1]
    pages_per_row = shape.pages // rows if page_table is None else page_table.shape[1]
    width = pages_per_row if pages is None else pages.shape[2]
    step, splits, stages = cut(rows * lists, width, shape.page_size, head_dim, splits)
    capability = dispatch.current_target().compute_capability
    copy_engine = interpret is not None or (capability is not None and capability >= (9, 0))

    operands = {
        "q": q.reshape(rows * heads, head_dim),
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
        "out": jax.ShapeDtypeStruct((rows * heads, head_dim), q.dtype),
        "lse": jax.ShapeDtypeStruct((rows * lists, GROUP), jnp.float32),
    }
    partial = {
        "out": jax.ShapeDtypeStruct((rows * lists, splits, head_dim, GROUP), jnp.float32),
        "lse": jax.ShapeDtypeStruct((rows * lists, splits, GROUP), jnp.float32),
    }
    written = result if splits == 1 else partial
    scratch: list[Any] = [
        plgpu.SMEM((stages, step, 2 * head_dim), kv.dtype),
        plgpu.SMEM((step, GROUP), kv.dtype),
    ]
    if copy_engine:
        scratch.append(plgpu.Barrier(num_arrivals=step // shape.page_size, num_barriers=stages))

    def body(*refs):
        ins = dict(zip(operands, refs, strict=False))
        outs = dict(zip(written, refs[len(operands) :], strict=False))
        memory = refs[len(operands) + len(written) :]
        _attend(
            ins, outs, *memory, kv_heads=shape.kv_heads, lists=lists, pool_pages=shape.pages,
            pages_per_row=pages_per_row, group=heads // lists, splits=splits, scale=scale,
            interpret=interpret is not None,
        )  # fmt: skip

    found = plgpu.kernel(
        body, out_type=tuple(written.values()), scratch_types=scratch, grid=(rows * lists, splits),
        grid_names=("lists", "splits"), kernel_name="page_attention", interpret=interpret,
    )(*operands.values())  # fmt: skip
    if splits > 1:
        found = plgpu.kernel(
            functools.partial(_merge, group=heads // lists, splits=splits), out_type=tuple(result.values()),
            grid=(rows * lists, head_dim // _STEP_TOKENS), grid_names=("lists", "channels"),
            kernel_name="page_attention_merge", interpret=interpret,
        )(*found)  # fmt: skip
    out, lse = found
    return out.reshape(rows, 1, heads, head_dim), lse[:, : heads // lists].reshape(rows, 1, heads)


def _attend(
    ins, outs, kv_memory, weights_memory, barrier=None, *,
    kv_heads, lists, pool_pages, pages_per_row, group, splits, scale, interpret,
):  # fmt: skip
    """The thread block of one list and one split."""
    index, split = lax.axis_index("lists"), lax.axis_index("splits")
    row, list_id = index // lists, lax.rem(index, lists)
    stages, step, width = kv_memory.shape
    head_dim, page_size = width // 2, ins["kv"].shape[1]
    per_step = step // page_size
    dtype = kv_memory.dtype
    lay = layouts(dtype)

    # The query stands at `starts`, sees what is not after it, and nothing at all when it is padding.
    start, length = ins["starts"][row], ins["lengths"][row]
    limit = jnp.where(start < length, jnp.minimum(start + 1, length), 0)
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

    def real(shape, axis, layout, logical, i):
        """Which tokens of step ``i`` are listed and seen; ``axis`` of ``shape`` counts them."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        end = jnp.zeros(shape, jnp.int32)
        for j, page in enumerate(logical):
            live = jnp.where(first + i * per_step + j < last, limit - page * page_size, 0)
            end = jnp.where(token // page_size == j, j * page_size + live, end)
        return token < end

    def attend_step(i, carry):
        top, total, out = carry
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
        keys = plgpu.load(kv_memory.at[stage, :, pl.ds(0, head_dim)], layout=lay.left)
        scores = dot(filled((step, GROUP), 0.0, lay.sum), keys, query, interpret)
        seen = real((step, GROUP), 0.0, lay.sum, logical, i)
        scores = jnp.where(seen, scores * (math.log2(math.e) * scale), EMPTY)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp2(scores - across(new_top, scores.shape)), 0.0)
        kept = jnp.exp2(top - new_top)
        total = total * kept + jnp.sum(weights, axis=0)
        # The second product wants the weights in another layout: every warp needs all tokens of them.
        store(weights_memory, weights.astype(dtype))
        weights = plgpu.load(weights_memory, layout=lay.right, optimized=False)
        values = plgpu.load(kv_memory.at[stage, :, pl.ds(head_dim, head_dim)].T, layout=lay.left)
        # 0 * NaN is NaN: weight zero does not take unused memory out of a product.
        values = jnp.where(real((head_dim, step), 1, lay.left, logical, i), values, jnp.zeros((), dtype))
        return new_top, total, dot(out * across(kept, out.shape), values, weights, interpret)

    @pl.when(steps > 0)
    def _():
        start_copies(0)

    query = _load_query(ins["q"], index * group, group, head_dim, lay)
    carry = (
        filled((GROUP,), EMPTY, lay.sum.reduce(0)),
        filled((GROUP,), 0.0, lay.sum.reduce(0)),
        filled((head_dim, GROUP), 0.0, lay.sum),
    )
    top, total, out = lax.fori_loop(0, steps, attend_step, carry)
    seen = total != 0  # true of NaN: what real keys say is not hidden
    safe = jnp.where(seen, total, 1.0)
    out = out / across(safe, out.shape)
    lse = jnp.where(seen, top + jnp.log2(safe), EMPTY)
    if splits == 1:
        _write(outs["out"], outs["lse"].at[index], out, lse, index * group, group, pl.ds(0, head_dim), lay, True)
    else:
        store(outs["out"].at[index, split], out)
        store(outs["lse"].at[index, split], lse)


def _load_query(q, head, group, head_dim, lay):
    """Reads ``group`` rows of ``q`` as the columns of ``[D, 8]``; the columns past them are zero."""
    column = plgpu.broadcasted_iota(jnp.int32, (head_dim, GROUP), 1, layout=lay.right)
    query = plgpu.layout_cast(jnp.zeros((head_dim, GROUP), q.dtype), lay.right)
    for g in range(group):
        one = plgpu.load(q.at[head + g], layout=lay.right.reduce(1), optimized=False)
        query = jnp.where(column == g, along(one, query.shape), query)
    return query


def _merge(partial_out, partial_lse, out, lse, *, group, splits):
    """Weighs the splits of one list by their share of the softmax, for 64 channels.

    ``out = sum_s 2^(lse_s - top) out_s / sum_s 2^(lse_s - top)``, all loads independent of each other.
    """
    index, chunk = lax.axis_index("lists"), lax.axis_index("channels")
    channels = pl.ds(chunk * _STEP_TOKENS, _STEP_TOKENS)
    lay = layouts(out.dtype)
    parts = [plgpu.load(partial_lse.at[index, s], layout=lay.sum.reduce(0), optimized=False) for s in range(splits)]
    top = functools.reduce(jnp.maximum, parts)
    total, merged = filled((GROUP,), 0.0, lay.sum.reduce(0)), filled((_STEP_TOKENS, GROUP), 0.0, lay.sum)
    for s, part in enumerate(parts):
        weight = jnp.exp2(part - top)
        total = total + weight
        one = plgpu.load(partial_out.at[index, s, channels], layout=lay.sum, optimized=False)
        merged = merged + one * across(weight, merged.shape)
    # At least one weight is 1; where all splits were empty their outputs are zero.
    merged = merged / across(total, merged.shape)
    _write(out, lse.at[index], merged, top + jnp.log2(total), index * group, group, channels, lay, chunk == 0)


def _write(out_ref, lse_ref, out, lse, head, group, channels, lay, writes_lse):
    """Writes the columns of ``out [.., 8]`` as rows, and the log-sum-exp in base e, ``-inf`` where nothing was seen."""
    column = plgpu.broadcasted_iota(jnp.int32, out.shape, 1, layout=lay.sum)
    for g in range(group):
        one = jnp.sum(jnp.where(column == g, out, 0.0), axis=1)
        store(out_ref.at[head + g, channels], one.astype(out_ref.dtype))

    @pl.when(writes_lse)
    def _():
        store(lse_ref, jnp.where(lse < EMPTY / 2, -jnp.inf, lse * math.log(2)))


def _step_bytes(page_size: int, head_dim: int) -> int:
    return max(_STEP_TOKENS, page_size) * 2 * head_dim * 2
