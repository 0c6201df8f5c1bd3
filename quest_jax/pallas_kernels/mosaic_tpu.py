"""What the TPU kernels share: their limits as sentences, tile arithmetic, compiler options.

A TPU keeps arrays in tiles of 8 x 128 (float32) or 16 x 128 (bfloat16, packed in pairs). A kernel copies whole pages
between HBM and VMEM, so a page must be whole tiles: ``[S, 2D]`` with ``S`` a multiple of 8 and ``2D`` of 128.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels import dispatch

LANES = 128
SUBLANES = 8
# Of the 1 MiB of scalar memory that every supported chip has; the compiler wants some for itself.
SMEM_BYTES = 512 * 1024
# Of the at least 16 MiB of vector memory that a kernel may use by default: what one kind of buffer may take, so that
# double buffers, scratch and the compiler's temporaries fit beside each other.
BUFFER_BYTES = 2 * 1024 * 1024


def why_not(call: dispatch.Call) -> str | None:
    """The limits that hold for every TPU kernel; None when ``call`` is within them."""
    if call.platform != "tpu":
        return f"it is compiled for TPUs, and the default device is of platform {call.platform!r}."
    if call.layout != "fused":
        return (
            "it copies a page's keys and values as one piece, and the pool has the layout "
            f"{call.layout!r}: make the cache with layout='fused'."
        )
    if call.dtype not in ("float32", "bfloat16"):
        return f"TPU vector units hold float32 and bfloat16, and the cache has {call.dtype}."
    if 2 * call.head_dim % LANES:
        return (
            f"a row of keys and values has 2D = {2 * call.head_dim} numbers, no multiple of the {LANES} lanes of a "
            "TPU tile; a cache that init_cache makes for a TPU has padded rows."
        )
    if call.page_size % SUBLANES:
        return f"a page has {call.page_size} tokens, no multiple of the {SUBLANES} rows of a TPU tile."
    if 4 * call.scalars > SMEM_BYTES:
        return (
            f"the page table and page lists take {4 * call.scalars} bytes of scalar memory, and {SMEM_BYTES} are set "
            "aside: take larger pages or a smaller batch."
        )
    return None


def cores() -> int:
    """TensorCores that the target fuses into one device, over which a parallel grid axis is split."""
    return 2 if dispatch.current_target().device_kind in ("TPU v4", "TPU v5", "TPU v5p") else 1


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple


def sublanes(dtype: Any) -> int:
    """Rows of a tile of ``dtype``: narrower numbers are packed along rows."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def dot(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """``left @ right``, or ``left @ right.T``, with float32 accumulation and result."""
    # By default the matrix unit rounds float32 operands to bfloat16; asking for more on bfloat16 does not compile.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    contract = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(
        left, right, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def compiler_params(*semantics: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    """Options of a kernel whose grid axes have these semantics."""
    # Page ids are in range by contract; the checks take more than half of a kernel's instructions at small pages.
    return pltpu.CompilerParams(dimension_semantics=semantics, disable_bounds_checks=True)


def in_hbm(array: jax.Array, interpret: Any) -> jax.Array:
    """Keeps an operand where it is.

    XLA moves operands that it thinks worth it into vector memory ahead of a kernel: of the cache, that is a copy of all
    of it for the sake of a few pages. A ``BlockSpec`` in HBM describes what the kernel sees and does not prevent it.
    """
    return array if interpret else pltpu.with_memory_space_constraint(array, pltpu.HBM)


def flat_scalars(array: Any) -> jax.Array:
    """An array or number as int32 for scalar memory, flat (a second axis would be padded to 128); None is a dummy."""
    return jnp.zeros(1, jnp.int32) if array is None else jnp.asarray(array, jnp.int32).reshape(-1)
