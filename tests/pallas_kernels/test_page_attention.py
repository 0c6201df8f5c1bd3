"""page_attention against float64, over all pages and over lists of them, with poisoned memory around the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.pallas_kernels.page_attention.op import page_attention
from tests.pallas_kernels.cases import CASES, TOLERANCE, Case, attention_float64, fill, queries, to_the_bit


def reference(case, q, filled, starts, pages=None, counts=None):
    """``(out [B, T, H, D], lse [B, T, H])`` in float64."""
    q = np.asarray(q, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for row, length in enumerate(case.lengths):
        for t in range(q.shape[1]):
            at = np.arange(case.capacity)
            seen = (at < length) & (at <= starts[row] + t) & (starts[row] + t < length)
            for head in range(case.heads):
                listed = np.ones(case.capacity, bool)
                if pages is not None:
                    own = head * pages.shape[1] // case.heads
                    listed = np.isin(at // case.page_size, np.asarray(pages)[row, own, : counts[row, own]])
                kv_head = head // case.group
                out[row, t, head], lse[row, t, head] = attention_float64(
                    q[row, t, head], filled.keys[row, :, kv_head], filled.values[row, :, kv_head], seen & listed
                )
    return out, lse


def check(case, got, expected):
    tolerance = TOLERANCE[case.dtype]
    out, lse = (np.asarray(x, np.float64) for x in got)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected[0], atol=tolerance * max(1, np.abs(expected[0]).max()))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected[1]))
    live = np.isfinite(lse)
    np.testing.assert_allclose(lse[live], expected[1][live], atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_decode(case):
    filled, q = fill(case), queries(case, 1)
    starts = jnp.maximum(filled.lengths - 1, 0)
    got = page_attention(q, filled.kv, starts, filled.lengths, filled.table, layer=case.layer)
    assert got[0].dtype == q.dtype
    check(case, got, reference(case, q, filled, starts))


@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("case", [case for case in CASES if min(case.lengths) >= 11], ids=str)
def test_dense_chunk_is_causal(case, tokens):
    filled, q = fill(case), queries(case, tokens)
    starts = filled.lengths - tokens
    got = page_attention(q, filled.kv, starts, filled.lengths, filled.table, layer=case.layer)
    check(case, got, reference(case, q, filled, starts))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_listed_pages(case, per_head):
    filled, q = fill(case), queries(case, 1)
    rng = np.random.default_rng(3)
    lists, width = case.heads if per_head else case.kv_heads, min(4, case.pages)
    pages = np.zeros((len(case.lengths), lists, width), np.int32)
    counts = np.zeros((len(case.lengths), lists), np.int32)
    for row, length in enumerate(case.lengths):
        used = -(-length // case.page_size)
        for one in range(lists):
            counts[row, one] = rng.integers(0, min(width, used) + 1)
            # Unordered, the partial page anywhere, and dead entries that repeat a live page.
            pages[row, one, : counts[row, one]] = rng.permutation(used)[: counts[row, one]]
            pages[row, one, counts[row, one] :] = rng.integers(0, case.pages)
    starts = jnp.maximum(filled.lengths - 1, 0)
    got = page_attention(
        q, filled.kv, starts, filled.lengths, filled.table,
        pages=jnp.asarray(pages), counts=jnp.asarray(counts), layer=case.layer,
    )  # fmt: skip
    check(case, got, reference(case, q, filled, starts, pages, counts))


def test_listed_pages_for_several_queries_are_causal():
    case = Case(lengths=(60, 37))
    filled, q = fill(case), queries(case, 5)
    starts = filled.lengths - 5
    pages = jnp.broadcast_to(jnp.array([[[0, 2, 3]], [[0, 1, 2]]], jnp.int32), (2, 2, 3))
    counts = jnp.full((2, 2), 3, jnp.int32)
    got = page_attention(q, filled.kv, starts, filled.lengths, filled.table, pages=pages, counts=counts)
    check(case, got, reference(case, q, filled, starts, pages, counts))


def test_all_pages_listed_equals_dense():
    case = Case(lengths=(100, 61), head_dim=128, group=4)
    filled, q = fill(case), queries(case, 1)
    starts = filled.lengths - 1
    pages = jnp.broadcast_to(jnp.arange(case.pages, dtype=jnp.int32), (2, case.kv_heads, case.pages))
    counts = jnp.broadcast_to(-(-filled.lengths // 16)[:, None], (2, case.kv_heads))
    dense, _ = page_attention(q, filled.kv, starts, filled.lengths)
    listed, _ = page_attention(q, filled.kv, starts, filled.lengths, pages=pages, counts=counts)
    np.testing.assert_allclose(listed, dense, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", ["split", "fused"])
def test_unused_memory_does_not_leak(poison, layout, tokens):
    case = Case(lengths=(32, 64, 96, 48), layout=layout)
    q = queries(case, tokens)
    clean, dirty = fill(case, poison=0.0), fill(case, poison=poison)
    starts = clean.lengths - tokens
    assert not np.isfinite(jax.tree.leaves(dirty.kv)[0]).all()
    expected = page_attention(q, clean.kv, starts, clean.lengths)
    got = page_attention(q, dirty.kv, starts, dirty.lengths)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@to_the_bit
def test_a_row_does_not_depend_on_its_batch():
    case = Case(lengths=(5, 17, 33, 0, 100))
    filled = fill(case)
    for tokens in (1, 5):
        q = queries(case, tokens)
        starts = jnp.maximum(filled.lengths - tokens, 0)
        out, _ = page_attention(q, filled.kv, starts, filled.lengths)
        for row in range(5):
            own = jax.tree.map(lambda x, r=row: x[:, r * case.pages : (r + 1) * case.pages], filled.kv)
            one = slice(row, row + 1)
            alone, _ = page_attention(q[one], own, starts[one], filled.lengths[one])
            np.testing.assert_array_equal(alone, out[one])


def test_what_real_keys_say_is_not_hidden():
    """NaN in a real token reaches the queries that see it, and no other row."""
    case = Case(lengths=(20, 20))
    filled, q = fill(case), queries(case, 3)
    kv = jax.tree.map(lambda x: x.at[:, 0, 5].set(jnp.nan), filled.kv)
    out, _ = page_attention(q, kv, jnp.array([4, 4]), filled.lengths)
    nan = np.isnan(np.asarray(out)).all(axis=(2, 3)).tolist()
    assert nan[0][1:] == [True, True] and nan[1] == [False] * 3


def test_padded_queries_and_empty_rows_give_zeros():
    case = Case(lengths=(20, 0))
    filled, q = fill(case), queries(case, 6)
    out, lse = page_attention(q, filled.kv, jnp.array([16, 0]), filled.lengths)
    assert (np.asarray(out)[0, 4:] == 0).all() and (np.asarray(out)[1] == 0).all()
    assert np.isneginf(np.asarray(lse)[0, 4:]).all() and np.isneginf(np.asarray(lse)[1]).all()
    assert (np.abs(np.asarray(out)[0, :4]).max(axis=-1) > 0).all()


def test_logits_of_thousands_do_not_overflow():
    case = Case(dtype="float16", head_dim=64)
    filled = fill(case, scale=100.0)
    q = queries(case, 1) * jnp.float16(100)
    out, lse = page_attention(q, filled.kv, filled.lengths - 1, filled.lengths)
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(lse)).all()


def test_a_padded_pool_is_one_for_the_next_lower_head_dims_only(as_a_user):
    case = Case(layout="fused", head_dim=128)
    kv = fill(case).kv
    one = jnp.ones(1, jnp.int32)
    assert page_attention(jnp.ones((1, 1, 4, 65)), kv, 0 * one, one)[0].shape == (1, 1, 4, 65)
    for head_dim in (64, 129):
        with pytest.raises(ValueError, match=r"expected q \[B, T, H, 128\]"):
            page_attention(jnp.ones((1, 1, 4, head_dim)), kv, 0 * one, one)


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        (jnp.ones((1, 1, 4, 32)), {}, "expected q"),
        (jnp.ones((1, 1, 3, 64)), {}, "multiple of 2 KV heads"),
        (jnp.ones((1, 1, 4, 64), jnp.bfloat16), {}, "dtype float32"),
        (jnp.ones((1, 1, 4, 64)), {"pages": jnp.zeros((1, 2, 3), jnp.int32)}, "go together"),
        (
            jnp.ones((1, 1, 4, 64)),
            {"pages": jnp.zeros((1, 3, 3), jnp.int32), "counts": jnp.zeros((1, 3), jnp.int32)},
            "a list per KV head or per query head",
        ),
        (jnp.ones((3, 1, 4, 64)), {}, "divided evenly"),
        (jnp.ones((1, 1, 4, 64)), {"implementation": "mosaic"}, "implementation=None or one of .*'xla'"),
    ],
)
def test_what_does_not_fit_is_refused(as_a_user, q, options, message):
    kv = fill(Case()).kv
    rows = q.shape[0]
    with pytest.raises(ValueError, match=message):
        page_attention(q, kv, jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.int32), **options)
