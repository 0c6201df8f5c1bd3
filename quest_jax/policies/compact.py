"""A compact layer: a pool of as many slots as tokens are kept, where a new token takes the slot of a dead one.

Which slots are free differs between KV heads, so a slot says nothing of a position: ``memory["position"]``
``[B, K, N]`` does. A token never lies in a slot past its position: rows fill their slots in order before any dies.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.pages import KV, as_tokens, pad_head_dim, pool_dtype, pool_shape
from quest_jax.policies.base import LayerView


def is_compact(memory: Any) -> bool:
    """Whether the layer of this memory is compact."""
    return isinstance(memory, dict) and "position" in memory


def positions(view: LayerView) -> Int[Array, "#B #K L"]:
    """The position of what every slot holds, of those that hold anything: where nothing is compact, its own number."""
    return view.memory["position"] if is_compact(view.memory) else jnp.arange(view.capacity)[None, None]


def as_slots(view: LayerView) -> LayerView:
    """The view with which attention reads a compact layer: its rows end with their slots. Others stay as they are."""
    if not is_compact(view.memory):
        return view
    last = view.capacity - 1
    return view._replace(starts=jnp.minimum(view.starts, last), lengths=jnp.minimum(view.lengths, last + 1))


def place_token(k: Float[Array, "B 1 K D"], v: Float[Array, "B 1 K D"], view: LayerView) -> tuple[KV, dict[str, Array]]:
    """Writes a token a row into the first free slot of every KV head; returns the pool and the memory.

    A row that brings none writes nothing. There is a free slot: every step leaves at most ``budget`` tokens alive.
    """
    memory, shape = view.memory, pool_shape(view.kv)
    rows, kv_heads, slots = memory["alive"].shape
    if k.dtype != pool_dtype(view.kv) or k.shape != (rows, 1, kv_heads, k.shape[-1]):
        wanted = f"[{rows}, 1, {kv_heads}, {k.shape[-1]}] of {pool_dtype(view.kv)}"
        raise ValueError(f"attend: expected keys {wanted}, got {k.shape} of {k.dtype}.")
    new = jnp.where((view.lengths > view.starts)[:, None], jnp.argmin(memory["alive"], axis=-1), slots)  # [B, K]
    index = jnp.arange(rows)[:, None], jnp.arange(kv_heads), new
    at = jnp.broadcast_to(view.starts[:, None], new.shape)
    kept = {"alive": memory["alive"].at[index].set(True, mode="drop")}
    kept["position"] = memory["position"].at[index].set(at, mode="drop")
    if "watched" in memory:
        kept["watched"] = memory["watched"].at[index].set(0, mode="drop")
    # Of a token pool [K, B N, 1, ...] the slots of row b begin at b N; the one past the last is dropped.
    place = jnp.where(new < slots, jnp.arange(rows)[:, None] * slots + new, rows * slots).T  # [K, B]
    heads = jnp.arange(kv_heads)[:, None]
    keys, values = (pad_head_dim(x[:, 0].swapaxes(0, 1), shape.head_dim) for x in (k, v))  # [K, B, D]
    tokens, _ = as_tokens(view.kv, None)
    parts = (keys, values) if isinstance(tokens, tuple) else jnp.concatenate([keys, values], axis=-1)

    def write(old, pool, part):
        return pool.at[heads, place, jnp.zeros_like(place)].set(part, mode="drop").reshape(old.shape)

    return jax.tree.map(write, view.kv, tokens, parts), memory | kept
