"""Products with quantised matrices on a CPU, which never see a whole matrix in full precision.

A CPU's time for a few rows is the time to read the matrix, so a fourth of the bytes could take a fourth of it. XLA's
CPU backend, left alone, first writes the matrix out in float32, which takes several times as long as a product with a
float32 matrix. Here blocks are widened while they are in a cache, and a block for one or two rows not even there: eight
rows of the matrix are widened, multiplied and added in the registers of one loop.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.models.quant import QuantArray

FEW = 16
"""Rows of ``x`` up to which reading the matrix costs more than multiplying; beyond, it may as well be widened."""

_FUSED, _FUSED_STEP = 2, 8  # more terms are no longer one loop to XLA
_STEP, _COLUMNS = 64, 1024  # blocks of some 100 KB to 4 MB


def product(x: Float[Array, "N n"], weight: QuantArray) -> Float[Array, "N m"]:
    """``x`` times a matrix, in float32: an embedding, or any for at most ``FEW`` rows."""
    wide = x.astype(jnp.float32)
    return _by_rows(wide, weight) if weight.axis == -2 else _by_columns(wide, weight)


def widened_nbytes(shape: tuple[int, ...], axis: int, rows: int, itemsize: int) -> int:
    """Bytes of the copy in full precision that a product of so many rows makes for a while."""
    if axis == -1:
        return 4 * min(_COLUMNS, shape[0]) * shape[1]
    if rows > FEW:
        return itemsize * shape[-2] * shape[-1]
    return 4 * shape[-1] * (_FUSED_STEP if rows <= _FUSED else min(_STEP, shape[-2]))


def _by_rows(x: Float[Array, "N n"], weight: QuantArray) -> Float[Array, "N m"]:
    fused, half = len(x) <= _FUSED, weight.values.shape[0]
    planes = 2 if weight.kind == "int4" else 1
    x = jnp.pad(x, ((0, 0), (0, planes * half - x.shape[1])))
    step = min((_FUSED_STEP if fused else _STEP) // planes, half)  # within a group

    def partial(first, count):
        block = weight.replace(values=jax.lax.dynamic_slice_in_dim(weight.values, first, count, axis=0))
        added = []
        for plane, integers in enumerate(block.planes()):
            at = plane * half + first
            piece = jax.lax.dynamic_slice_in_dim(x, at, count, axis=1)
            scale = jax.lax.dynamic_index_in_dim(weight.scales, at // weight.group, keepdims=False)
            wide = integers.astype(jnp.float32)
            if fused:
                terms = [piece[:, i, None] * wide[i] for i in range(count)]
                added.append(sum(terms[1:], terms[0]) * scale)
            else:
                added.append(_dot(piece, wide, 0) * scale)
        return sum(added[1:], added[0])

    whole, rest = divmod(half, step)
    total = jnp.zeros((len(x), weight.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, whole, lambda i, total: total + partial(i * step, step), total)
    return total + partial(whole * step, rest) if rest else total


def _by_columns(x: Float[Array, "N E"], weight: QuantArray) -> Float[Array, "N V"]:
    count, half = weight.values.shape
    size = min(count, _COLUMNS)
    x = jnp.pad(x, ((0, 0), (0, weight.scales.shape[1] * weight.group - x.shape[1])))

    def one(i, made):
        first = jnp.minimum(i * size, count - size)  # the last block overlaps the one before
        values, scales = (
            jax.lax.dynamic_slice_in_dim(part, first, size, axis=0) for part in (weight.values, weight.scales)
        )
        block, added = weight.replace(values=values), jnp.zeros((len(x), size), jnp.float32)
        for plane, integers in enumerate(block.planes()):
            at = plane * half
            own = jax.lax.slice_in_dim(scales, at // weight.group, (at + half) // weight.group, axis=1)
            wide = integers.astype(jnp.float32).reshape(size, -1, weight.group) * own[..., None]
            added += _dot(x[:, at : at + half], wide.reshape(size, half), 1)
        return jax.lax.dynamic_update_slice_in_dim(made, added, first, axis=1)

    return jax.lax.fori_loop(0, -(-count // size), one, jnp.zeros((len(x), count), jnp.float32))


def _dot(x: Float[Array, "N n"], block: Float[Array, "a b"], contract: int) -> Float[Array, "N m"]:
    return jax.lax.dot_general(x, block, (((1,), (contract,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
