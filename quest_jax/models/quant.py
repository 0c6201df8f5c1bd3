"""Matrices in 8 or 4 bits: integers, and the scales that make numbers of them."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

QuantKind = Literal["int8", "int4"]

GROUP = 32
"""Numbers of a column that share a scale in int4."""

LIMITS: dict[QuantKind, int] = {"int8": 127, "int4": 7}
"""The integers are -limit .. limit: zero is exact, and so is a column that is its own negative."""


class QuantArray(struct.PyTreeNode):
    """A matrix ``[in, out]``, or a stack ``[X, in, out]``, whose columns are integers times scales.

    ``w[i, o] = integer[i, o] * scales[i // group, o]``. An embedding ``[V, E]`` is the same with its axes exchanged:
    a token's row, which is a column of the output projection, is what shares scales.

    Attributes:
      values: int8 ``[.., in, out]``; of int4 two numbers a byte, uint8 ``[.., half, out]``: byte ``i`` holds number
        ``i`` in its low bits and number ``half + i`` in its high ones, eight more than they are; ``in`` is filled up
        with zeros to whole groups in both halves.
      scales: float32 ``[.., groups, out]``; one group in int8.
      kind: of the integers.
      axis: the one that a product sums over, -2, or -1 of an embedding.
      length: of that axis, without what fills it up.
      group: numbers that share a scale.
    """

    # Not jnp.int4, though XLA packs it inside programs: an array of it takes a byte a number on a CPU, and there a
    # product first unpacks the whole matrix. Bytes are two numbers everywhere.
    values: Any
    scales: Any
    kind: QuantKind = struct.field(pytree_node=False)
    axis: int = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that this stands for."""
        shape = list(self.values.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of integers and scales."""
        return sum(part.size * part.dtype.itemsize for part in (self.values, self.scales))

    def planes(self) -> list[Array]:
        """The integers, int8: all of them, or the two halves of ``in``."""
        values = jnp.asarray(self.values)
        if self.kind == "int8":
            return [values]
        return [bits.astype(jnp.int8) - 8 for bits in (values & 15, values >> 4)]

    def dequantize(self, dtype: Any) -> Float[Array, "..."]:
        """The matrix in full, multiplied in float32 and rounded to ``dtype``."""
        axis = self.values.ndim + self.axis
        whole = jnp.concatenate(self.planes(), axis=axis).astype(jnp.float32)
        grouped = whole.reshape(*whole.shape[:axis], -1, self.group, *whole.shape[axis + 1 :])
        wide = (grouped * jnp.expand_dims(self.scales, axis + 1)).reshape(whole.shape)
        return jax.lax.slice_in_dim(wide, 0, self.length, axis=axis).astype(dtype)

    def at_first(self, index: Any) -> "QuantArray":
        """What ``array.at[index].get()`` is of the first axis, a matrix of a stack or rows of an embedding.

        An index out of range, negative ones too, gives NaN.
        """

        def taken(part: Array, fill: int | float) -> Array:
            return part.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)

        return self.replace(values=taken(self.values, 0), scales=taken(self.scales, jnp.nan))


def abstract_quantized(shape: tuple[int, ...], kind: QuantKind, axis: int) -> QuantArray:
    """The parts of a quantised matrix of this shape, as ``jax.ShapeDtypeStruct``."""
    length, values, scales = shape[axis], list(shape), list(shape)
    group = GROUP if kind == "int4" else length
    scales[axis] = 2 * -(-length // (2 * group)) if kind == "int4" else 1
    values[axis] = scales[axis] * group // 2 if kind == "int4" else length
    integers = jnp.uint8 if kind == "int4" else jnp.int8
    parts = jax.ShapeDtypeStruct(tuple(values), integers), jax.ShapeDtypeStruct(tuple(scales), jnp.float32)
    return QuantArray(*parts, kind=kind, axis=axis, length=length, group=group)
