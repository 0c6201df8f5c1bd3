"""Every op against float64 on fresh random inputs, with whatever implementation serves them on this device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.page_attention import op as attention_op
from quest_jax.pallas_kernels.page_scores import op as scores_op
from quest_jax.pallas_kernels.pages import pool_shape, stored_head_dim
from quest_jax.policies.quest import Quest

TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3, "float16": 2e-3}
PAGES = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """K KV heads, G heads a group, D head dim, S page size, lengths of the rows; all caches hold 64 pages a row."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    lengths: tuple[int, ...]
    dtype: str = "bfloat16"
    table: bool = False


SHAPES = (
    Shape(2, 4, 128, 16, (1000, 17, 0)),
    Shape(3, 3, 64, 16, (511, 512), table=True),
    Shape(1, 1, 64, 32, (1,)),
    Shape(2, 7, 128, 16, (1024, 255), "float16"),
    Shape(2, 8, 128, 64, (4000,), table=True),
    Shape(2, 2, 256, 16, (333,)),
    Shape(2, 2, 128, 128, (8000,)),
    Shape(2, 5, 96, 16, (700,)),  # stored as 128 on an accelerator
    Shape(2, 4, 128, 8, (500, 3)),
)
DRY_RUN = SHAPES[:2]


def check_all(seed: int, shapes: Sequence[Shape], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns, per op and shape, the implementation that ran, its largest relative error, and whether it passed.

    The error is None where infinite or NaN elements stand in other places than they should.
    """
    found = []
    for number, shape in enumerate(shapes):
        for one in check(shape, np.random.default_rng([seed, number])):
            found.append(one | {"case": f"{one['op']} {shape}"})
            verdict = "ok" if one["passed"] else "WRONG"
            say(f"{verdict}: error {one['error']}, {one['implementation']}, {found[-1]['case']}")
    return found


def check(shape: Shape, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Runs append, dense attention, scores, selection and attention over it on one shape."""
    rows, capacity = len(shape.lengths), PAGES * shape.page_size
    sizes = (rows, capacity, shape.kv_heads, shape.head_dim)
    keys, values = (jnp.asarray(rng.normal(size=sizes), shape.dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(rows, 1, shape.kv_heads * shape.group, shape.head_dim)), shape.dtype)
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    table = None
    if shape.table:
        table = jnp.asarray(rng.permutation(rows * PAGES).reshape(rows, PAGES), jnp.int32)
    # Memory past the tokens holds NaN, which must not leak.
    kv, meta = (jnp.full(one.shape, jnp.nan, one.dtype) for one in _pool(shape))
    append, score, select, dense, sparse = (jax.jit(one) for one in programs(shape))
    kv, meta = append(kv, meta, keys, values, jnp.zeros(rows, jnp.int32), lengths, table)
    starts = jnp.maximum(lengths - 1, 0)
    scores = score(q, meta, lengths)
    selection = select(scores, lengths)
    whole = dense(q, kv, starts, lengths, table)
    read_by_list = sparse(q, kv, starts, lengths, table, *selection)

    attention_name = _name(attention_op.IMPLEMENTATIONS, kv, shape, None)
    scores_name = _name(scores_op.IMPLEMENTATIONS, kv, shape, PAGES)
    exact = np.stack([np.asarray(x, np.float64) for x in (keys, values)])
    q64 = np.asarray(q, np.float64)[:, 0]
    seen = np.arange(capacity) < np.asarray(shape.lengths)[:, None]
    listed = np.zeros((rows, shape.kv_heads, PAGES), bool)
    for row, one in np.ndindex(listed.shape[:2]):
        listed[row, one, np.asarray(selection.pages)[row, one, : np.asarray(selection.counts)[row, one]]] = True
    everything = np.broadcast_to(seen[:, None], (rows, shape.kv_heads, capacity))
    read = everything & np.repeat(listed, shape.page_size, axis=-1)
    ranked = scores_float64(q64, exact[0], seen, shape)
    tolerance = TOLERANCE[shape.dtype]
    return [
        _result("dense", attention_name, whole[0][:, 0], attend(q64, exact[0], exact[1], everything), tolerance),
        _result("scores", scores_name, scores, ranked, TOLERANCE["float32"]),
        _result("selected scores", scores_name, *_selected(ranked, selection), 1e-5),
        _result("sparse", attention_name, read_by_list[0][:, 0], attend(q64, exact[0], exact[1], read), tolerance),
    ]


def programs(shape: Shape) -> tuple[Callable, ...]:
    """The functions that are compiled: append, score, select, dense attention, attention over lists."""
    # The mean is in the kernel; a softmax over pages, the default, would hide how far its scores are off.
    policy = Quest(budget=16 * shape.page_size, dense_layers=0, reduce="mean")

    def score(q, meta, lengths):
        return policy.score(q[:, 0], meta, lengths, shape.page_size, None)

    def select(scores, lengths):
        return policy.select(scores, lengths, shape.page_size)

    def dense(q, kv, starts, lengths, table):
        return attention_op.page_attention(q, kv, starts, lengths, table)

    def sparse(q, kv, starts, lengths, table, pages, counts):
        return attention_op.page_attention(q, kv, starts, lengths, table, pages=pages, counts=counts)

    return append, score, select, dense, sparse


def _pool(shape: Shape) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Pool and metadata with the rows that ``init_cache`` makes on the current target."""
    rows = len(shape.lengths)
    width = 2 * stored_head_dim(shape.head_dim, "fused", dispatch.current_target().platform)
    kv = jax.ShapeDtypeStruct((shape.kv_heads, rows * PAGES, shape.page_size, width), shape.dtype)
    return kv, jax.ShapeDtypeStruct((rows, shape.kv_heads, PAGES, width), jnp.float32)


def abstract_programs(shape: Shape) -> list[tuple[str, Callable, tuple[Any, ...]]]:
    """Name, function and abstract arguments of :func:`programs`, to compile them for a device that is not here."""
    rows, (kv, meta) = len(shape.lengths), _pool(shape)
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    table = jax.ShapeDtypeStruct((rows, PAGES), jnp.int32) if shape.table else None
    new = jax.ShapeDtypeStruct((rows, PAGES * shape.page_size, shape.kv_heads, shape.head_dim), shape.dtype)
    q = jax.ShapeDtypeStruct((rows, 1, shape.kv_heads * shape.group, shape.head_dim), shape.dtype)
    append, score, select, dense, sparse = programs(shape)
    scores = jax.eval_shape(score, q, meta, ints)
    return [
        ("append", append, (kv, meta, new, new, ints, ints, table)),
        ("score", score, (q, meta, ints)),
        ("select", select, (scores, ints)),
        ("dense", dense, (q, kv, ints, ints, table)),
        ("sparse", sparse, (q, kv, ints, ints, table, *jax.eval_shape(select, scores, ints))),
    ]


def attend(q, keys, values, read):
    """Softmax attention ``[B, H, D]`` over the tokens where ``read [B, K, L]``, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[1] // read.shape[1]
    for row, head in np.ndindex(q.shape[:2]):
        one = head // group
        at = read[row, one]
        if at.any():
            logits = keys[row, at, one] @ q[row, head] / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            out[row, head] = weights @ values[row, at, one] / weights.sum()
    return out


def scores_float64(q, keys, seen, shape: Shape):
    """Mean over the group of the scores of Quest's shrunk box, ``[B, K, P]``, in float64."""
    beta = Quest(budget=shape.page_size).beta
    found = np.full((len(q), shape.kv_heads, PAGES), -np.inf)
    for row, one, page in np.ndindex(found.shape):
        tokens = slice(page * shape.page_size, (page + 1) * shape.page_size)
        real = keys[row, tokens, one][seen[row, tokens]]
        if len(real):
            own = q[row, one * shape.group : (one + 1) * shape.group]
            low, high = real.min(axis=0), real.max(axis=0)
            found[row, one, page] = (own * (low + high) + beta * np.abs(own) * (high - low)).sum(-1).mean() / 2
    return found


def _selected(ranked, selection):
    """Scores of the selected pages and the best that there are, sorted: which of two equal pages is taken is free."""
    pages, counts = (np.asarray(x) for x in selection)
    got, best = np.zeros(pages.shape), np.zeros(pages.shape)
    for row, one in np.ndindex(pages.shape[:2]):
        count, order = counts[row, one], ranked[row, one].copy()
        used = int(np.isfinite(order).sum())
        if used:
            order[[0, used - 1]] = np.inf  # the sink and the current page are always read
        taken = pages[row, one, :count]
        got[row, one, :count] = np.sort(np.where(np.isinf(order[taken]), 0, order[taken]))
        best[row, one, :count] = np.sort(np.where(np.isinf(top := np.sort(order)[::-1][:count]), 0, top))
    return got, best


def _result(op, implementation, got, expected, tolerance):
    got = np.asarray(got, np.float64)
    finite = np.isfinite(expected)
    same_pattern = bool((np.isfinite(got) == finite).all())
    scale = np.abs(expected[finite]).max(initial=1.0)
    error = float(np.abs(got[finite] - expected[finite]).max(initial=0.0) / scale) if same_pattern else None
    passed = error is not None and error <= tolerance
    return {"op": op, "implementation": implementation, "error": error, "passed": passed}


def _name(implementations, kv, shape: Shape, pages: int | None) -> str:
    dtype = kv.dtype if pages is None else jnp.float32
    call = dispatch.describe_call(pool_shape(kv), dtype, "fused", shape.kv_heads * shape.group, pages=pages)
    return dispatch.resolve("op", implementations, call, None).name
