r"""``page_scores`` on NVIDIA GPUs (Mosaic GPU).

.. math:: U_p = \sum_i w^-_i m_{pi} + w^+_i M_{pi}, \qquad w^\pm = \frac{q \pm \beta |q|}{2}

with ``low`` and ``high`` the m and M of the page, ``below`` and ``above`` the two weights.

The metadata is float32 and is read once: 8 D bytes a page for 2 D multiply-adds a head, so the op is bound by memory,
and ordinary float32 arithmetic keeps up with it. Tensor cores would round the metadata to bfloat16 or TF32, and a
rounded bound is no bound; they are not used.

A thread block scores up to 64 pages of one KV head for its whole group. The weights are made from ``q`` in registers,
the group is reduced and pages past the length are set to ``-inf`` before anything is written: the op is one launch, and
a block that lies past the length reads nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.mosaic_gpu import across, store, why_not_device

# Rows of a tile that one warp holds, four lanes to a row: a row's sum then takes two exchanges between lanes.
_WARP_PAGES = 16
# Channels of min and of max that a step of the loop holds in registers, for all pages of the block.
_CHANNELS = 64


def why_not(call: dispatch.Call) -> str | None:
    """See :class:`quest_jax.pallas_kernels.dispatch.Implementation`."""
    reason = why_not_device(call)
    if reason is not None:
        return reason
    if call.dtype != "float32":
        return f"it serves metadata in float32, got {call.dtype}."
    if call.pages is not None and call.pages % _WARP_PAGES:
        return f"it needs a multiple of {_WARP_PAGES} pages a row, got {call.pages}; raise the cache's capacity."
    return None


def page_scores(q, meta, lengths, *, page_size, reduce, beta, layer, interpret=None):
    """See :func:`quest_jax.pallas_kernels.page_scores.op.page_scores`.

    Args:
      q, meta, lengths, page_size, reduce, beta, layer: as for the op.
      interpret: ``plgpu.InterpretGPUParams`` to run without a GPU.
    """
    rows, kv_heads, pages, width = meta.shape[-4:]
    heads, head_dim = q.shape[1], width // 2
    lists = heads if reduce == "none" else kv_heads
    # As many warps over the pages as divide them; the others share the channels.
    warps = next(n for n in (4, 2, 1) if pages % (n * _WARP_PAGES) == 0)
    body = functools.partial(
        _score, rows=rows, kv_heads=kv_heads, group=heads // kv_heads, page_size=page_size, reduce=reduce, beta=beta,
        layout=plgpu.Layout.MMA_ACC(jnp.float32, m_warps=warps), block=warps * _WARP_PAGES,
    )  # fmt: skip
    scores = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((rows * lists, pages), jnp.float32),
        grid=(rows * kv_heads, pages // (warps * _WARP_PAGES)), grid_names=("heads", "blocks"),
        kernel_name="page_scores", interpret=interpret,
    )(
        q.reshape(rows * heads, head_dim),
        meta.reshape(-1, pages, width),
        lengths.astype(jnp.int32),
        jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
    )  # fmt: skip
    return scores.reshape(rows, lists, pages)


def _score(
    q, meta, lengths, layer, out, *, rows, kv_heads, group, page_size, reduce, beta, layout, block
):  # fmt: skip
    """The thread block of one KV head and ``block`` pages."""
    index, first = lax.axis_index("heads"), lax.axis_index("blocks") * block
    head_dim = q.shape[1]
    lists = group if reduce == "none" else 1
    length = lengths[index // kv_heads]
    pages = pl.ds(first, block)

    @pl.when(first * page_size >= length)
    def _():
        nothing = plgpu.layout_cast(jnp.full((block,), -jnp.inf, jnp.float32), layout.reduce(1))
        for n in range(lists):
            store(out.at[index * lists + n, pages], nothing)

    @pl.when(first * page_size < length)
    def _():
        bounds = meta.at[layer[0] * (rows * kv_heads) + index, pages]

        def add_channels(i, scores):
            at = i * _CHANNELS
            low, high = (
                plgpu.load(bounds.at[:, pl.ds(start + at, _CHANNELS)], layout=layout, optimized=False)
                for start in (0, head_dim)
            )
            weights = []
            for g in range(group):
                some = q.at[index * group + g, pl.ds(at, _CHANNELS)]
                some = plgpu.load(some, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
                size = beta * jnp.abs(some)
                weights.append(((some - size) / 2, (some + size) / 2))
            if reduce == "mean":
                # The mean of the heads' bounds is the bound of their mean weights: one product instead of G.
                weights = [[functools.reduce(jnp.add, half) / group for half in zip(*weights, strict=True)]]
            return [
                score + jnp.sum(low * across(below, low.shape) + high * across(above, high.shape), axis=1)
                for score, (below, above) in zip(scores, weights, strict=True)
            ]

        zero = plgpu.layout_cast(jnp.zeros((block,), jnp.float32), layout.reduce(1))
        scores = lax.fori_loop(0, head_dim // _CHANNELS, add_channels, [zero] * (1 if reduce == "mean" else group))
        if reduce == "max":
            scores = [functools.reduce(jnp.maximum, scores)]
        page = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layout.reduce(1))
        for n, one in enumerate(scores):
            live = (first + page) * page_size < length
            store(out.at[index * lists + n, pages], jnp.where(live, one, -jnp.inf))
