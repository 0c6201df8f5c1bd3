"""page_scores: the equation, the bound, and what must not be scored."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quest_jax.pallas_kernels.page_scores.op import page_scores
from tests.pallas_kernels.cases import CASES, TOLERANCE, Case, fill, queries


def reference(case, q, filled, reduce, beta):
    """The equation of the paper, elementwise, in float64; shrunk around the middle of the box by ``beta``."""
    q = np.asarray(q, np.float64).reshape(len(case.lengths), case.kv_heads, case.group, case.head_dim)
    scores = np.full((*q.shape[:3], case.pages), -np.inf)
    for row, length in enumerate(case.lengths):
        for page in range(-(-length // case.page_size)):
            real = filled.keys[row, page * case.page_size : min(length, (page + 1) * case.page_size)]
            low, high = real.min(axis=0)[:, None], real.max(axis=0)[:, None]
            middle, half = (low + high) / 2, (high - low) / 2
            low, high = middle - beta * half, middle + beta * half
            scores[row, :, :, page] = np.maximum(q[row] * low, q[row] * high).sum(axis=-1)
    if reduce == "none":
        return scores.reshape(len(case.lengths), -1, case.pages)
    return scores.mean(axis=2) if reduce == "mean" else scores.max(axis=2)


@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("reduce", ["mean", "max", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_equation(case, reduce, beta):
    filled, q = fill(case), queries(case, 1)[:, 0]
    got = page_scores(
        q, filled.meta, filled.lengths, page_size=case.page_size, reduce=reduce, beta=beta, layer=case.layer
    )
    expected = reference(case, q, filled, reduce, beta)
    live = np.isfinite(expected)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(got), ~live)  # NaN in unused metadata must not show
    scale = np.abs(expected[live]).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(got)[live] / scale, expected[live] / scale, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("reduce", ["mean", "max", "none"])
@pytest.mark.parametrize("longest", [1, 600, 601, 1200, 1201, 2400, 2401, 4095, 4800])
def test_large_capacities_are_scored_as_far_as_the_longest_row(longest, reduce):
    """600 pages: the smallest of 75, 150, 300, 600 pages that holds the longest row is scored."""
    case = Case(page_size=8, capacity=4800, head_dim=16, lengths=(longest, min(longest, 700), 0))
    filled, q = fill(case), queries(case, 1)[:, 0]
    got = page_scores(q, filled.meta, filled.lengths, page_size=8, reduce=reduce)
    expected = reference(case, q, filled, reduce, beta=1.0)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-5)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 300.0]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    length=st.integers(1, 64),
    outlier=st.booleans(),
)
def test_no_key_of_a_page_scores_above_its_bound(seed, scale, dtype, length, outlier):
    case = Case(lengths=(length,), capacity=64, dtype=dtype, head_dim=16)
    filled = fill(case, seed=seed % 1000, scale=scale)
    q = queries(case, 1, seed=seed)[:, 0] * jnp.asarray(scale, dtype)
    if outlier:
        q = q.at[:, :, 3].set(250)
    bounds = page_scores(q, filled.meta, filled.lengths, page_size=case.page_size, reduce="none")
    by_head = np.asarray(bounds, np.float64).reshape(case.kv_heads, case.group, case.pages)
    q64 = np.asarray(q, np.float64).reshape(case.kv_heads, case.group, case.head_dim)
    for position in range(length):
        exact = np.einsum("kgd,kd->kg", q64, filled.keys[0, position])
        # Rounding of a float32 product of D terms: at most (D + 1) half-ulps of the sum of magnitudes.
        slack = 17 * 2**-24 * np.einsum("kgd,kd->kg", np.abs(q64), np.abs(filled.keys[0, position])) * 4
        assert (by_head[:, :, position // case.page_size] >= exact - slack).all()


def test_the_maximum_after_the_products_would_not_be_a_bound():
    """A mistake seen in public code: max(q.min, q.max) scores this page 0, though a key of it reaches 1."""
    keys = np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    meta = jnp.asarray(np.concatenate([keys.min(0), keys.max(0)])[None, None, None], jnp.float32)
    q = jnp.array([[[1.0, -1.0]]])
    assert float(page_scores(q, meta, jnp.array([3]), page_size=4)[0, 0, 0]) == 1.0


def test_the_group_is_reduced_after_the_bound_not_before():
    """Heads asking q and -q: their mean is 0 and says nothing, the mean of their bounds does."""
    filled = fill(Case(kv_heads=1, group=2, lengths=(64,)))
    q = queries(Case(kv_heads=1, group=1), 1)[:, 0]
    both = jnp.concatenate([q, -q], axis=1)
    got = page_scores(both, filled.meta, filled.lengths, page_size=16)
    by_head = page_scores(both, filled.meta, filled.lengths, page_size=16, reduce="none")
    live = np.asarray(got)[0, 0, :4]
    np.testing.assert_allclose(live, np.asarray(by_head).mean(axis=1)[0, :4], rtol=1e-5)
    assert live.std() > 0.1


def test_float16_outliers_stay_finite():
    case = Case(dtype="float16", head_dim=64, kv_heads=1, group=1)
    filled = fill(case)
    big = jnp.broadcast_to(jnp.where(jnp.arange(128) < 64, -65504.0, 65504.0), filled.meta.shape)
    scores = page_scores(jnp.full((1, 1, 64), 250, jnp.float16), big, filled.lengths, page_size=16)
    assert np.isfinite(np.asarray(scores)[0, 0, :3]).all() and float(scores[0, 0, 0]) > 65504


def test_metadata_padded_by_a_tile_or_more_is_none_for_this_query(as_a_user):
    with pytest.raises(ValueError, match="page_scores: expected q"):
        page_scores(jnp.ones((1, 4, 64)), jnp.zeros((1, 2, 8, 256)), jnp.ones(1, jnp.int32), page_size=16)


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        (jnp.ones((1, 4, 65)), {}, "page_scores: expected q"),
        (jnp.ones((1, 4, 128)), {}, "page_scores: expected q"),
        (jnp.ones((1, 3, 64)), {}, "H a multiple of K"),
        (jnp.ones((2, 4, 64)), {}, "page_scores: expected q"),
        (jnp.ones((1, 4, 64)), {"reduce": "median"}, "'mean', 'max' or 'none'"),
        (jnp.ones((1, 4, 64)), {"implementation": "cuda"}, "implementation=None or one of .*'xla'"),
    ],
)
def test_what_does_not_fit_is_refused(as_a_user, q, options, message):
    meta = jnp.zeros((1, 2, 8, 128))
    with pytest.raises(ValueError, match=message):
        page_scores(q, meta, jnp.ones(1, jnp.int32), page_size=16, **options)
