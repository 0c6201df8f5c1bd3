"""The TPU kernels in interpret mode against the float64 references of the ops, in poisoned memory, looking for races.

Interpretation says that the numbers and the copies are right, not that the kernel compiles: see ``tests/aot``.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from quest_jax.pallas_kernels.append import tpu as append
from quest_jax.pallas_kernels.metadata import decode, encode
from quest_jax.pallas_kernels.page_attention import tpu as page_attention
from quest_jax.pallas_kernels.page_scores import tpu as page_scores
from quest_jax.pallas_kernels.page_scores.op import page_scores as page_scores_op
from quest_jax.pallas_kernels.pages import pad_head_dim
from quest_jax.pallas_kernels.token_scores import tpu as token_scores
from tests.pallas_kernels import test_page_attention, test_page_scores
from tests.pallas_kernels.cases import (
    CASES,
    TOLERANCE,
    Case,
    empty_pool,
    fill,
    queries,
    sees_nan_key,
    with_nan_key,
)

# Minutes of interpretation: on the newest JAX only, in .ci/run.
pytestmark = pytest.mark.slow
PLAIN = pltpu.InterpretParams(uninitialized_memory="nan")
RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# What the kernels serve, of the shared table and beyond it. Each costs seconds of compilation, so the sizes are mixed.
SERVED = [
    *[c for c in CASES if c.layout == "fused" and 2 * c.stored % 128 == 0 and c.dtype != "float16"],
    Case(layout="fused", group=4, head_dim=256, lengths=(15, 32)),
    Case(layout="fused", group=7, head_dim=128, page_size=8),
    Case(layout="fused", group=8, dtype="bfloat16", page_size=8, head_dim=128, lengths=(128, 15)),
    Case(layout="fused", group=16, dtype="bfloat16", page_size=32, kv_heads=1),
    Case(layout="fused", group=3, page_size=64, kv_heads=3),
    Case(layout="fused", page_size=128, capacity=256, lengths=(128, 129, 255)),
    Case(layout="fused", dtype="bfloat16", layers=2, table=True, lengths=(33, 128), head_dim=128),
    Case(layout="fused", capacity=2560, lengths=(2048, 1500, 2559), page_size=32),
]
fill = functools.cache(fill)


def jit(function):
    """Interpreted kernels are large programs that run for milliseconds: compile them without optimisation."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def lists_of(case, per_head, seed=3):
    """Page lists in any order, the partial page anywhere, and dead entries that repeat a live page."""
    rng = np.random.default_rng(seed)
    lists, width = case.heads if per_head else case.kv_heads, min(5, case.pages)
    pages = np.zeros((len(case.lengths), lists, width), np.int32)
    counts = np.zeros((len(case.lengths), lists), np.int32)
    for row, length in enumerate(case.lengths):
        used = -(-length // case.page_size)
        for one in range(lists):
            counts[row, one] = rng.integers(0, min(width, used) + 1)
            pages[row, one, : counts[row, one]] = rng.permutation(used)[: counts[row, one]]
            pages[row, one, counts[row, one] :] = rng.integers(0, case.pages, width - counts[row, one])
    return jnp.asarray(pages), jnp.asarray(counts)


def attend(case, tokens, pages=None, counts=None, **options):
    """Runs the kernel and holds it against float64."""
    filled, q = fill(case), queries(case, tokens)
    starts = jnp.maximum(filled.lengths - tokens, 0)

    def run(q, kv):
        out, lse = page_attention.page_attention(
            pad_head_dim(q, case.stored), kv, starts, filled.lengths, filled.table,
            pages=pages, counts=counts, layer=case.layer, scale=case.head_dim**-0.5, **{"interpret": PLAIN} | options,
        )  # fmt: skip
        return out[..., : case.head_dim], lse

    got = jit(run)(q, filled.kv)
    assert got[0].dtype == q.dtype
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts, pages, counts))
    return got


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_dense_decode(case):
    attend(case, 1)


@pytest.mark.parametrize("case", [case for case in SERVED if min(case.lengths) >= 11], ids=str)
def test_dense_chunk_is_causal(case):
    attend(case, 11, tile_rows=4 * case.group, block_tokens=64)


@pytest.mark.parametrize(("case", "per_head"), [(case, i % 2 == 1) for i, case in enumerate(SERVED)], ids=str)
def test_listed_pages(case, per_head):
    attend(case, 1, *lists_of(case, per_head))


