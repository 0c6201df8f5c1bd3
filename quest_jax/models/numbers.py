"""The two operations of every layer, and what they do about precision and about single rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from quest_jax.models import quant_cpu
from quest_jax.models.quant import QuantArray


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last axis, in float32; keeps the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def matmul(x: Array, weight: Array | QuantArray, dtype: Any = None, *, contract: int = 0) -> Array:
    """``x [..., n]`` times axis ``contract`` of ``weight``; the result in ``dtype``, or that of ``x``.

    A float32 product is asked for at full precision: by default a TPU rounds both sides to bfloat16 and a GPU to
    TF32, which loses 4 of the 7 digits and with them every promise about equal logits. Who wants speed takes bfloat16.
    """
    if isinstance(weight, QuantArray):
        return _quantized(x, weight, dtype or x.dtype)

    def product(x: Array, weight: Array) -> Array:
        return jax.lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (contract,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
            preferred_element_type=dtype or x.dtype,
        )

    def two_rows(x: Array, weight: Array) -> Array:
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return product(rows, weight)[:1].reshape(*x.shape[:-1], -1)

    def same_row_twice(x: Array, weight: Array) -> Array:
        rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return product(rows, weight)[:1].reshape(*x.shape[:-1], -1)

    # A single row is no matrix to XLA. Its CPU backend then writes a float32 copy of a bfloat16 weight at every decode
    # step; its CUDA backend, for some sizes, writes the elementwise product of row and weight before it sums it (in
    # bfloat16 rounded, too). A second row avoids both: of zeros on a CPU, the same one on a GPU, where the product then
    # reads it without a launch to make it. TPUs need no help.
    if x.size == x.shape[-1]:
        on_cpu = two_rows if weight.dtype == jnp.bfloat16 else product
        return jax.lax.platform_dependent(x, weight, cpu=on_cpu, cuda=same_row_twice, default=product)
    return product(x, weight)


def take_rows(weight: Array | QuantArray, index: Array, dtype: Any) -> Array:
    """Rows of an embedding in ``dtype``, of NaN where the index is out of range."""
    if isinstance(weight, QuantArray):
        return weight.at_first(index).dequantize(dtype)
    return weight.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)


def _quantized(x: Array, weight: QuantArray, dtype: Any) -> Array:
    def anywhere(x: Array, weight: QuantArray) -> Array:
        """Integers are exact in bfloat16 too; one scale a column commutes with the sum."""
        contract = weight.axis + 2
        if weight.kind == "int8":
            return matmul(x, weight.values.astype(x.dtype), jnp.float32, contract=contract) * weight.scales.reshape(-1)
        return matmul(x, weight.dequantize(x.dtype), jnp.float32, contract=contract)

    rows = x.reshape(-1, x.shape[-1])
    made = jax.lax.platform_dependent(rows, weight, cpu=quant_cpu.product, default=anywhere)
    return made.astype(dtype).reshape(*x.shape[:-1], made.shape[-1])
