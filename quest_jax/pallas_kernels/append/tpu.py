"""``append`` for TPU: the touched pages and their metadata are read, changed and written back, in place.

A copy between HBM and VMEM moves whole tiles, so a single token cannot be written: for each row and KV head

    touched pages      [S, 2D] each: read; slots in [start, end) take the new tokens; written back
    window of metadata [W, 2D] of W pages around them, W a multiple of 8: read; the touched pages' rows become
                       [min | max] over the slots below ``end``; written back

An *owner* is a row with some of its KV heads. It alone writes its pages and its window, so owners are independent of
each other, and all copies of a step's owners are under way together. A row without new tokens copies nothing at all:
its window would be the same bytes, but its page table may name pages that now belong to another row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels import dispatch, mosaic_tpu
from quest_jax.pallas_kernels.mosaic_tpu import LANES, SUBLANES, round_up
from quest_jax.pallas_kernels.pages import pool_shape


def why_not(call: dispatch.Call) -> str | None:
    """Returns why the kernel does not serve ``call``, or None."""
    if call.metadata != "float32":
        return f"it writes metadata in float32, got {call.metadata}; make the cache with metadata='float32'."
    if call.pages is not None and call.pages % SUBLANES:
        return f"a row has metadata of {call.pages} pages, no multiple of the {SUBLANES} rows of a TPU tile."
    one_head = call.query_tokens * 2 * call.head_dim * jnp.dtype(call.dtype).itemsize
    if one_head > 2 * mosaic_tpu.BUFFER_BYTES:
        return (
            f"{call.query_tokens} tokens of one KV head take {one_head} bytes of vector memory, and "
            f"{2 * mosaic_tpu.BUFFER_BYTES} are set aside: write fewer tokens at a time."
        )
    return mosaic_tpu.why_not(call)


@jax.named_scope("append")
def append(
    kv, meta, keys, values, starts, ends, page_table, *, layer, step_rows=None, step_heads=None, interpret=False
):
    """See :func:`quest_jax.pallas_kernels.append.op.append`.

    Args:
      kv, meta, keys, values, starts, ends, page_table, layer: as there.
      step_rows, step_heads: rows and KV heads of a step; divisors of B and K.
      interpret: True or ``pltpu.InterpretParams`` runs the kernel on a CPU.
    """
    shape = pool_shape(kv)
    rows, tokens = keys.shape[:2]
    pages_per_row, width = meta.shape[-2:]
    touched = (tokens + shape.page_size - 2) // shape.page_size + 1  # pages that T tokens can lie in
    window = min(round_up(touched + SUBLANES - 1, SUBLANES), pages_per_row)
    if step_heads is None or step_rows is None:
        # As many owners a step as fit: what a step waits for is the latency of one read and one write.
        head_bytes = touched * shape.page_size * width * keys.dtype.itemsize + window * width * meta.dtype.itemsize
        step_heads = _largest_divisor(shape.kv_heads, mosaic_tpu.BUFFER_BYTES // head_bytes)
        step_rows = _largest_divisor(rows, mosaic_tpu.BUFFER_BYTES // (head_bytes * step_heads))

    # New tokens as pages, [K, B, J, S, 2D]: XLA places them in their slots, which a kernel could only do by moving
    # rows between tiles. A single token needs no place, it is spread over its page: [K, B, 1, 1, 2D].
    new = jnp.concatenate([keys, values], axis=-1)
    if tokens > 1:
        slot = jnp.arange(touched * shape.page_size)
        source = jnp.clip(slot - starts[:, None] % shape.page_size, 0, tokens - 1)
        new = jnp.take_along_axis(new, source[:, :, None, None], axis=1)
    new = new.reshape(rows, touched, -1, shape.kv_heads, width).transpose(3, 0, 1, 2, 4)

    pool = kv.reshape(-1, *kv.shape[-3:])
    bounds = meta.reshape(-1, *meta.shape[-3:])
    kernel = functools.partial(_kernel, page_table is not None, shape.kv_heads, pages_per_row)
    pool, bounds = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows // step_rows, shape.kv_heads // step_heads),
            in_specs=[
                pl.BlockSpec((step_heads, step_rows, *new.shape[2:]), lambda row, head, *_: (head, row, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            scratch_shapes=[
                pltpu.VMEM((step_rows, touched, step_heads, shape.page_size, width), kv.dtype),
                pltpu.VMEM((step_rows, step_heads, window, width), meta.dtype),
                pltpu.SemaphoreType.DMA((2,)),  # reads, writes
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), jax.ShapeDtypeStruct(bounds.shape, bounds.dtype)],
        # Counted with the four scalar operands: the pool and the metadata are the outputs.
        input_output_aliases={5: 0, 6: 1},
        compiler_params=mosaic_tpu.compiler_params("parallel", "parallel"),
        interpret=interpret,
        name="append",
    )(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(ends, jnp.int32),
        mosaic_tpu.flat_scalars(0 if layer is None else layer),
        mosaic_tpu.flat_scalars(page_table),
        new,
        mosaic_tpu.in_hbm(pool, interpret),
        mosaic_tpu.in_hbm(bounds, interpret),
    )
    return pool.reshape(kv.shape), bounds.reshape(meta.shape)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``, or 1."""
    return max(size for size in range(1, number + 1) if number % size == 0 and size <= max(1, limit))


