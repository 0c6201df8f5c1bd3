"""Products with quantised matrices on a CPU, which never see a whole matrix in full precision.

A CPU's time for a few rows is the time to read the matrix, so a fourth of the bytes could take a fourth of it. XLA's
CPU backend, left alone, first writes the matrix out in float32, which takes several times as long as a product with a
float32 matrix. Here blocks are widened while they are in a cache, and for one or two rows not even there: eight rows of
the matrix are widened, multiplied and added in the registers of one loop.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.models.quant import QuantArray

_FEW, _STEP = 16, 64  # so few rows of x are added up over blocks of so many rows of the matrix
_FUSED, _FUSED_STEP = 2, 8  # more terms are no longer one loop to XLA
_NUMBERS, _LEAST = 1 << 19, 64  # in a block of whole columns, and columns of it


def product(x: Float[Array, "N n"], weight: QuantArray) -> Float[Array, "N m"]:
    """``x`` times a matrix, in float32."""
    few = weight.axis == -2 and len(x) <= _FEW
    return (_by_rows if few else _by_columns)(x.astype(jnp.float32), weight)


def widened_nbytes(shape: tuple[int, ...], axis: int, rows: int) -> int:
    """Bytes that a product of so many rows takes besides its result: a block in full precision, on its way there too.

    Measured: of an embedding one block, of another matrix for many rows up to five, and two of the result.
    """
    if axis == -1:
        return 4 * shape[axis] * _columns(shape, axis)
    if rows > _FEW:
        return 4 * (5 * shape[axis] + 2 * rows) * _columns(shape, axis)
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


def _by_columns(x: Float[Array, "N n"], weight: QuantArray) -> Float[Array, "N m"]:
    contract = weight.axis + 2
    count = weight.shape[1 - contract]
    size, half = _columns(weight.shape, weight.axis), weight.values.shape[contract]
    padded = half * (2 if weight.kind == "int4" else 1)
    x = jnp.pad(x, ((0, 0), (0, padded - x.shape[1])))

    def one(i, made):
        first = jnp.minimum(i * size, count - size)  # the last block overlaps the one before
        values, scales = (
            jax.lax.dynamic_slice_in_dim(part, first, size, axis=1 - contract)
            for part in (weight.values, weight.scales)
        )
        block, added = weight.replace(values=values), jnp.zeros((len(x), size), jnp.float32)
        for plane, integers in enumerate(block.planes()):
            at = plane * half
            own = jax.lax.slice_in_dim(scales, at // weight.group, (at + half) // weight.group, axis=contract)
            grouped = [size, size]
            grouped[contract : contract + 1] = [-1, weight.group]
            wide = integers.astype(jnp.float32).reshape(grouped) * jnp.expand_dims(own, contract + 1)
            added += _dot(x[:, at : at + half], wide.reshape(integers.shape), contract)
        return jax.lax.dynamic_update_slice_in_dim(made, added, first, axis=1)

    # The block depends on the number of the turn, and the buffer for the result waits for x: else XLA would widen the
    # matrices of all layers, or make room for the results of all, before the first product.
    x, made = jax.lax.optimization_barrier((x, jnp.zeros((len(x), count), jnp.float32)))
    return jax.lax.fori_loop(0, -(-count // size), one, made)


def _columns(shape: tuple[int, ...], axis: int) -> int:
    """Columns of a matrix, rows of an embedding, that are widened at a time."""
    length, count = shape[axis], shape[-3 - axis]
    return min(count, max(_LEAST, _NUMBERS // length))


def _dot(x: Float[Array, "N n"], block: Float[Array, "a b"], contract: int) -> Float[Array, "N m"]:
    return jax.lax.dot_general(x, block, (((1,), (contract,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
