"""What reading a prompt costs: one chunk's attention in one layer, and a whole prompt, dense against QuoKA."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from rich.table import Table

from quest_jax.attention import attend, extend, init_attention
from quest_jax.bench.decode import SHAPES, SMOLLM2, Shape
from quest_jax.bench.timing import time_interleaved
from quest_jax.decode import prefill
from quest_jax.params import random_params
from quest_jax.policies.quoka import QuoKA

_BLOCK = 1024


class Row(NamedTuple):
    """One measured line.

    Attributes:
      shape, length, dtype: of what was run.
      method, budget: how; budget None is dense.
      ms: median.
      ratio: the fastest dense of the run over this.
      byte_model: the same ratio by operations alone: products with keys and values, dense over this. For a prompt, of
        the attention with everything else left out, so that no ratio can reach it.
      achieved: ratio / byte_model.
    """

    shape: str
    length: int
    dtype: str
    method: str
    budget: int | None
    ms: float
    ratio: float
    byte_model: float
    achieved: float


@functools.partial(jax.jit, static_argnums=4)
def blocked_attention(q, keys, values, start, block: int = _BLOCK):
    """Dense causal attention of a chunk ``q [T, H, D]`` over plain arrays ``[K, L, D]``, online over blocks of keys.

    The yardstick for the paged ops: no pages, no lengths, no batch, and head by head, so that scores stay in cache.
    """
    tokens, heads, width = q.shape
    kv_heads, length, _ = keys.shape
    grouped = q.reshape(tokens, kv_heads, -1, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)
    at = jnp.tile(start + jnp.arange(tokens), heads // kv_heads)

    def one_head(args):
        q, keys, values = args

        def fold(i, carry):
            top, total, out = carry
            k, v = (lax.dynamic_slice_in_dim(x, i * block, block) for x in (keys, values))
            scores = jnp.where(i * block + jnp.arange(block) <= at[:, None], q @ k.T * width**-0.5, -1e30)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights, scale = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            return new_top, total * scale + weights.sum(axis=1), out * scale[:, None] + weights @ v

        nothing = (jnp.full(len(q), -1e30), jnp.zeros(len(q)), jnp.zeros_like(q))
        _, total, out = lax.fori_loop(0, length // block, fold, nothing)
        return out / total[:, None]

    return lax.map(one_head, (grouped, keys, values))


def attention_rows(lengths: Sequence[int], budget: int, rounds: int) -> list[Row]:
    """Times the last chunk of contexts of several lengths in one layer: append, score, select, attend."""
    rows = []
    for name, shape in SHAPES.items():
        for length in lengths:
            policy = QuoKA(budget)
            seconds = time_interleaved(_attention_calls(shape, length, policy), rounds)
            rows += _rows(name, length, policy, seconds, _operations(shape, length, policy))
    return rows


def prompt_rows(lengths: Sequence[int], budget: int, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """Times whole prompts of a SmolLM2-shaped model with random weights, from the first chunk to the first logits.

    Dense attention reads chunks of 256, its default, QuoKA those of its own.
    """
    params, rows, policy = random_params(SMOLLM2), [], QuoKA(budget)
    for length in lengths:
        prompt = [[i % 1000 for i in range(length)]]
        options: dict[str, dict] = {"dense": {}, "quoka": {"prefill_policy": policy}}

        def run(name, prompt=prompt, options=options, length=length):
            progress(f"a prompt of {length} tokens, {name}")
            return prefill(params, prompt, capacity=length, **options[name]).logits

        for name, chosen in options.items():  # compiles the chunk's program for this capacity
            progress(f"compiling for {length} tokens, {name}")
            jax.block_until_ready(prefill(params, [prompt[0][:256]], capacity=length, **chosen).logits)
        seconds = time_interleaved({name: functools.partial(run, name) for name in options}, rounds, warm=True)
        shape = Shape(SMOLLM2.n_heads, SMOLLM2.n_kv_heads, SMOLLM2.head_dim)
        ends = range(policy.chunk, length + 1, policy.chunk)
        dense, ours = (sum(work) for work in zip(*(_operations(shape, end, policy) for end in ends), strict=True))
        rows += _rows("smollm2 prompt", length, policy, seconds, (dense, ours))
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    """Lays rows out."""
    shown = Table(title=title, title_justify="left")
    for column in ("shape", "length", "method", "time", "ratio", "by operations", "achieved"):
        shown.add_column(column, justify="left" if column in ("shape", "method") else "right")
    for row in rows:
        took = f"{row.ms:.1f} ms" if row.ms < 1e4 else f"{row.ms / 1e3:.1f} s"
        ratio, model, achieved = f"{row.ratio:.2f}x", f"{row.byte_model:.1f}x", f"{row.achieved:.0%}"
        shown.add_row(row.shape, f"{row.length}", row.method, took, ratio, model, achieved)
    return shown


def _attention_calls(shape: Shape, length: int, policy: QuoKA) -> dict[str, Callable[[], object]]:
    chunk, keys = policy.chunk, jax.random.split(jax.random.key(0), 3)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        jax.random.normal(key, (1, chunk, n, shape.head_dim)) for key, n in zip(keys, heads, strict=True)
    )  # fmt: skip
    states = {}
    for name, prefill_policy in (("dense", None), ("quoka", policy)):
        state = init_attention(
            1, shape.kv_heads, shape.head_dim, batch=1, capacity=length + chunk, prefill_policy=prefill_policy
        )
        # Random keys everywhere; the length is declared, as if they had been appended.
        parts = jax.random.split(jax.random.key(1), len(jax.tree.leaves(state.cache.kv)))
        kv = jax.tree.unflatten(
            jax.tree.structure(state.cache.kv),
            [jax.random.normal(p, x.shape) for p, x in zip(parts, jax.tree.leaves(state.cache.kv), strict=True)],
        )
        states[name] = state.replace(cache=state.cache.replace(kv=kv))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        cache = state.cache.replace(lengths=jnp.full_like(state.cache.lengths, length - chunk))
        return attend(0, q, k, v, extend(state.replace(cache=cache), jnp.array([chunk])))

    def run(name):
        out, states[name] = step(states[name])
        return out

    plain = [jax.random.normal(key, (shape.kv_heads, length, shape.head_dim)) for key in keys[1:]]
    return {
        "dense, plain arrays": lambda: blocked_attention(q[0], *plain, length - chunk),
        "dense": lambda: run("dense"),
        "quoka": lambda: run("quoka"),
    }


def _operations(shape: Shape, length: int, policy: QuoKA) -> tuple[float, float]:
    """Multiplications with keys and values for the chunk that ends at ``length``: dense, and by the policy."""
    past = length - policy.chunk
    dense = 2.0 * shape.heads * policy.chunk * length * shape.head_dim
    if past <= policy.budget:
        return dense, dense
    scoring = shape.kv_heads * policy.n_queries * past * shape.head_dim
    return dense, scoring + dense * (policy.budget + policy.chunk) / length


def _rows(shape: str, length: int, policy: QuoKA, seconds: dict[str, float], work: tuple[float, float]) -> list[Row]:
    best = min(value for name, value in seconds.items() if name != "quoka")
    rows = []
    for name, value in seconds.items():
        budget, model = (policy.budget, work[0] / work[1]) if name == "quoka" else (None, 1.0)
        ratio = best / value
        method = f"QuoKA {budget}" if budget else name
        rows.append(Row(shape, length, "float32", method, budget, 1e3 * value, ratio, model, ratio / model))
    return rows
