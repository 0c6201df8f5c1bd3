"""What reading a prompt costs: one chunk's attention in one layer, and a whole prompt, dense against QuoKA."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from quest_jax.attention import attend, extend, init_attention
from quest_jax.bench.rows import Method, Row, make_rows
from quest_jax.bench.sizes import SHAPES, SMOLLM2, Shape, shape_of
from quest_jax.bench.timing import Timing, time_interleaved
from quest_jax.decode import prefill
from quest_jax.params import Params, random_params
from quest_jax.policies.quoka import QuoKA

_BLOCK = 1024


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


def attention_rows(shape_name: str, length: int, policy: QuoKA, rounds: int) -> list[Row]:
    """Times the last chunk of a context in one layer: append, score, select, attend; float32, batch 1.

    Args:
      shape_name: of ``SHAPES``.
      length: tokens of context, the chunk's included; a multiple of 1024.
      policy: what is compared with dense attention.
      rounds: runs of each.
    """
    shape = SHAPES[shape_name]
    timings = time_interleaved(_attention_calls(shape, length, policy), rounds)
    methods = _methods(policy, *_operations(shape, length, policy))
    return make_rows(shape_name, length, "float32", timings, methods, operations=True)


def prompt_rows(length: int, policy: QuoKA, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """Times a whole prompt of a SmolLM2-shaped model with random weights, from the first chunk to the first logits.

    Dense attention reads chunks of 256, its default, QuoKA those of its own. The model counts the attention's
    operations with everything else left out, so that no ratio can reach it.

    Args:
      length: of the prompt, a multiple of 1024.
      policy: what is compared with dense attention.
      rounds: runs of each.
      progress: told what is done.
    """
    params = random_params(SMOLLM2)
    prompt = [i % 1000 for i in range(length)]
    timings = time_prompts(params, prompt, policy, rounds, progress)
    methods = _methods(policy, *prompt_operations(params, length, policy))
    return make_rows("smollm2 prompt", length, "float32", timings, methods, operations=True)


def time_prompts(
    params: Params, prompt: Sequence[int], policy: QuoKA, rounds: int, progress: Callable[[str], None]
) -> dict[str, Timing]:
    """Times reading a prompt, dense and by ``policy``, compiling apart, by reading a first chunk twice."""
    options: dict[str, dict] = {"dense": {}, "quoka": {"prefill_policy": policy}}

    def read(name, tokens):
        start = time.perf_counter()
        logits = prefill(params, [tokens], capacity=len(prompt), **options[name]).logits
        jax.block_until_ready(logits)
        return time.perf_counter() - start

    def run(name):
        progress(f"a prompt of {len(prompt)} tokens, {name}")
        read(name, prompt)

    compiling = {}
    for name in options:
        progress(f"compiling for {len(prompt)} tokens, {name}")
        first, again = (read(name, prompt[:256]) for _ in range(2))
        compiling[name] = max(0.0, first - again)
    timings = time_interleaved({name: functools.partial(run, name) for name in options}, rounds, warm=True)
    return {name: timing._replace(compile=compiling[name]) for name, timing in timings.items()}


def prompt_operations(params: Params, length: int, policy: QuoKA) -> tuple[float, float]:
    """Multiplications with keys and values for a prompt in one layer: dense, and by the policy."""
    shape = shape_of(params.config)
    ends = range(policy.chunk, length + 1, policy.chunk)
    dense, ours = (sum(work) for work in zip(*(_operations(shape, end, policy) for end in ends), strict=True))
    return dense, ours


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
    jax.block_until_ready((states, plain))  # arrays are made in the background
    return {
        "plain": lambda: blocked_attention(q[0], *plain, length - chunk),
        "dense": lambda: run("dense"),
        "quoka": lambda: run("quoka"),
    }


def _operations(shape: Shape, length: int, policy: QuoKA) -> tuple[float, float]:
    """Multiplications with keys and values for the chunk that ends at ``length``: dense, and by the policy."""
    past = length - policy.chunk
    dense = 2.0 * shape.heads * policy.chunk * length * shape.head_dim
    if past <= policy.budget:
        return dense, dense
    choosing = shape.heads if policy.group == "each" else shape.kv_heads
    scoring = choosing * policy.n_queries * past * shape.head_dim
    return dense, scoring + dense * (policy.budget + policy.chunk) / length


def _methods(policy: QuoKA, dense: float, ours: float) -> dict[str, Method]:
    return {
        "plain": Method("dense, plain arrays", None, dense),
        "dense": Method("dense", None, dense),
        "quoka": Method(f"QuoKA {policy.budget}", policy.budget, ours),
    }
