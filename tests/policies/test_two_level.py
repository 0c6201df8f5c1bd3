"""Quest on two levels: the blocks it takes against a transcription in NumPy, and when it equals one level."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import LayerView, Quest, init_attention
from quest_jax.pallas_kernels.append.blocks import append_blocks
from quest_jax.pallas_kernels.metadata import Kind, bounds_of, decode, empty_metadata, encode
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.policies.two_level import block_count
from tests.pallas_kernels.cases import Case, fill, queries

BLOCK = 4
CASE = Case(lengths=(1024, 1000, 513, 300, 64, 1), capacity=1024, head_dim=16, group=3)  # 64 pages, 16 blocks


@functools.cache
def view_of(kind="float32", case=CASE, seed=0):
    """The cache of ``case`` after one append, pages near each other alike as those of a text are, and its blocks."""
    filled = fill(case, seed)
    low, high = jnp.split(filled.meta, 2, axis=-1)
    drift = np.random.default_rng(seed).normal(size=low.shape).cumsum(axis=2) / 3
    meta = encode(low + jnp.asarray(drift, jnp.float32), high + jnp.asarray(drift, jnp.float32), kind)
    empty = empty_metadata(len(case.lengths), case.kv_heads, case.pages // BLOCK, case.head_dim, kind)
    starts = jnp.zeros_like(filled.lengths)
    blocks = append_blocks(empty, meta, starts, filled.lengths, tokens=case.capacity, page_size=case.page_size)
    return LayerView(filled.kv, meta, None, filled.lengths - 1, filled.lengths, None, blocks)


def listed(selection):
    """The selected pages, a set for each row and list."""
    pages, counts = (np.asarray(x) for x in selection)
    return [[set(pages[b, n, : counts[b, n]].tolist()) for n in range(pages.shape[1])] for b in range(len(pages))]


REDUCTIONS = ["mean", "max", "round_robin", "per_head"]
VARIANTS = [dict(reduce=reduce) for reduce in REDUCTIONS] + [
    dict(variant="sim"), dict(variant="kernel"), dict(ranking="box"), dict(sink_pages=0), dict(sink_pages=7),
]  # fmt: skip

# Every variant, every kind, and all kinds of the first.
EACH_ONCE = [
    (one, kind) for i, one in enumerate(VARIANTS) for j, kind in enumerate(Kind.__args__) if not i or j == i % 3
]


@pytest.mark.parametrize("kind", Kind.__args__)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_takes_the_best_pages_of_the_best_blocks(options, kind):
    """Of the pages that the rule lets through, what one level takes of a cache in which no other page can score."""
    policy = Quest(64, block_pages=BLOCK, candidates=2, **options)
    view, q = view_of(kind), queries(CASE, 1)
    selection = policy.choose(q, view, None)
    assert (np.diff(np.asarray(selection.pages), axis=-1) >= 0).all() and int(selection.pages.max()) < CASE.pages
    found = listed(selection)

    one_level = Quest(64, **{"reduce": "mean"} | options)
    per_head = policy.variant == "sim" or policy.reduce == "per_head"
    beta = 0.25 if policy.variant == "quest" and policy.ranking is None else 1.0
    in_op = "mean" if policy.reduce in (None, "mean") and not per_head else "max"
    scores = np.array(
        page_scores(q[:, 0], decode(view.blocks), view.lengths, page_size=BLOCK * 16, reduce=in_op, beta=beta)
    )
    count = max(-(-2 * 4 // BLOCK), -(-policy.sink_pages // BLOCK) if policy.variant == "quest" else 0) + 1
    ranks = np.array(one_level.score(q[:, 0], view.meta, view.lengths, 16, None))
    for row, length in enumerate(CASE.lengths):
        used = -(-length // (BLOCK * 16))
        for one in range(ranks.shape[1]):
            own = scores[row, one // (ranks.shape[1] // CASE.kv_heads), :used].copy()
            sinks = -(-policy.sink_pages // BLOCK) if policy.variant == "quest" else 0
            own[:sinks] = np.inf
            own[used - 1] = np.inf
            taken = np.argsort(-own, kind="stable")[:count]
            ranks[row, one, ~np.isin(np.arange(CASE.pages) // BLOCK, taken)] = -np.inf
    if policy.reduce != "round_robin":  # there ranks depend on which pages compete
        expected = listed(one_level.select(jnp.asarray(ranks), view.lengths, 16))
        assert found == expected
    live = np.isfinite(ranks) if policy.reduce != "round_robin" else ranks > -np.inf
    for row, length in enumerate(CASE.lengths):
        for one, pages in enumerate(found[row]):
            assert live[row, one, sorted(pages)].all()
            assert len(pages) == len(listed(one_level.choose(q, view, None))[row][one])
            if policy.variant != "sim":
                assert -(-length // 16) - 1 in pages, "the current page"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kind"), EACH_ONCE, ids=str)
def test_blocks_enough_for_everything_are_one_level(options, kind):
    """Statically, and where the rows are short in a long cache."""
    q, view = queries(CASE, 1), view_of(kind)
    plain = Quest(64, **{"reduce": "mean"} | options)  # one level alone would weigh heads by softmax
    one = plain.choose(q, view, None)
    every = Quest(64, block_pages=BLOCK, candidates=16, **options).choose(q, view, None)
    assert listed(every) == listed(one)
    short = view._replace(lengths=jnp.minimum(view.lengths, 700))
    one = plain.choose(q, short, None)
    two = Quest(64, block_pages=BLOCK, candidates=10, **options)  # 11 blocks of 64 tokens
    assert two.scored(short.starts, short.lengths, CASE.pages, 16).tolist() == [55, 55, 42, 24, 5, 2]
    assert listed(two.choose(q, short, None)) == listed(one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", Kind.__args__)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_pages_above_the_bound_of_every_block_left_out_are_those_of_one_level(reduce, kind):
    case, candidates, certain = Case(lengths=(1024,), capacity=1024, head_dim=16, group=3), 9, 0
    one, two = (
        Quest(64, reduce=reduce, ranking="box", block_pages=size, candidates=candidates) for size in (None, BLOCK)
    )
    for seed in range(40):
        view, q = view_of(kind, case, seed % 4), queries(case, 1, seed)
        ranks = np.asarray(one.score(q[:, 0], view.meta, view.lengths, 16, None))
        bounds = np.asarray(page_scores(q[:, 0], view.blocks, view.lengths, page_size=64, reduce=reduce))
        assert (bounds.repeat(BLOCK, axis=-1) >= ranks - 1e-4 * np.abs(ranks)).all(), "a block bounds its pages"
        found, expected = listed(two.choose(q, view, None)), listed(one.choose(q, view, None))
        for head in range(case.kv_heads):
            # The first and the last block are always taken.
            left_out = np.sort(bounds[0, head, 1:-1])[::-1][block_count(64, 16, BLOCK, candidates, 1) - 2 :]
            ranked = sorted(expected[0][head] - {0, case.pages - 1})
            if ranks[0, head, ranked].min() > left_out.max() * (1 + 1e-4):
                certain += 1
                assert found[0][head] == expected[0][head]
    assert 10 < certain < 80, "the property held something"


def test_a_broken_bound_does_not_push_out_a_page_that_is_always_read():
    view, q = view_of(), queries(CASE, 1)
    bad = view._replace(blocks=bounds_of(view.blocks).at[:, :, 3:7].set(jnp.nan).at[:, :, 8:12].set(jnp.inf))
    found = listed(Quest(64, block_pages=BLOCK, candidates=2).choose(q, bad, None))
    for row, length in enumerate(CASE.lengths):
        for pages in found[row]:
            assert {0, -(-length // 16) - 1} <= pages


def test_a_vector_of_rows_without_tokens_is_harmless():
    view, q = view_of(), queries(CASE, 1)
    empty = view._replace(lengths=jnp.zeros_like(view.lengths))
    selection = Quest(64, block_pages=BLOCK, candidates=2).choose(q, empty, None)
    assert (np.asarray(selection.counts) == 0).all() and 0 <= int(selection.pages.min())


def test_pages_and_blocks_that_are_scored_are_counted():
    policy = Quest(2048, block_pages=16)
    at = jnp.array([131072, 16384, 100])
    assert block_count(2048, 16, 16, 8, 1) == 65
    # 512 blocks and the pages of 65; 64 blocks and all pages; one block.
    assert policy.scored(at - 1, at, 8192, 16).tolist() == [512 + 65 * 16, 64 + 1024, 1 + 7]
    assert policy.scored(at - 1, at, 1024, 16).tolist() == [8192, 1024, 7]  # 64 blocks at most: one level
    assert [policy.scored_nbytes(128, 4, kind) for kind in Kind.__args__] == [1024, 512, 264]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"block_pages": 1}, ValueError, "block_pages to be at least 2, got 1"),
        ({"block_pages": 16.0}, TypeError, "block_pages to be an integer, got 16.0"),
        ({"candidates": 0}, ValueError, "candidates to be at least 1, got 0"),
        ({"candidates": None}, TypeError, "candidates to be an integer, got None"),
        (
            {"block_pages": 16, "reduce": "sum_softmax"},
            ValueError,
            "another reduce than 'sum_softmax' with block_pages",
        ),
    ],
)
def test_impossible_settings_are_refused(as_a_user, fields, error, message):
    with pytest.raises(error, match=message):
        Quest(64, **fields)


def test_a_cache_without_the_blocks_is_refused(as_a_user):
    q, view = queries(CASE, 1), view_of()
    for blocks, size in ((None, BLOCK), (view.blocks, 8)):
        with pytest.raises(ValueError, match=f"keeps the metadata of blocks of {size} pages"):
            Quest(64, block_pages=size, candidates=1).choose(q, view._replace(blocks=blocks), None)


def test_a_cache_has_whole_blocks_and_only_where_they_are_needed():
    for policy, pages, shapes in (
        (None, 7, None), (Quest(64), 7, None), (Quest(64, block_pages=4), 8, [(1, 1, 2, 16)] * 2)
    ):  # fmt: skip
        cache = init_attention(2, 1, 8, batch=1, capacity=100, policy=policy).cache
        assert cache.pages_per_row == pages and cache.block_pages == (4 if shapes else None)
        assert (cache.blocks and [bounds_of(leaf).shape for leaf in cache.blocks]) == shapes
        assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)}) == len(jax.tree.leaves(cache))
