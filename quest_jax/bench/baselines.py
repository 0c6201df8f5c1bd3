"""Dense decode attention of one layer over plain arrays: the forms that a paged or sparse one has to beat.

None of them has pages, lengths or batch. Each is the fastest somewhere: ``split32`` in float32 on a CPU, the grouped
product in bfloat16; ``jax.nn.dot_product_attention`` is what one would call without knowing that it transposes. Keys
stored transposed, in 1 to L / 16 blocks, took 1.5 to 4.5 times as long as ``split32`` and are left out.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnums=3)
def split_attention(
    q: Float[Array, "K G D"], keys: Float[Array, "K L D"], values: Float[Array, "K L D"], splits: int = 32
) -> Float[Array, "K G D"]:
    """Attends in independent splits, combined once: the fastest portable float32 form. ``L`` is a multiple of it."""
    kv_heads, length, width = keys.shape
    keys, values = (x.reshape(kv_heads, splits, length // splits, width) for x in (keys, values))
    scores = jnp.einsum("kgd,knld->kngl", q, keys) * width**-0.5
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    scale = jnp.exp(top - top.max(axis=1, keepdims=True))
    out = (jnp.einsum("kngl,knld->kngd", weights, values) * scale).sum(axis=1)
    return out / (weights.sum(axis=-1, keepdims=True) * scale).sum(axis=1)


@jax.jit
def grouped_attention(
    q: Float[Array, "K G D"], keys: Float[Array, "K L D"], values: Float[Array, "K L D"]
) -> Float[Array, "K G D"]:
    """One product with the keys, one softmax, one product with the values: the fastest bfloat16 form."""
    group = q.shape[1]
    if group == 1 and q.dtype == jnp.bfloat16:
        q = jnp.repeat(q, 2, axis=1)  # XLA's CPU backend makes a float32 copy for a product of one row
    scores = jnp.einsum("kgd,kld->kgl", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("kgl,kld->kgd", weights, values)[:, :group]


@jax.jit
def dot_product_attention(
    q: Float[Array, "K G D"], keys: Float[Array, "L K D"], values: Float[Array, "L K D"]
) -> Float[Array, "K G D"]:
    """``jax.nn.dot_product_attention``, which wants token-major arrays and transposes them at every call."""
    out = jax.nn.dot_product_attention(q.reshape(1, 1, -1, q.shape[-1]), keys[None], values[None])
    return out.reshape(q.shape)


def has_torch() -> bool:
    """Says whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def torch_attention(
    q: Float[Array, "K G D"], keys: Float[Array, "K L D"], values: Float[Array, "K L D"]
) -> Callable[[], Any]:
    """PyTorch's ``scaled_dot_product_attention``, the group folded into the query length: no KV head is repeated.

    Returns:
      a call that gives a tensor ``[1, K, G, D]``. It reads the memory of the given arrays, which must outlive it.

    Raises:
      ImportError: PyTorch is not installed.
    """
    if not has_torch():
        raise ImportError('the method "torch" needs PyTorch; pip install "quest-jax[bench]"')
    torch = importlib.import_module("torch")
    tensors = [torch.from_dlpack(array)[None] for array in (q, keys, values)]
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, *tensors)
