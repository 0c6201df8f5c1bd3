"""Inverse key norms: one number a token, kept beside the min and max of the pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Below this length a key has no direction, and its cosines are about zero.
EPSILON = 1e-6


def inverse_norms(keys: Float[Array, "*shape D"]) -> Float[Array, "*shape"]:
    """Returns ``1 / max(|k|, 1e-6)`` in float32, the same bits for a key whatever the others."""
    total = jnp.square(keys.astype(jnp.float32))
    # Added in a fixed order: a reduction's depends on the number of tokens, and with it the last bit.
    while (width := total.shape[-1]) > 1:
        half = (width + 1) // 2
        front, back = total[..., :half], total[..., half:]
        total = front + jnp.pad(back, [(0, 0)] * (back.ndim - 1) + [(0, 2 * half - width)])
    return 1 / jnp.maximum(jnp.sqrt(total[..., 0]), EPSILON)


@jax.named_scope("append_norms")
def append_norms(
    norms: Float[Array, "B K L"], keys: Float[Array, "B T K D"], starts: Int[Array, "B"], ends: Int[Array, "B"]
) -> Float[Array, "B K L"]:
    """Writes the inverse norms of the tokens that :func:`~quest_jax.pallas_kernels.append.op.append` writes.

    In place when ``norms`` is donated. A position past ``ends`` or the row's room is not written.
    """
    rows, kv_heads, room = norms.shape
    positions = starts[:, None] + jnp.arange(keys.shape[1])
    written = jnp.where(positions < ends[:, None], positions, room)  # out of range: the scatter drops it
    index = (jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None], written[:, None])
    return norms.at[index].set(inverse_norms(keys).swapaxes(1, 2), mode="drop")