def test_listed_pages_for_several_queries_are_causal():
    case = Case(layout="fused", lengths=(60, 37))
    pages = jnp.broadcast_to(jnp.array([[[0, 2, 3]], [[0, 1, 2]]], jnp.int32), (2, 2, 3))
    attend(case, 5, pages, jnp.full((2, 2), 3, jnp.int32))


@pytest.mark.parametrize("block_tokens", [16, 48])
def test_a_list_of_many_blocks(block_tokens):
    case = Case(layout="fused", lengths=(128, 100, 0, 17), table=True)
    attend(case, 1, *lists_of(case, False), block_tokens=block_tokens)
    attend(case, 1, block_tokens=block_tokens)


@pytest.mark.parametrize("poison", [np.inf, -np.inf])
def test_unused_memory_does_not_leak(poison):
    case = Case(layout="fused", lengths=(33, 96))
    q, clean, dirty = queries(case, 1), fill(case, poison=0.0), fill(case, poison=poison)

    def run(q, kv):
        return page_attention.page_attention(
            q, kv, clean.lengths - 1, clean.lengths, None,
            pages=None, counts=None, layer=None, scale=0.125, interpret=PLAIN,
        )  # fmt: skip

    for expected, got in zip(jit(run)(q, clean.kv), jit(run)(q, dirty.kv), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("head_dim", [64, 128])  # keys cut out of their pages, or not
@pytest.mark.parametrize(("tokens", "listed"), [(1, False), (9, False), (1, True)])
def test_nan_in_a_real_key_shows_exactly_where_it_is_seen(head_dim, tokens, listed):
    case = Case(layout="fused", lengths=(33, 40), head_dim=head_dim)
    filled, q = fill(case), queries(case, tokens)
    starts = jnp.array([0 if tokens > 1 else 32, 31])  # row 0: the first five queries of a chunk stand before the key
    pages = counts = None
    if listed:  # a list per query head: of those that share the key, the first reads its page, the second does not
        pages = jnp.broadcast_to(jnp.array([[1, 0], [1, 2], [0, 1], [0, 1]], jnp.int32), (2, 4, 2))
        counts = jnp.full((2, 4), 2, jnp.int32)

    def run(q, kv):
        return page_attention.page_attention(
            q, kv, starts, filled.lengths, None,
            pages=pages, counts=counts, layer=None, scale=head_dim**-0.5, block_tokens=16, interpret=PLAIN,
        )  # fmt: skip

    out, lse = (np.isnan(x) for x in jit(run)(q, with_nan_key(filled)))
    expected = sees_nan_key(case, starts, tokens, pages, counts)
    assert expected.any() and not expected[0].all()
    np.testing.assert_array_equal(lse, expected)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[..., None], out.shape))


