"""append: what is written, what the metadata says, and what is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.pages import gather_pages, physical_pages
from tests.pallas_kernels.cases import CASES, Case, empty_pool, fill, table_of


def read_back(case, kv, table):
    """Logical pages of a pool as ``[B, K, P, S, D]`` keys and values, D as it is stored."""
    rows = jnp.arange(len(case.lengths))[:, None, None]
    physical = physical_pages(table, rows, jnp.arange(case.pages), case.pages)
    heads = jnp.arange(case.kv_heads)[:, None]
    return [np.asarray(x, np.float64) for x in gather_pages(kv, *jnp.broadcast_arrays(heads, physical), case.layer)]


def padded(case, array):
    """``array [.., D]`` with zeros up to the head dim of the pool."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, case.stored - case.head_dim)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_bounds_are_where_they_belong(case):
    filled = fill(case)
    keys, values = read_back(case, filled.kv, filled.table)
    meta = np.asarray(filled.meta if case.layer is None else filled.meta[case.layer], np.float64)
    for row, length in enumerate(case.lengths):
        flat = (case.kv_heads, case.capacity, case.stored)
        for stored, given in ((keys, filled.keys), (values, filled.values)):
            written = stored[row].reshape(flat)[:, :length].swapaxes(0, 1)
            np.testing.assert_array_equal(written, padded(case, given[row, :length]))
        assert np.isnan(keys[row].reshape(flat)[:, length:]).all(), "a token past the length was written"
        for page in range(case.pages):
            real = filled.keys[row, page * case.page_size : min(length, (page + 1) * case.page_size)]
            if len(real):
                expected = [padded(case, bound) for bound in (real.min(axis=0), real.max(axis=0))]
                expected = np.concatenate(expected, axis=-1)
                np.testing.assert_array_equal(meta[row, :, page], expected)
            else:
                assert np.isnan(meta[row, :, page]).all(), "the metadata of an unused page was written"


def test_a_stacked_pool_leaves_the_other_layers_alone():
    filled = fill(Case(layers=3))
    for leaf in jax.tree.leaves((filled.kv, filled.meta)):
        assert np.isnan(leaf[:2]).all() and not np.isnan(leaf[2]).all()


@pytest.mark.parametrize("steps", [[1] * 40, [7, 16, 1, 16], [33, 7], [16, 16, 8], [40]])
@pytest.mark.parametrize("table", [False, True])
def test_any_mix_of_writes_gives_the_same_bits(steps, table):
    case = Case(lengths=(40, 40), table=table)
    whole = fill(case)
    kv, meta = empty_pool(case, np.nan)
    at = 0
    for step in steps:
        starts = jnp.full(2, at, jnp.int32)
        keys, values = (jnp.asarray(x[:, at : at + step], jnp.float32) for x in (whole.keys, whole.values))
        kv, meta = append(kv, meta, keys, values, starts, starts + step, whole.table)
        at += step
    for piecewise, at_once in zip(jax.tree.leaves((kv, meta)), jax.tree.leaves((whole.kv, whole.meta)), strict=True):
        np.testing.assert_array_equal(piecewise, at_once)


def test_writing_the_same_slots_again_forgets_what_was_there():
    case = Case(lengths=(40,))
    clean = fill(case)
    starts, ends = jnp.array([18], jnp.int32), jnp.array([40], jnp.int32)
    huge = jnp.full((1, 22, case.kv_heads, case.head_dim), 1e6)
    kv, meta = append(clean.kv, clean.meta, huge, huge, starts, ends)
    assert float(jnp.nanmax(meta)) == 1e6
    keys, values = (jnp.asarray(x[:, 18:40], jnp.float32) for x in (clean.keys, clean.values))
    kv, meta = append(kv, meta, keys, values, starts, ends)
    for again, once in zip(jax.tree.leaves((kv, meta)), jax.tree.leaves((clean.kv, clean.meta)), strict=True):
        np.testing.assert_array_equal(again, once)


def test_idle_rows_padding_and_tokens_past_the_capacity_write_nothing():
    case = Case(lengths=(40, 40, 128))
    filled = fill(case)
    new = jnp.ones((3, 4, case.kv_heads, case.head_dim))
    starts = jnp.array([40, 40, 128], jnp.int32)
    kv, meta = append(filled.kv, filled.meta, new, new, starts, jnp.array([40, 42, 132], jnp.int32), filled.table)
    keys, _ = read_back(case, kv, None)
    old, _ = read_back(case, filled.kv, None)
    np.testing.assert_array_equal(keys[0], old[0])
    np.testing.assert_array_equal(keys[2], old[2])
    np.testing.assert_array_equal(meta[jnp.array([0, 2])], filled.meta[jnp.array([0, 2])])
    flat = keys[1].reshape(case.kv_heads, case.capacity, case.head_dim)
    assert (flat[:, 40:42] == 1).all() and np.isnan(flat[:, 42:]).all()


def test_rows_of_a_shared_pool_do_not_touch_each_other():
    case = Case(lengths=(40, 25), table=True)
    rng = np.random.default_rng(0)
    table = table_of(case, rng)
    kv, meta = empty_pool(case)
    keys = jnp.asarray(rng.normal(size=(2, 40, case.kv_heads, case.head_dim)), jnp.float32)
    zero = jnp.zeros(2, jnp.int32)
    both, _ = append(kv, meta, keys, keys, zero, jnp.array([40, 25], jnp.int32), table)
    first, _ = append(kv, meta, keys, keys, zero, jnp.array([40, 0], jnp.int32), table)
    second, _ = append(kv, meta, keys, keys, zero, jnp.array([0, 25], jnp.int32), table)
    for b, f, s in zip(jax.tree.leaves(both), jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(b, f + s)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (jnp.ones((1, 4, 3, 64)), jnp.ones((1, 4, 3, 64)), r"expected keys and values \[1, T, 2, 64\]"),
        (jnp.ones((1, 4, 2, 64)), jnp.ones((1, 3, 2, 64)), "got"),
        (jnp.ones((1, 4, 2, 48)), jnp.ones((1, 4, 2, 48)), r"\[1, T, 2, 64\]"),  # a split pool is never padded
        (jnp.ones((1, 4, 2, 64), jnp.bfloat16), jnp.ones((1, 4, 2, 64)), "dtype float32"),
    ],
)
def test_what_does_not_fit_is_refused(as_a_user, keys, values, message):
    kv, meta = empty_pool(Case())
    with pytest.raises(ValueError, match=message):
        append(kv, meta, keys, values, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
