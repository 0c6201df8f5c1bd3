"""Dense decode attention where the pages lie: when it serves, that it agrees, and that nothing leaks into it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention import contiguous
from quest_jax.pallas_kernels.page_attention.op import page_attention
from tests.pallas_kernels.cases import Case, fill, queries, to_the_bit
from tests.pallas_kernels.test_page_attention import check, reference

LENGTHS: tuple[int, ...] = (128, 127, 96, 65, 64, 3, 0)  # of 128: full to empty


def attend(case, filled, q):
    return page_attention(q, filled.kv, jnp.maximum(filled.lengths - 1, 0), filled.lengths, filled.table)


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_any_length_are_attended(group, poison):
    case = Case(lengths=LENGTHS, group=group)
    filled, q = fill(case, poison=poison), queries(case, 1)
    check(case, attend(case, filled, q), reference(case, q, filled, np.maximum(np.array(LENGTHS) - 1, 0)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_unused_memory_changes_no_bit(poison):
    """At every place in a part of the softmax where a row can end, in the first of them and in the last."""
    lengths = (1024, 1023, 1009, 1008, 993, 992, 991, 700, 529, 513, 512)
    case = Case(lengths=lengths, capacity=1024)
    clean, dirty, q = fill(case, poison=0.0), fill(case, poison=poison), queries(case, 1)
    for got, expected in zip(attend(case, dirty, q), attend(case, clean, q), strict=True):
        np.testing.assert_array_equal(got, expected)


@to_the_bit
def test_a_row_does_not_depend_on_the_rows_beside_it():
    case = Case(lengths=LENGTHS)
    filled, q = fill(case, poison=0.0), queries(case, 1)
    together, _ = attend(case, filled, q)
    for row, length in enumerate(LENGTHS):
        kv = tuple(leaf.reshape(2, len(LENGTHS), -1, *leaf.shape[2:])[:, row] for leaf in jax.tree.leaves(filled.kv))
        alone, _ = page_attention(q[row : row + 1], kv, jnp.array([max(length - 1, 0)]), jnp.array([length]))
        np.testing.assert_array_equal(alone[0], together[row])


def test_nan_in_a_real_value_is_not_hidden():
    case = Case(lengths=(100,))
    filled, q = fill(case, poison=0.0), queries(case, 1)
    keys, values = jax.tree.leaves(filled.kv)
    out, _ = page_attention(q, (keys, values.at[0, 2, 3, 5].set(jnp.nan)), filled.lengths - 1, filled.lengths)
    bad = np.zeros(out.shape, bool)
    bad[0, 0, :2, 5] = True  # the heads of the first group, in that channel
    np.testing.assert_array_equal(np.isnan(out), bad)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 4, 128), (2, 4, 64)])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_pool_is_not_copied(rows, kv_heads, group, head_dim):
    """Rows are read where they lie: what is made beside them is under a tenth of their keys and values."""
    made = []
    for pages in (512, 2048):
        pool = tuple(jax.ShapeDtypeStruct((kv_heads, rows * pages, 16, head_dim), jnp.float32) for _ in range(2))
        q = jax.ShapeDtypeStruct((rows, 1, kv_heads * group, head_dim), jnp.float32)
        sizes = jax.ShapeDtypeStruct((rows,), jnp.int32)
        program = jax.jit(page_attention).lower(q, pool, sizes, sizes).compile()
        assert contiguous.scores_are_few(kv_heads * group, kv_heads, head_dim)
        made.append(program.memory_analysis().temp_size_in_bytes)
    assert made[1] - made[0] < 2 * rows * kv_heads * 1536 * 16 * head_dim * 4 / 10


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"table": True}, False),
        ({"layout": "fused"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"layers": 2}, False),
        ({"group": 4}, True),
        ({"group": 5}, False),  # as many scores as keys would come close to the keys
    ],
    ids=str,
)
def test_it_serves_what_lies_in_order_in_float32(change, serves):
    case = Case(**change)
    filled = fill(case)
    assert contiguous.serves(filled.kv, filled.table, case.heads, 1, case.layer) == serves
    assert not contiguous.serves(filled.kv, filled.table, case.heads, 2, case.layer)
    with dispatch.target("tpu", "TPU v5 lite"):
        assert not contiguous.serves(filled.kv, filled.table, case.heads, 1, case.layer)
