"""How the queries of a list become the columns of the products of :mod:`quest_jax.pallas_kernels.page_attention.gpu`.

One query token: its heads are the eight columns of one tile, and stay in registers. Several: ``tokens * group``
queries, the heads of a token beside each other, are cut into tiles of ``width`` columns. A tile lies in shared memory,
of which a product reads some channels at a time: every warp needs all of them, too many for its registers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from quest_jax.pallas_kernels.mosaic_gpu import GROUP, along, store

# What a thread may keep of the output (head_dim x width) and of a step's scores (step x width), of the 255 registers
# that it can have. The rest is for the operands of products.
_REGISTERS = 80
_WIDEST = 64


class Columns(NamedTuple):
    """``tiles`` tiles of ``width`` columns hold the ``tokens * group`` queries of a list."""

    tokens: int
    group: int
    width: int
    tiles: int

    @property
    def several(self) -> bool:
        """Whether there are several query tokens."""
        return self.tokens > 1

    def first_token(self, tile):
        """The query token of a tile's first column."""
        return tile * self.width // self.group

    def last_token(self, tile):
        """The query token of a tile's last column; what is past the last query does not count."""
        return (jnp.minimum((tile + 1) * self.width, self.tokens * self.group) - 1) // self.group


def columns_of(tokens: int, group: int, head_dim: int, step: int) -> Columns:
    """Cuts the queries of a list, to be attended in steps of ``step`` keys."""
    if tokens == 1:
        return Columns(1, group, GROUP, 1)
    width = _WIDEST
    while width > GROUP and (width // 2 >= tokens * group or (head_dim + step) * width > 128 * _REGISTERS):
        width //= 2
    return Columns(tokens, group, width, -(-tokens * group // width))


def pack(q, lists: int, columns: Columns):
    """``[B, T, H, D]`` as ``[B * lists * tiles, width, D]``; columns past the last query are zero."""
    rows, tokens, heads, head_dim = q.shape
    by_list = q.reshape(rows, tokens, lists, columns.group, head_dim).transpose(0, 2, 1, 3, 4)
    flat = by_list.reshape(rows * lists, tokens * columns.group, head_dim)
    missing = columns.tiles * columns.width - tokens * columns.group
    return jnp.pad(flat, ((0, 0), (0, missing), (0, 0))).reshape(-1, columns.width, head_dim)


def unpack(x, rows: int, lists: int, columns: Columns):
    """The inverse of :func:`pack`, for ``[B * lists * tiles, width, ..]``."""
    rest = x.shape[2:]
    flat = x.reshape(rows, lists, columns.tiles * columns.width, *rest)[:, :, : columns.tokens * columns.group]
    by_token = jnp.moveaxis(flat.reshape(rows, lists, columns.tokens, columns.group, *rest), 2, 1)
    return by_token.reshape(rows, columns.tokens, lists * columns.group, *rest)


def load_heads(q, head, group: int, head_dim: int, lay):
    """Reads ``group`` rows of ``q`` as the columns of ``[D, 8]``; the columns past them are zero."""
    column = plgpu.broadcasted_iota(jnp.int32, (head_dim, GROUP), 1, layout=lay.right)
    query = plgpu.layout_cast(jnp.zeros((head_dim, GROUP), q.dtype), lay.right)
    for g in range(group):
        one = plgpu.load(q.at[head + g], layout=lay.right.reduce(1), optimized=False)
        query = jnp.where(column == g, along(one, query.shape), query)
    return query


def copy(source, target) -> None:
    """Copies a tile ``[width, D]`` between global and shared memory, on every architecture."""
    width, head_dim = source.shape
    # Whole rows in order, up to 16 bytes a thread at once.
    layout: Any = plgpu.Layout.WG_STRIDED((width, head_dim), vec_size=min(8, width * head_dim // 128))
    store(target, plgpu.load(source, layout=layout))


def write_heads(out_ref, out, head, group: int, channels, lay) -> None:
    """Writes the first ``group`` columns of ``out [.., 8]`` as rows of ``out_ref``."""
    column = plgpu.broadcasted_iota(jnp.int32, out.shape, 1, layout=lay.sum)
    for g in range(group):
        one = jnp.sum(jnp.where(column == g, out, 0.0), axis=1)
        store(out_ref.at[head + g, channels], one.astype(out_ref.dtype))
