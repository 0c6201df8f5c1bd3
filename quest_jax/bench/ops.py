"""Where the attention of a decode step goes: every op of it alone, with the bytes that it must move."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quest_jax.bench.decode import filled, paged_calls
from quest_jax.bench.rows import Method, Row, make_rows
from quest_jax.bench.sizes import SHAPES, Shape, dense_bytes, metadata_bytes, quest_bytes
from quest_jax.bench.timing import time_interleaved
from quest_jax.memory import check_memory
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.pages import gather_pages
from quest_jax.policies.base import Dense
from quest_jax.policies.quest import Quest


def op_rows(shape_name: str, length: int, dtype: str, budget: int, rounds: int) -> list[Row]:
    """Times the ops of one layer's decode attention one by one, and all of it, batch 1.

    A row's ratio is the time of all of dense attention over that of the op. The bytes: for ``append`` a page of keys,
    whose minimum and maximum it takes, and what it writes; all metadata; all scores; the listed pages; all pages.

    Args:
      shape_name: of ``SHAPES``.
      length: tokens of context, a multiple of the page size, more than the budget.
      dtype: of keys and values.
      budget: tokens that Quest reads.
      rounds: runs of each.

    Raises:
      MemoryError: the arrays do not fit.
    """
    shape = SHAPES[shape_name]
    needed = 2 * (dense_bytes(shape, length, dtype) + metadata_bytes(shape, length))
    check_memory(needed, 0, f"the ops of {shape_name} at {length} tokens", "take fewer --lengths or --shapes")
    policy = Quest(budget, dense_layers=0)
    calls = _op_calls(shape, length, dtype, policy)
    whole = paged_calls(shape, length, dtype, {"all, Quest": policy, "all, dense": Dense()})
    timings = time_interleaved(calls | whole, rounds)
    methods = _methods(shape, length, dtype, budget)
    return make_rows(shape_name, length, dtype, timings, methods, yardstick=("all, dense",))


def _op_calls(shape: Shape, length: int, dtype: str, policy: Quest) -> dict[str, Callable[[], object]]:
    state = filled(shape, length, dtype)
    page_size, meta = state.cache.page_size, state.cache.meta[0]
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 1, heads, shape.head_dim), dtype)
        for i, heads in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
    )
    ends = jnp.array([length], jnp.int32)
    starts = ends - 1
    score = jax.jit(lambda q, meta: policy.score(q[:, 0], meta, ends, page_size, None))
    select = jax.jit(lambda scores: policy.select(scores, ends, page_size))
    write = jax.jit(lambda kv, meta: append(kv, meta, k, v, starts, ends), donate_argnums=(0, 1))
    attend = jax.jit(lambda q, kv: page_attention(q, kv, starts, ends)[0])
    attend_listed = jax.jit(
        lambda q, kv, listed: page_attention(q, kv, starts, ends, pages=listed.pages, counts=listed.counts)[0]
    )
    # What XLA does before it multiplies: how fast attention to listed pages could be at best.
    heads = jnp.arange(shape.kv_heads)[:, None]
    copy = jax.jit(lambda kv, listed: gather_pages(kv, *jnp.broadcast_arrays(heads, listed.pages[0])))
    scores = score(q, meta)
    listed = select(scores)
    written = state.cache.kv[0], meta

    def run_append():
        nonlocal written
        written = write(*written)
        return written

    # The cache belongs to `append`, which gives it back in place; the others read what it holds at the time.
    return {
        "append": run_append,
        "page_scores": lambda: score(q, written[1]),
        "select": lambda: select(scores),
        "copy of the listed pages": lambda: copy(written[0], listed),
        "page_attention, listed": lambda: attend_listed(q, written[0], listed),
        "page_attention, dense": lambda: attend(q, written[0]),
    }


def _methods(shape: Shape, length: int, dtype: str, budget: int) -> dict[str, Method]:
    dense, scored = dense_bytes(shape, length, dtype), metadata_bytes(shape, length)
    page = dense_bytes(shape, 16, dtype) // 2  # its keys, for their minimum and maximum
    works = {
        "append": (budget, page + dense_bytes(shape, 1, dtype) + metadata_bytes(shape, 16)),
        "page_scores": (budget, scored),
        "select": (budget, shape.kv_heads * length // 16 * 4),
        "copy of the listed pages": (budget, dense_bytes(shape, budget, dtype)),
        "page_attention, listed": (budget, dense_bytes(shape, budget, dtype)),
        "page_attention, dense": (None, dense),
        "all, Quest": (budget, quest_bytes(shape, length, dtype, budget)),
        "all, dense": (None, dense),
    }
    return {name: Method(name, *work) for name, work in works.items()}
