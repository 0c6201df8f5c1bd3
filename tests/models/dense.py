"""Dense attention that keeps all keys and values in plain arrays: the simplest `attend` there is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax.models import llama
from quest_jax.models.config import LlamaConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """Keys and values of all layers.

    Attributes:
      keys, values: one array [B, L, K, D] a layer.
      start: tokens already in them, int32 scalar; the caller advances it after the last layer.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    start: jax.Array


def init_dense(config: LlamaConfig, batch: int, capacity: int, dtype: Any = jnp.float32) -> DenseState:
    # NaN beyond the tokens: a mask that lets one through cannot go unnoticed.
    empty = jnp.full((batch, capacity, config.n_kv_heads, config.head_dim), jnp.nan, dtype)
    return DenseState((empty,) * config.n_layers, (empty,) * config.n_layers, jnp.int32(0))


def attend_dense(layer: int, q, k, v, state: DenseState, *, window=None, sinks=None):
    """Causal softmax(q k^T / sqrt(D)) v; query head h reads KV head h // G."""
    keys = jax.lax.dynamic_update_slice(state.keys[layer], k, (0, state.start, 0, 0))
    values = jax.lax.dynamic_update_slice(state.values[layer], v, (0, state.start, 0, 0))
    group = q.shape[2] // k.shape[2]
    query, at = state.start + jnp.arange(q.shape[1])[:, None], jnp.arange(keys.shape[1])
    visible = (at <= query) & (at > query - (window or keys.shape[1]))  # [T, L]
    real = (jnp.arange(keys.shape[1]) < state.start + q.shape[1])[:, None, None]
    wide_k = jnp.repeat(keys, group, axis=2).astype(jnp.float32)
    wide_v = jnp.repeat(jnp.where(real, values, 0), group, axis=2).astype(jnp.float32)
    scores = jnp.einsum("bthd,blhd->bhtl", q.astype(jnp.float32), wide_k) / np.sqrt(q.shape[-1])
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]]
    out = jnp.einsum("bhtl,blhd->bthd", weights, wide_v).astype(q.dtype)
    state = dataclasses.replace(
        state,
        keys=(*state.keys[:layer], keys, *state.keys[layer + 1 :]),
        values=(*state.values[:layer], values, *state.values[layer + 1 :]),
    )
    return out, state


def forward(weights, config: LlamaConfig, tokens, state: DenseState, start: int = 0):
    """Logits float32 [B, T, V] of tokens [B, T] that stand behind `start` earlier ones, and the new state."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, state = llama.apply(weights, config, tokens, positions, attend_dense, state)
    logits = llama.project_logits(weights, config, hidden)
    return logits, dataclasses.replace(state, start=state.start + tokens.shape[1])


one_shot = jax.jit(forward, static_argnums=(1,))
"""`forward`, compiled once a shape."""


def stepwise(weights, config: LlamaConfig, tokens) -> jax.Array:
    """Logits [T, V] of tokens [T] fed one by one."""
    state, rows = init_dense(config, 1, len(tokens), weights["embed"].dtype), []
    for position, token in enumerate(tokens):
        logits, state = one_shot(weights, config, jnp.full((1, 1), token, jnp.int32), state, position)
        rows.append(logits[0, 0])
    return jnp.stack(rows)