def _kernel(
    has_table, kv_heads, pages_per_row, starts, ends, layer, table, new_ref, pool_in, meta_in, pool_ref, meta_ref,
    pages, bounds, done,
):  # fmt: skip
    """The owners of one step; see the module. ``starts`` to ``table`` are scalars."""
    del pool_in, meta_in  # the same memory as the outputs
    step_rows, touched, step_heads, size, width = pages.shape
    window = bounds.shape[2]
    first_head = layer[0] * kv_heads + pl.program_id(1) * step_heads

    def row_of(i):
        return pl.program_id(0) * step_rows + i

    def window_of(i):
        """First page of the window: whole tiles, within the row. Both terms are multiples of 8."""
        page = starts[row_of(i)] // size
        return pl.multiple_of(jnp.minimum(page // SUBLANES * SUBLANES, pages_per_row - window), SUBLANES)

    def is_active(i):
        row = row_of(i)
        return (starts[row] < ends[row]) & (starts[row] < pages_per_row * size)

    def for_each_live_page(i, action):
        """Calls ``action(j, page)`` for the logical pages in which row ``i`` has new tokens."""

        def one(j, _):
            page = starts[row_of(i)] // size + j

            @pl.when(is_active(i) & (page * size < ends[row_of(i)]) & (page < pages_per_row))
            def _():
                action(j, page)

            return 0

        lax.fori_loop(0, touched, one, 0)

    def copies(i, way):
        """Descriptors of the copies of row ``i``: ``way`` 0 reads, 1 writes. Returns (page copy, window copy)."""

        def copy(memory, scratch):
            source, target = (memory, scratch) if way == 0 else (scratch, memory)
            return pltpu.make_async_copy(source, target, done.at[way])

        def page_copy(j, page):
            index = row_of(i) * pages_per_row + page
            physical = table[index] if has_table else index
            return copy(pool_ref.at[pl.ds(first_head, step_heads), physical], pages.at[i, j])

        def window_copy():
            # The metadata is [layers * B, K, P, 2D]: the layer counts rows here, not heads.
            row = layer[0] * (pl.num_programs(0) * step_rows) + row_of(i)
            heads = pl.ds(pl.program_id(1) * step_heads, step_heads)
            return copy(meta_ref.at[row, heads, pl.ds(window_of(i), window)], bounds.at[i])

        return page_copy, window_copy

    def for_all_copies(way, method):
        def one(i, _):
            page_copy, window_copy = copies(i, way)

            @pl.when(is_active(i))
            def _():
                getattr(window_copy(), method)()

            for_each_live_page(i, lambda j, page: getattr(page_copy(j, page), method)())
            return 0

        lax.fori_loop(0, step_rows, one, 0)

    def change(i, _):
        start, end = starts[row_of(i)], ends[row_of(i)]

        def one(j, page):
            at = page * size + lax.broadcasted_iota(jnp.int32, (step_heads, size, width), 1)
            # In float32, where every chip selects and compares; from bfloat16 and back is exact.
            old, new = pages[i, j].astype(jnp.float32), new_ref[:, i, j].astype(jnp.float32)
            merged = jnp.where((at >= start) & (at < end), new, old)
            pages[i, j] = merged.astype(pages.dtype)
            low = jnp.where(at < end, merged, jnp.inf).min(axis=1)
            high = jnp.where(at < end, merged, -jnp.inf).max(axis=1)
            if width // 2 % LANES == 0:
                row = jnp.concatenate([low[:, : width // 2], high[:, : width // 2]], axis=1)
            else:  # the maxima of the keys move to the lanes that held the values
                lane = lax.broadcasted_iota(jnp.int32, low.shape, 1)
                row = jnp.where(lane < width // 2, low, pltpu.roll(high, width // 2, 1))
            # A store at one row would have to be proven aligned; the window is a few tiles.
            here = window_of(i) + lax.broadcasted_iota(jnp.int32, (step_heads, window, width), 1) == page
            bounds[i] = jnp.where(here, row[:, None].astype(bounds.dtype), bounds[i])

        for_each_live_page(i, one)
        return 0

    for_all_copies(0, "start")
    for_all_copies(0, "wait")
    lax.fori_loop(0, step_rows, change, 0)
    for_all_copies(1, "start")
    for_all_copies(1, "wait")