@pytest.mark.parametrize("case", [
    Case(layout="fused", lengths=(40, 128)),
    Case(layout="fused", lengths=(512, 0, 129, 384), capacity=512, head_dim=128, dtype="bfloat16"),
    Case(layout="fused", lengths=(500,), capacity=512, page_size=8, kv_heads=3, layers=3),
    Case(layout="fused", lengths=(250, 3), capacity=256, page_size=128, head_dim=256),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("weighed", [True, False])
def test_token_scores_equal_the_equation(case, weighed):
    filled, rng = fill(case), np.random.default_rng(0)
    q = rng.normal(size=(len(case.lengths), case.kv_heads, 5, case.head_dim))
    q = np.asarray(jnp.asarray(q, case.dtype), np.float64)
    weights = np.where(np.arange(case.capacity) < 9, np.nan, rng.uniform(size=(len(q), case.kv_heads, case.capacity)))
    weights = weights[..., ::-1].copy()  # what is not there may be NaN
    ends = np.minimum(filled.lengths, case.capacity - 9)

    def run(q, kv):
        return token_scores.token_scores(
            q, kv, jnp.asarray(weights, jnp.float32) if weighed else None, jnp.asarray(ends), None,
            layer=case.layer, block_tokens=128, interpret=PLAIN,
        )  # fmt: skip

    got = np.asarray(jit(run)(jnp.asarray(q, jnp.float32), filled.kv))
    for row, end in enumerate(ends):
        best = np.einsum("krd,lkd->krl", q[row], filled.keys[row, :end]).max(axis=1)
        best = best * weights[row, :, :end] if weighed else best
        np.testing.assert_allclose(got[row, :, :end], best, atol=TOLERANCE["float32"] * 20 * case.head_dim**0.5)
        assert np.isneginf(got[row, :, end:]).all()


REDUCTIONS = [("mean", 1.0), ("max", 0.5), ("none", 1.0), ("mean", 0.5)]


@pytest.mark.parametrize(
    ("case", "reduce", "beta"), [(case, *REDUCTIONS[i % 4]) for i, case in enumerate(SERVED)], ids=str
)
def test_scores_equal_the_equation(case, reduce, beta):
    filled, q = fill(case), queries(case, 1)[:, 0]

    def run(q, meta, lengths):
        return page_scores.page_scores(
            pad_head_dim(q, case.stored), meta, lengths, page_size=case.page_size, reduce=reduce, beta=beta,
            layer=case.layer, block_pages=128, interpret=PLAIN,
        )  # fmt: skip

    got = jit(run)(q, filled.meta, filled.lengths)
    expected = test_page_scores.reference(case, q, filled, reduce, beta)
    live = np.isfinite(expected)
    np.testing.assert_array_equal(np.isneginf(got), ~live)
    scale = np.abs(expected[live]).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(got)[live] / scale, expected[live] / scale, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("case", [Case(layout="fused", head_dim=128, lengths=(40, 128)), Case(
    layout="fused", capacity=2560, page_size=8, lengths=(2048, 1500, 0), layers=2)], ids=str)  # fmt: skip
def test_scores_of_bfloat16_metadata_are_those_of_what_it_decodes_to(case):
    filled, q = fill(case), queries(case, 1)[:, 0]
    low, high = jnp.split(filled.meta, 2, axis=-1)
    meta = encode(low, high, "bfloat16")
    options = dict(page_size=case.page_size, reduce="mean", beta=0.5, layer=case.layer)

    def run(q, meta, lengths):
        return page_scores.page_scores(q, meta, lengths, **options, block_pages=128, interpret=PLAIN)

    got = np.asarray(jit(run)(q, meta, filled.lengths))
    expected = np.asarray(page_scores_op(q, decode(meta), filled.lengths, **options))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    live = np.isfinite(expected)
    np.testing.assert_allclose(got[live], expected[live], rtol=1e-5, atol=1e-5)


def test_blocks_of_scores_past_the_length_are_skipped_and_the_last_block_may_be_ragged():
    case = Case(layout="fused", capacity=2240, page_size=8, lengths=(2240, 1000, 1025, 0))  # 280 pages: 128, 128, 24
    test_scores_equal_the_equation(case, "mean", 1.0)


def writer(case, table, **options):
    """The kernel as a function of pool, metadata, new tokens, starts and ends; compiled once per number of tokens."""

    def run(kv, meta, keys, values, starts, ends):
        return append.append(
            kv, meta, keys, values, starts, ends, table, layer=case.layer, **{"interpret": PLAIN} | options
        )

    compiled = jit(run)
    return lambda *arrays, starts, ends: compiled(*arrays, jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32))


def tokens_of(case, filled, starts, n):
    """Keys and values of ``n`` tokens of every row, from ``starts`` on."""
    at = np.minimum(np.asarray(starts)[:, None] + np.arange(n), case.capacity - 1)[..., None, None]
    new = (jnp.asarray(np.take_along_axis(x, at, 1), case.dtype) for x in (filled.keys, filled.values))
    return tuple(pad_head_dim(x, case.stored) for x in new)


def assert_same_bits(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # numpy finds two NaN equal in float32, not in bfloat16.
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("case", [case for case in SERVED if case.pages % 8 == 0], ids=str)
def test_append_writes_the_bits_of_the_reference(case):
    """What the reference writes is held against float64 in test_append.py."""

    def reference(lengths):
        filled = fill(dataclasses.replace(case, lengths=tuple(int(n) for n in lengths)))
        return filled.kv, filled.meta

    whole = fill(case)
    at = np.minimum(case.lengths, np.arange(len(case.lengths)) * 5 + 11)
    got, write = reference(at), writer(case, whole.table)
    for n in (19, 1, 1):  # over the end of a page, then single tokens
        ends = np.minimum(at + n, case.lengths)
        got = write(*got, *tokens_of(case, whole, at, n), starts=at, ends=ends)
        at = ends
    assert_same_bits(got, reference(at))


def test_append_leaves_idle_rows_padding_and_a_full_row_alone():
    case = Case(layout="fused", lengths=(40, 40, 128, 0))
    filled = fill(case)
    new = jnp.ones((4, 4, case.kv_heads, case.head_dim))
    # Row 0 is idle, row 1 has two padding tokens, row 2 is full, row 3 is empty and its table names row 1's pages.
    table = jnp.asarray([*range(24), *range(8, 16)], jnp.int32).reshape(4, 8)
    write = writer(case, table)
    kv, meta = write(filled.kv, filled.meta, new, new, starts=[40, 40, 128, 0], ends=[40, 42, 132, 0])
    np.testing.assert_array_equal(meta[jnp.array([0, 2, 3])], filled.meta[jnp.array([0, 2, 3])])
    written = np.asarray(kv) != np.asarray(filled.kv)
    written &= ~np.isnan(np.asarray(kv))
    assert {tuple(at[1:3]) for at in np.argwhere(written)} == {(10, 8), (10, 9)}


@pytest.fixture
def has_race(capfd):
    """Says whether the interpreter reports a race while a function runs: JAX 0.12 raises, 0.11 prints."""

    def run(function):
        try:
            jax.block_until_ready(function())
        except jax.errors.JaxRuntimeError as error:
            if "race" not in str(error).lower():
                raise
            return True
        return "RACE DETECTED" in "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("case", "tokens", "listed"),
    [
        (Case(layout="fused", lengths=(33, 0), table=True, dtype="bfloat16"), 1, True),
        (Case(layout="fused", lengths=(70, 20), head_dim=128, kv_heads=1), 5, False),
        (Case(layout="fused", lengths=(100,), group=3, layers=2), 1, False),
    ],
    ids=str,
)
def test_attention_has_no_race(case, tokens, listed, has_race):
    lists = lists_of(case, False) if listed else ()
    assert not has_race(lambda: attend(case, tokens, *lists, interpret=RACES, block_tokens=32))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("case", "tokens", "listed"),
    [
        (Case(layout="fused", lengths=(33, 0), table=True, dtype="bfloat16"), 1, True),
        (Case(layout="fused", lengths=(70, 20, 128), group=3), 5, False),
    ],
    ids=str,
)
def test_two_cores_share_the_items_without_a_race(case, tokens, listed, seed, has_race):
    """As on v4 and v5p: each core has the first block, the buffers and the turn to itself, its items in order."""
    visited = {0: [], 1: []}

    def record(*call):
        *token, at, core = call  # JAX 0.12 threads a token through
        visited[int(core)].append(tuple(map(int, at)))
        return token[0] if token else None

    two = dataclasses.replace(RACES, num_cores_or_threads=2, random_seed=seed, grid_point_recorder=record)
    lists = lists_of(case, False) if listed else ()
    options = {"cores": 2, "block_tokens": 32, "tile_rows": 2 * case.group}
    assert not has_race(lambda: attend(case, tokens, *lists, interpret=two, **options))
    tiles = -(-tokens // 2)
    steps = len(case.lengths) * case.kv_heads * tiles // 2
    assert sorted(visited.values()) == [[(core, step) for step in range(steps)] for core in (0, 1)]


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (Case(layout="fused", lengths=(33, 0, 17, 16), table=True, dtype="bfloat16"), 1),
        (Case(layout="fused", lengths=(40, 128), head_dim=128), 19),
        (Case(layout="fused", lengths=(20, 9), layers=2), 3),
    ],
    ids=str,
)
def test_append_has_no_race(case, tokens, has_race):
    filled = fill(case)
    starts = np.maximum(np.asarray(case.lengths) - tokens, 0)
    new = tokens_of(case, filled, starts, tokens)
    for step_rows in (1, len(case.lengths)):
        write = writer(case, filled.table, interpret=RACES, step_rows=step_rows, step_heads=1)

        def check(write=write):
            again = write(filled.kv, filled.meta, *new, starts=starts, ends=case.lengths)
            assert_same_bits(again, (filled.kv, filled.meta))

        assert not has_race(check)


@pytest.fixture
def impatient(monkeypatch):
    """Plants a race: every copy is started when the kernel says so, and none is waited for."""
    make = pltpu.make_async_copy

    def make_impatient(source, target, semaphore):
        return types.SimpleNamespace(start=make(source, target, semaphore).start, wait=lambda: None)

    monkeypatch.setattr(pltpu, "make_async_copy", make_impatient)
    return dataclasses.replace(RACES, dma_execution_mode="eager")


def test_attending_a_block_before_it_has_arrived_is_seen(impatient, has_race):
    """Planted on one core: with two, JAX 0.12's interpreter waits forever for the core that did not raise."""
    assert has_race(lambda: attend(Case(layout="fused"), 1, interpret=impatient))


def test_changing_a_page_before_it_has_arrived_is_seen(impatient, has_race):
    """Two rows that own the same page are a race too, which the detector does not see: an op's contract excludes it."""
    case = Case(layout="fused")
    new = jnp.ones((1, 1, case.kv_heads, case.head_dim))
    write = writer(case, None, interpret=impatient)
    assert has_race(lambda: write(*empty_pool(case), new, new, starts=[19], ends=[20]))
