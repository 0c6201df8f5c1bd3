"""What a decode step costs: the attention of one layer, and a whole model against the capacity of its cache."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from quest_jax.attention import AttentionState, attend, extend, init_attention
from quest_jax.bench import baselines
from quest_jax.bench.rows import Method, Row, make_rows
from quest_jax.bench.sizes import (
    SHAPES,
    Shape,
    dense_bytes,
    metadata_bytes,
    quest_bytes,
    step_bytes,
    two_level_bytes,
)
from quest_jax.bench.timing import time_interleaved
from quest_jax.cache import rebuild_blocks, rebuild_metadata
from quest_jax.decode import DecodeState, decode_step, prefill, replace_policy
from quest_jax.memory import check_memory
from quest_jax.params import Params
from quest_jax.policies.base import Dense, Policy
from quest_jax.policies.cost import break_even
from quest_jax.policies.quest import Quest

METHODS = {
    "split": "split32",
    "grouped": "grouped einsum",
    "paged": "paged dense",
    "quest": "Quest",
    "two-level": "Quest on two levels",
    "auto": "the library's choice",
    "dot-product": "jax.nn.dot_product_attention",
    "torch": "torch SDPA",
}
"""Methods by the name that chooses them, and what the tables call them; at the end what disturbs its successor."""

_PLAIN = ("split", "grouped", "dot-product", "torch")  # over arrays of keys and values, not pages

TRANSPOSES = (
    "jax.nn.dot_product_attention takes token-major keys and values and transposes both at every call: it is here "
    "because it is what one would try first, not as the yardstick."
)


def filled(shape: Shape, length: int, dtype: str = "float32", policy: Policy | None = None) -> AttentionState:
    """State of one layer whose cache holds ``length`` random tokens and what ``policy`` keeps; room for 512 more."""
    state = init_attention(
        1, shape.kv_heads, shape.head_dim, batch=1, capacity=length + 512, dtype=dtype, policy=policy or Dense()
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def fill(key, leaf):
        # Head by head: random numbers take several times their own bytes to make.
        made = jax.lax.map(
            lambda one: jax.random.normal(one, leaf.shape[1:], leaf.dtype), jax.random.split(key, len(leaf))
        )
        return leaf.at[:].set(made)

    leaves, structure = jax.tree.flatten(state.cache.kv)
    leaves = [
        fill(key, leaf) for key, leaf in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves, strict=True)
    ]
    cache = state.cache.replace(kv=jax.tree.unflatten(structure, leaves), lengths=jnp.array([length], jnp.int32))
    cache = cache.replace(meta=jax.jit(rebuild_metadata)(cache))
    return jax.block_until_ready(state.replace(cache=cache.replace(blocks=jax.jit(rebuild_blocks)(cache))))


def attention_rows(
    shape_name: str, length: int, dtype: str, budget: int, rounds: int, methods: Sequence[str] = tuple(METHODS)
) -> list[Row]:
    """Times one layer's decode attention at one length of context, by every method, batch 1.

    The paged methods append the token too. The last token is written anew each time, so that every run reads the same.

    Args:
      shape_name: of ``SHAPES``.
      length: tokens of context, a multiple of 32.
      dtype: of keys and values.
      budget: tokens that Quest reads.
      rounds: runs of each.
      methods: of ``METHODS``.

    Raises:
      MemoryError: the arrays do not fit, before any is made.
      ImportError: a method needs a package that is not installed.
      ValueError: no dense method among them.
    """
    shape = SHAPES[shape_name]
    cache = dense_bytes(shape, length, dtype)
    # Paged, plain, token-major and what that is transposed to; a quarter more to make them.
    needed = cache * (1 + any(name in _PLAIN for name in methods) + 2 * ("dot-product" in methods))
    needed = int(1.25 * (needed + metadata_bytes(shape, length)))
    check_memory(needed, 0, f"decode attention of {shape_name} at {length} tokens", "take fewer --lengths or --shapes")
    calls = _attention_calls(shape, length, dtype, budget, methods)
    chosen = quest_bytes(shape, length, dtype, budget)
    works = {name: Method(METHODS[name], None, cache) for name in methods}
    works |= {
        "quest": Method(f"Quest {budget}", budget, chosen),
        "two-level": Method(
            f"{METHODS['two-level']} {budget}", budget, two_level_bytes(shape, length, dtype, _two_levels(budget))
        ),
        "auto": Method(
            f"budget={budget}, {METHODS['auto']}",
            budget,
            cache if _takes_dense(shape, length, dtype, budget) else chosen,
        ),
    }
    return make_rows(shape_name, length, dtype, time_interleaved(calls, rounds), works)


def _two_levels(budget: int) -> Quest:
    return Quest(budget, dense_layers=0, block_pages=16)


def _takes_dense(shape: Shape, length: int, dtype: str, budget: int) -> bool:
    """Whether a budget makes the library read all of a row of this length."""
    page = jnp.zeros((shape.kv_heads, 1, 16, shape.head_dim), dtype)
    meta = jnp.zeros((1, shape.kv_heads, 1, 2 * shape.head_dim))
    return length < break_even((page, page), meta, budget)


def _attention_calls(
    shape: Shape, length: int, dtype: str, budget: int, methods: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    policies: dict[str, Policy] = {
        "paged": Dense(),
        "quest": Quest(budget, dense_layers=0),
        "two-level": _two_levels(budget),
        "auto": Quest(budget, dense_layers=0, dense_below="auto"),
    }
    calls: dict[str, Callable[[], Any]] = {}
    if any(name in _PLAIN for name in methods):
        calls |= _plain_calls(shape, length, dtype, methods)
    if wanted := {name: policy for name, policy in policies.items() if name in methods}:
        calls |= paged_calls(shape, length, dtype, wanted)
    return {name: calls[name] for name in methods}


def _plain_calls(shape: Shape, length: int, dtype: str, methods: Sequence[str]) -> dict[str, Callable[[], Any]]:
    parts = jax.random.split(jax.random.key(1), 3)
    grouped = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    plain = (shape.kv_heads, length, shape.head_dim)
    q, keys, values = (
        jax.random.normal(part, size, dtype) for part, size in zip(parts, (grouped, plain, plain), strict=True)
    )
    forms: dict[str, tuple[Callable[..., Any], Sequence[jax.Array]]] = {
        "split": (baselines.split_attention, (q, keys, values)),
        "grouped": (baselines.grouped_attention, (q, keys, values)),
    }
    if "dot-product" in methods:
        token_major = (q, keys.swapaxes(0, 1), values.swapaxes(0, 1))
        forms["dot-product"] = baselines.dot_product_attention, token_major
    # Arrays are made in the background; the first run must not wait for them.
    jax.block_until_ready([arrays for _, arrays in forms.values()])
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(form, *arrays) for name, (form, arrays) in forms.items()
    }
    if "torch" in methods:
        calls["torch"] = baselines.torch_attention(q, keys, values)
    return calls


def paged_calls(
    shape: Shape, length: int, dtype: str, policies: dict[str, Policy]
) -> dict[str, Callable[[], jax.Array]]:
    """Calls that append the token at ``length - 1`` and attend to it and all before by a policy, on one cache."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 1, heads, shape.head_dim), dtype)
        for i, heads in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        cache = state.cache.replace(lengths=jnp.full_like(state.cache.lengths, length - 1))
        return attend(0, q, k, v, extend(state.replace(cache=cache), jnp.array([1])))

    # One cache for all: the blocks of two levels are kept, and updated, only where one of them needs them.
    state = filled(shape, length, dtype, max(policies.values(), key=lambda policy: policy.needs_blocks or 0))

    def run(policy):
        nonlocal state
        out, state = step(state.replace(policy=policy))
        return out

    return {name: functools.partial(run, policy) for name, policy in policies.items()}


