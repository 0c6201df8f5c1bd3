"""What a decode step costs: the attention of one layer, and a whole model against the capacity of its cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Table

from quest_jax.attention import AttentionState, attend, extend, init_attention
from quest_jax.bench.timing import time_interleaved
from quest_jax.decode import decode_step, prefill, replace_policy
from quest_jax.models.config import LlamaConfig
from quest_jax.params import Params, random_params
from quest_jax.policies.quest import Quest

SMOLLM2 = LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)


class Shape(NamedTuple):
    """Query heads, KV heads and head dim of a layer."""

    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {"smollm2": Shape(9, 3, 64), "llama-3-8b": Shape(32, 8, 128)}


@functools.partial(jax.jit, static_argnums=3)
def split_attention(q, keys, values, splits: int = 32):
    """Dense decode attention over plain arrays ``[K, L, D]`` in independent splits: the fastest portable float32 form.

    The yardstick for the paged ops: it has neither pages, nor lengths, nor batch.
    """
    kv_heads, length, width = keys.shape
    keys, values = (x.reshape(kv_heads, splits, length // splits, width) for x in (keys, values))
    scores = jnp.einsum("kgd,knld->kngl", q, keys) * width**-0.5
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    scale = jnp.exp(top - top.max(axis=1, keepdims=True))
    out = (jnp.einsum("kngl,knld->kngd", weights, values) * scale).sum(axis=1)
    return out / (weights.sum(axis=-1, keepdims=True) * scale).sum(axis=1)


def filled(shape: Shape, length: int, budget: int | None) -> AttentionState:
    """State of one layer whose cache holds ``length`` random tokens, with room for more."""
    policy = Quest(budget, dense_layers=0) if budget else None
    state = init_attention(1, shape.kv_heads, shape.head_dim, batch=1, capacity=length + 512, policy=policy)
    # One chunk of keys at a time, and a single query head would do: only the cache is wanted.
    write = jax.jit(lambda q, k, v, state: attend(0, q, k, v, state)[1], donate_argnums=3)
    for start in range(0, length, 512):
        parts = jax.random.split(jax.random.key(start), 2)
        q = jnp.zeros((1, 512, shape.kv_heads, shape.head_dim))
        k, v = (jax.random.normal(key, q.shape) for key in parts)
        state = write(q, k, v, extend(state, jnp.array([512])))
    return state


def attention_table(lengths: list[int], budget: int, rounds: int) -> Table:
    """Times one layer's decode attention at several context lengths."""
    table = Table(title=f"Decode attention, one layer, float32, batch 1, budget {budget} (append included)")
    for column in ("shape", "context", "split dense", "paged dense", "Quest", "Quest vs best dense", "bytes model"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for name, shape in SHAPES.items():
        for length in lengths:
            calls = _attention_calls(shape, length, budget)
            seconds = time_interleaved(calls, rounds)
            best = min(seconds["split"], seconds["dense"])
            read = 1 / 16 + min(budget, length) / length  # metadata is 2D floats for every 16 x 2D of the cache
            table.add_row(
                name, f"{length}", *(f"{seconds[key] * 1e3:.2f} ms" for key in ("split", "dense", "quest")),
                f"{best / seconds['quest']:.1f}x", f"{1 / read:.1f}x",
            )  # fmt: skip
    return table


def _attention_calls(shape, length, budget):
    q, k, v = (jnp.ones((1, 1, heads, shape.head_dim)) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    step = jax.jit(lambda state: attend(0, q, k, v, extend(state, jnp.array([1]))), donate_argnums=0)
    states = {"dense": filled(shape, length, None), "quest": filled(shape, length, budget)}

    def run(name):
        out, states[name] = step(states[name])
        return out

    keys, values = (jax.random.normal(jax.random.key(i), (shape.kv_heads, length, shape.head_dim)) for i in (1, 2))
    group = q.reshape(shape.kv_heads, -1, shape.head_dim)
    return {
        "split": lambda: split_attention(group, keys, values),
        "dense": lambda: run("dense"),
        "quest": lambda: run("quest"),
    }


def model_table(lengths: list[int], budget: int, rounds: int) -> Table:
    """Times whole decode steps of a SmolLM2-shaped model with random weights, at two fills of each capacity."""
    params = random_params(SMOLLM2)
    table = Table(title=f"A whole decode step, SmolLM2-135M shape, float32, batch 1, budget {budget}")
    for column in ("tokens in the cache", "capacity", "dense", f"Quest {budget}", "ratio"):
        table.add_column(column, justify="right")
    for capacity in lengths:
        for length in sorted({min(lengths), capacity}):
            seconds = time_interleaved(_model_calls(params, length - 64, capacity, budget), rounds)
            table.add_row(
                f"{length - 64}", f"{capacity}", f"{seconds['dense'] * 1e3:.1f} ms", f"{seconds['quest'] * 1e3:.1f} ms",
                f"{seconds['dense'] / seconds['quest']:.2f}x",
            )  # fmt: skip
    return table


def _model_calls(params: Params, length: int, capacity: int, budget: int):
    step = jax.jit(decode_step, donate_argnums=1)
    states = {}
    for name, own_budget in (("dense", None), ("quest", budget)):
        state = prefill(params, [[1] * 16], capacity=capacity)
        # The time does not depend on what the cache holds, so the rest of the context is declared, not computed.
        cache = state.attention.cache.replace(lengths=jnp.array([length], jnp.int32))
        state = state.replace(attention=state.attention.replace(cache=cache))
        states[name] = replace_policy(state, own_budget)

    def run(name):
        states[name], token = step(params, states[name])
        return token

    return {"dense": lambda: run("dense"), "quest": lambda: run("quest")}
