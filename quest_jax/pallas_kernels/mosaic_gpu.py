"""What the Mosaic GPU kernels share: what they need of a device, tensor-core layouts, products, stores.

The kernels are written at the level of a warpgroup, 128 threads that own one array together. Arrays that meet in a
tensor-core product (``mma.sync``, on every architecture since Ampere) need the layouts of :class:`Layouts`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from quest_jax.pallas_kernels.dispatch import Call
from quest_jax.pallas_kernels.pages import TILE

GROUP = 8
"""Columns of a tensor-core product: query heads that one list of pages can serve."""

EMPTY = -1e30
"""A finite minus infinity: differences of two of them are 0, not NaN."""


class Layouts(NamedTuple):
    """Where the elements of ``left [M, K] @ right [K, N] -> sum [M, N]`` lie among the 128 threads."""

    left: Any
    right: Any
    sum: Any


def layouts(dtype) -> Layouts:
    """Returns the layouts of a product of ``dtype`` operands, its rows dealt out to the four warps."""
    return Layouts(plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype), plgpu.Layout.MMA_ACC(dtype))


def why_not_device(call: Call) -> str | None:
    """Says why the device or the query cannot be served by any of these kernels, or None."""
    if call.platform != "gpu":
        return f"it needs an NVIDIA GPU, got platform {call.platform!r}."
    if call.compute_capability is None:
        return f"it needs an NVIDIA GPU, and {call.device_kind!r} has no CUDA compute capability."
    if call.compute_capability < (8, 0):
        major, minor = call.compute_capability
        return f"it needs compute capability 8.0 (Ampere) or newer, {call.device_kind!r} has {major}.{minor}."
    if call.group > GROUP:
        return f"it serves up to {GROUP} query heads per KV head, got {call.group}."
    if call.head_dim % TILE:
        return (
            f"it needs rows whose head dim is a multiple of {TILE}, got {call.head_dim}; a cache that init_cache makes "
            "for a GPU has them."
        )
    return None


def dot(total, left, right, interpret: bool):
    """``total + left @ right`` in float32 on the tensor cores."""
    if interpret:  # the interpreter has no rule for mma
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)


def store(ref, value) -> None:
    """Stores registers in any layout."""
    # JAX 0.12 wants to be told that a store need not be coalesced; JAX 0.11 has no way to say it, and does not mind.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def filled(shape, value: float, layout):
    """A float32 constant in ``layout``."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across(column, shape):
    """Repeats ``column [n]`` along a new first axis."""
    return lax.broadcast_in_dim(column, shape, (1,))


def along(row, shape):
    """Repeats ``row [m]`` along a new last axis."""
    return lax.broadcast_in_dim(row, shape, (0,))