def step_rows(params: Params, length: int, capacity: int, budget: int, rounds: int) -> list[Row]:
    """Times whole decode steps of a model, dense and with Quest, batch 1.

    Args:
      params: of SmolLM2's shape; random weights will do.
      length: tokens of context, of which 64 are still to come.
      capacity: of the cache, at least ``length``.
      budget: tokens that Quest reads.
      rounds: runs of each.

    Raises:
      MemoryError: the cache does not fit.
    """
    dtype = params.dtype.name
    length, whole = length - 64, length
    # The time does not depend on what the cache holds, so the rest of the context is declared, not computed.
    state = prefill(params, [[1] * 16], capacity=capacity, eos_token_ids=())
    calls = step_calls(params, state, length, {"dense": Dense(), "quest": Quest(budget)})
    methods = {
        "dense": Method("paged dense", None, step_bytes(params, length, None)),
        "quest": Method(f"Quest {budget}", budget, step_bytes(params, length, budget)),
    }
    shape = "smollm2 step" if capacity == whole else f"smollm2 step, room for {capacity}"
    return make_rows(shape, length, dtype, time_interleaved(calls, rounds), methods)


def step_calls(
    params: Params, state: DecodeState, length: int, policies: dict[str, Policy], steps: int = 1
) -> dict[str, Callable[[], jax.Array]]:
    """Calls that decode ``steps`` tokens after the first ``length`` of one cache, by policy; they use ``state`` up."""

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(params, state):
        cache = state.attention.cache.replace(lengths=jnp.full_like(state.lengths, length))
        state = state.replace(attention=state.attention.replace(cache=cache))
        start = state, jnp.zeros(1, jnp.int32)
        return jax.lax.fori_loop(0, steps, lambda _, carry: decode_step(params, carry[0]), start)

    def run(policy):
        nonlocal state
        state, token = decode(params, replace_policy(state, policy=policy))
        return token

    return {name: functools.partial(run, policy) for name, policy in policies.items()}
