"""The Mosaic GPU kernels in JAX's GPU interpreter: float64 references, poisoned memory, races, and what is declined.

The interpreter follows the path of the copy engine (compute capability 9.0 and newer); the one through ``cp.async`` is
only compiled, in ``tests/aot``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention import gpu as attention_gpu
from quest_jax.pallas_kernels.page_attention.gpu_columns import columns_of, pack, unpack
from quest_jax.pallas_kernels.page_attention.op import IMPLEMENTATIONS as ATTENTION
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.page_scores import gpu as scores_gpu
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.pallas_kernels.pages import pad_head_dim
from tests.pallas_kernels import test_page_attention, test_page_scores
from tests.pallas_kernels.cases import CASES, Case, fill, queries, sees_nan_key, with_nan_key

# Minutes of interpretation: on the newest JAX only, in .ci/run.
pytestmark = pytest.mark.slow
INTERPRET = plgpu.InterpretGPUParams()
RACES = plgpu.InterpretGPUParams(detect_races=True)


def call_of(case: Case, dtype: str | None = None, **changes) -> dispatch.Call:
    """What the ops tell the dispatch on an H200."""
    call = dispatch.Call(
        platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0), dtype=dtype or case.dtype,
        layout=case.layout, kv_heads=case.kv_heads, group=case.group, head_dim=case.stored, page_size=case.page_size,
    )  # fmt: skip
    return dataclasses.replace(call, **changes)


def in_half_precision(cases):
    """The shared table as this kernel can take it: fused, bfloat16 where it was float32."""
    for case in cases:
        dtype = "bfloat16" if case.dtype == "float32" else case.dtype
        yield dataclasses.replace(case, dtype=dtype, layout="fused")


HALF = list(dict.fromkeys(in_half_precision(CASES)))
HALF.append(Case(dtype="bfloat16", layout="fused", head_dim=256, kv_heads=1, lengths=(70,)))
SERVED = [case for case in HALF if attention_gpu.why_not(call_of(case)) is None]
# 16 pages at least: capacity that no token uses changes no result.
SCORED = [
    dataclasses.replace(case, capacity=max(case.capacity, 16 * case.page_size))
    for case in SERVED
    if max(case.capacity // case.page_size, 16) % 16 == 0
]


def lists_of(case: Case, per_head: bool):
    """Unordered lists with the partial page anywhere, and dead entries that must not be read: out of range."""
    rng = np.random.default_rng(3)
    lists, width = case.heads if per_head else case.kv_heads, min(4, case.pages)
    pages = np.full((len(case.lengths), lists, width), 2**30, np.int32)
    counts = np.zeros((len(case.lengths), lists), np.int32)
    for row, length in enumerate(case.lengths):
        used = -(-length // case.page_size)
        for one in range(lists):
            counts[row, one] = rng.integers(0, min(width, used) + 1)
            pages[row, one, : counts[row, one]] = rng.permutation(used)[: counts[row, one]]
    return pages, counts


def attend(case, filled, q, pages=None, counts=None, *, starts=None, splits=None, interpret=INTERPRET):
    starts = jnp.maximum(filled.lengths - 1, 0) if starts is None else starts
    pages, counts = (None if x is None else jnp.asarray(x) for x in (pages, counts))
    out, lse = attention_gpu.page_attention(
        pad_head_dim(q, case.stored), filled.kv, starts, filled.lengths, filled.table, pages=pages, counts=counts,
        layer=case.layer, scale=case.head_dim**-0.5, splits=splits, interpret=interpret,
    )  # fmt: skip
    return jax.block_until_ready((out[..., : case.head_dim], lse))


def test_the_shared_table_is_served():
    declined = {str(case): attention_gpu.why_not(call_of(case)) for case in HALF if case not in SERVED}
    assert len(SERVED) >= 16 and len(SCORED) >= 12
    assert all("head dim" in reason or "pages of" in reason for reason in declined.values()), declined
    assert {case.group for case in SERVED} >= {1, 2, 3, 4, 7, 8}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_dense_decode(case):
    filled, q = fill(case), queries(case, 1)
    splits = 2 if case.pages > 100 else None  # the interpreter's time, not the kernel's
    got = attend(case, filled, q, splits=splits)
    assert got[0].dtype == q.dtype
    starts = jnp.maximum(filled.lengths - 1, 0)
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts))


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_listed_pages(case):
    filled, q = fill(case), queries(case, 1)
    pages, counts = lists_of(case, per_head=case.group % 2 == 0)
    got = attend(case, filled, q, pages, counts)
    starts = jnp.maximum(filled.lengths - 1, 0)
    expected = test_page_attention.reference(case, q, filled, starts, pages, counts)
    test_page_attention.check(case, got, expected)


@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_the_number_of_splits_does_not_matter(splits):
    case = Case(dtype="bfloat16", layout="fused", lengths=(300, 64, 0), capacity=320, kv_heads=1)
    if splits > 5:  # a step each
        case = dataclasses.replace(case, lengths=(1999,), capacity=2048)
    filled, q = fill(case), queries(case, 1)
    starts = jnp.maximum(filled.lengths - 1, 0)
    got = attend(case, filled, q, splits=splits)
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts))


def test_a_query_in_the_middle_sees_nothing_after_it():
    case = Case(dtype="bfloat16", layout="fused", lengths=(100, 40, 20))
    filled, q = fill(case), queries(case, 1)
    starts = jnp.array([33, 0, 25])  # the last one is padding: past its row's length
    pages = np.broadcast_to(np.array([5, 0, 2, 1], np.int32), (3, 2, 4))
    counts = np.array([[4, 3], [1, 2], [2, 2]], np.int32) * np.array([[1], [1], [1]])
    pages = np.where(np.arange(4) < counts[..., None], np.minimum(pages, np.array([6, 2, 1])[:, None, None]), 0)
    for row in range(3):  # no page twice
        for one in range(2):
            assert len(set(pages[row, one, : counts[row, one]])) == counts[row, one]
    got = attend(case, filled, q, pages, counts, starts=starts)
    expected = test_page_attention.reference(case, q, filled, starts, pages, counts)
    test_page_attention.check(case, got, expected)
    dense = attend(case, filled, q, starts=starts)
    test_page_attention.check(case, dense, test_page_attention.reference(case, q, filled, starts))


CHUNKS = [
    # (case, query tokens, positions of the first ones): chunks that end with their row, in its middle, and after it
    # (padding tokens), that are nothing but padding, and rows without a token.
    (Case(dtype="bfloat16", lengths=(100, 40, 20), group=3, table=True), 23, (77, 9, 5)),
    (Case(dtype="bfloat16", lengths=(100, 40, 0), group=1, layers=2), 70, (30, 0, 0)),
    (Case(dtype="bfloat16", lengths=(90, 33), group=4, head_dim=128), 17, (73, 33)),
    (Case(dtype="bfloat16", lengths=(90, 128), group=8, page_size=8, kv_heads=1), 16, (60, 112)),
    (Case(dtype="bfloat16", lengths=(200,), group=7, page_size=128, capacity=256, table=True), 11, (121,)),
    (Case(dtype="bfloat16", lengths=(70, 41), group=2, head_dim=256, kv_heads=1, page_size=32), 20, (50, 30)),
    (Case(dtype="bfloat16", lengths=(60, 17), group=3, head_dim=80, padded=True), 2, (58, 3)),
    (Case(dtype="float16", lengths=(100, 64), group=4, table=True, layers=2), 19, (81, 40)),
    (Case(dtype="float16", lengths=(50, 31), group=8, head_dim=128, kv_heads=1), 5, (45, 30)),
]
CHUNKS = [(dataclasses.replace(case, layout="fused"), tokens, np.array(starts)) for case, tokens, starts in CHUNKS]


@pytest.mark.parametrize("listed", [False, True], ids=["dense", "listed"])
@pytest.mark.parametrize(("case", "tokens", "starts"), CHUNKS, ids=str)
def test_several_tokens_are_causal(case, tokens, starts, listed):
    assert attention_gpu.why_not(call_of(case, query_tokens=tokens)) is None
    filled, q = fill(case), queries(case, tokens)
    pages, counts = lists_of(case, per_head=case.group % 2 == 0) if listed else (None, None)
    got = attend(case, filled, q, pages, counts, starts=jnp.asarray(starts))
    assert got[0].dtype == q.dtype
    expected = test_page_attention.reference(case, q, filled, starts, pages, counts)
    test_page_attention.check(case, got, expected)
    unseen = np.isneginf(expected[1])
    assert not np.asarray(got[0])[unseen].any()
    padding = starts[:, None] + np.arange(tokens) >= np.asarray(case.lengths)[:, None]
    assert unseen[padding].all()


def test_the_chunks_cover_tiles_and_padding():
    widths, past = set(), 0
    for case, tokens, starts in CHUNKS:
        columns = columns_of(tokens, case.group, case.stored, max(64, case.page_size))
        widths.add(columns.width)
        past += (starts + tokens > np.asarray(case.lengths)).sum()
    assert widths == {8, 32, 64} and past >= 6
    assert {case.group for case, *_ in CHUNKS} >= {1, 3, 4, 8}


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_number_of_splits_does_not_matter_to_several_tokens(splits):
    case = Case(dtype="bfloat16", layout="fused", lengths=(300, 64, 0), capacity=320, kv_heads=1, group=3)
    filled, q, starts = fill(case), queries(case, 30), jnp.array([270, 40, 0])
    got = attend(case, filled, q, starts=starts, splits=splits)
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts))


def test_pages_after_the_last_query_are_not_attended():
    """In their place the page table names one that is full of NaN, which weight zero would not hide."""
    case = Case(dtype="bfloat16", layout="fused", lengths=(128, 128), capacity=256, table=True, group=4)
    filled, q, starts = fill(case), queries(case, 20), jnp.array([10, 61])
    last = (np.asarray(starts) + 19) // case.page_size
    table = np.asarray(filled.table)
    assert np.isnan(np.asarray(filled.kv, np.float32)[:, table[:, -1]]).all()
    table = np.where(np.arange(case.pages) <= last[:, None], table, table[:, -1:])
    got = attend(case, dataclasses.replace(filled, table=jnp.asarray(table, jnp.int32)), q, starts=starts)
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts))


@pytest.mark.parametrize(("tokens", "group"), [(2, 1), (23, 3), (128, 4), (40, 7), (9, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_hold_every_query_once(tokens, group, head_dim):
    columns = columns_of(tokens, group, head_dim, 64)
    held = np.arange(columns.tiles * columns.width).reshape(columns.tiles, columns.width)
    assert held.size - columns.width < tokens * group <= held.size
    for tile, ids in enumerate(held):
        token = ids[ids < tokens * group] // group
        assert (columns.first_token(tile), columns.last_token(tile)) == (token.min(), token.max())
    q = jnp.arange(2 * tokens * 3 * group * 2).reshape(2, tokens, 3 * group, 2)
    packed = pack(q, 3, columns)
    assert packed.shape == (2 * 3 * columns.tiles, columns.width, 2)
    np.testing.assert_array_equal(unpack(packed, 2, 3, columns), q)
    np.testing.assert_array_equal(packed[columns.tiles, 0], q[0, 0, group])  # the second list begins with its own head


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_unused_memory_does_not_leak(poison, tokens):
    case = Case(dtype="bfloat16", layout="fused", lengths=(32, 65, 15), kv_heads=1)
    q = queries(case, tokens)
    clean, dirty = fill(case, poison=0.0), fill(case, poison=poison)
    assert not np.isfinite(np.asarray(dirty.kv, np.float32)).all()
    starts = clean.lengths - tokens
    for a, b in zip(attend(case, dirty, q, starts=starts), attend(case, clean, q, starts=starts), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("splits", "listed"), [(1, False), (2, False), (2, True)])
def test_nan_in_a_real_key_shows_exactly_where_it_is_seen(splits, listed):
    case = Case(dtype="bfloat16", layout="fused", lengths=(100, 100, 3), capacity=128)
    filled, q = fill(case), queries(case, 1)
    starts = jnp.array([99, 99, 2])
    pages = counts = None
    if listed:  # a list per query head: of those that share the key, the first reads its page, the second does not
        pages = np.broadcast_to(
            np.array([[4, 1, 2, 5, 0], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]), (3, 4, 5)
        )
        counts = np.where(np.arange(3)[:, None] < 2, 5, np.array([[1, 0, 1, 1]]))
        pages = np.where(np.arange(3)[:, None, None] < 2, pages, 0)
    attended = dataclasses.replace(filled, kv=with_nan_key(filled))
    out, lse = (np.isnan(x) for x in attend(case, attended, q, pages, counts, starts=starts, splits=splits))
    expected = sees_nan_key(case, starts, 1, pages, counts)
    assert expected.any() and not expected[0].all()
    np.testing.assert_array_equal(lse, expected)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[..., None], out.shape))


@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_real_key_is_not_seen_before_it(splits):
    case = Case(dtype="bfloat16", layout="fused", lengths=(100, 100), capacity=128)
    filled, q, starts = fill(case), queries(case, 40), jnp.array([0, 0])
    attended = dataclasses.replace(filled, kv=with_nan_key(filled))
    out, lse = (np.isnan(x) for x in attend(case, attended, q, starts=starts, splits=splits))
    expected = sees_nan_key(case, starts, 40)
    assert expected[0, 5:, 0].all() and not expected[0, :5].any()
    np.testing.assert_array_equal(lse, expected)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[..., None], out.shape))


@pytest.mark.parametrize(
    ("case", "splits", "listed"),
    [
        (Case(dtype="bfloat16", layout="fused", table=True, lengths=(200, 3), capacity=256, group=3), 1, False),
        (Case(dtype="float16", layout="fused", lengths=(120,), page_size=8, group=4), 2, False),
        (Case(dtype="bfloat16", layout="fused", layers=2, lengths=(90, 20), head_dim=128), None, True),
    ],
    ids=["two stages, page table", "splits", "lists, layers"],
)
def test_no_race(case, splits, listed):
    filled, q = fill(case), queries(case, 1)
    pages, counts = lists_of(case, False) if listed else (None, None)
    got = []
    assert not raced(lambda: got.extend(attend(case, filled, q, pages, counts, splits=splits, interpret=RACES)))
    starts = jnp.maximum(filled.lengths - 1, 0)
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts, pages, counts))


@pytest.mark.parametrize("splits", [1, 2])
def test_several_tokens_have_no_race(splits):
    case = Case(dtype="bfloat16", layout="fused", table=True, lengths=(200, 30), capacity=256, group=3, kv_heads=1)
    filled, q, starts = fill(case), queries(case, 23), jnp.array([177, 20])
    got = []
    assert not raced(lambda: got.extend(attend(case, filled, q, starts=starts, splits=splits, interpret=RACES)))
    test_page_attention.check(case, got, test_page_attention.reference(case, q, filled, starts))


@pytest.mark.parametrize("tokens", [1, 23])
@pytest.mark.parametrize(("removed", "length"), [("barrier_wait", 60), ("commit_smem", 200)])
def test_a_planted_race_is_found(monkeypatch, removed, length, tokens):
    """Without the wait, a step reads what is still being copied; without the commit, a copy overtakes the last read."""
    monkeypatch.setattr(attention_gpu.plgpu, removed, lambda *args: None)
    case = Case(dtype="bfloat16", layout="fused", lengths=(length,), capacity=256, kv_heads=1)
    filled, q = fill(case), queries(case, tokens)
    starts = filled.lengths - tokens
    assert raced(lambda: attend(case, filled, q, starts=starts, splits=1, interpret=RACES))


def raced(run) -> bool:
    """Runs kernels under the race detector; JAX 0.12 raises at once, JAX 0.11 keeps a note for the last kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # no public way to ask

    try:
        jax.block_until_ready(run())
        return gpu_callbacks.get_races().races_found
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # needed after an exception


@pytest.mark.parametrize(
    ("case", "reduce"), [(case, ("mean", "max", "none")[i % 3]) for i, case in enumerate(SCORED)], ids=str
)
def test_scores_equal_the_equation(case, reduce):
    filled, q = fill(case), queries(case, 1)[:, 0]
    beta = 1.0 if case.group % 2 else 0.5
    got = scores_gpu.page_scores(
        pad_head_dim(q, case.stored), filled.meta, filled.lengths, page_size=case.page_size, reduce=reduce, beta=beta,
        layer=case.layer, interpret=INTERPRET,
    )  # fmt: skip
    expected = test_page_scores.reference(case, q, filled, reduce, beta)
    live = np.isfinite(expected)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(got), ~live)  # NaN in unused metadata must not show
    scale = np.abs(expected[live]).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(got)[live] / scale, expected[live] / scale, atol=2e-6)


def test_scores_have_no_race():
    case = Case(capacity=64 * 16, lengths=(700, 20), group=2)
    filled, q = fill(case), queries(case, 1)[:, 0]
    options = {"page_size": 16, "reduce": "max", "beta": 1.0, "layer": None, "interpret": RACES}
    assert not raced(lambda: scores_gpu.page_scores(q, filled.meta, filled.lengths, **options))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "needs an NVIDIA GPU, got platform 'cpu'"),
        ({"compute_capability": None, "device_kind": "gfx942"}, "'gfx942' has no CUDA compute capability"),
        ({"compute_capability": (7, 5), "device_kind": "T4"}, "8.0 .Ampere. or newer, 'T4' has 7.5"),
        ({"query_tokens": 5, "head_dim": 384, "page_size": 64}, "the queries of several tokens, do not fit in 96 KiB"),
        ({"group": 9}, "up to 8 query heads"),
        ({"head_dim": 96}, "multiple of 64, got 96"),
        ({"dtype": "float32"}, "bfloat16 or float16, got float32"),
        ({"layout": "split"}, "reads the fused layout"),
        ({"page_size": 5}, "8, 16, 32, 64 or 128 tokens, got 5"),
        ({"page_size": 128, "head_dim": 256}, "does not fit in 96 KiB"),
        ({"page_size": 8, "compute_capability": (8, 9)}, "page_size . head_dim of at least 1024"),
        ({}, None),
        ({"page_size": 8}, None),
        ({"query_tokens": 5}, None),
        ({"query_tokens": 128, "head_dim": 256, "page_size": 64}, None),
        ({"query_tokens": 1, "head_dim": 384, "page_size": 64}, None),
        ({"compute_capability": (12, 0), "head_dim": 256, "page_size": 64}, None),
    ],
)
def test_attention_declines_with_the_reason(changes, reason):
    got = attention_gpu.why_not(call_of(Case(dtype="bfloat16", layout="fused"), **changes))
    if reason is None:
        assert got is None
    else:
        with pytest.raises(NotImplementedError, match=reason):
            call = call_of(Case(dtype="bfloat16", layout="fused"), **changes)
            dispatch.resolve("page_attention", ATTENTION, call, "mosaic_gpu")


def test_scores_decline_with_the_reason():
    assert scores_gpu.why_not(call_of(Case(), dtype="float32", pages=2048)) is None
    assert "float32, got bfloat16" in scores_gpu.why_not(call_of(Case(), dtype="bfloat16"))
    assert "multiple of 16 pages a row, got 40" in scores_gpu.why_not(call_of(Case(), dtype="float32", pages=40))


def test_by_name_on_a_cpu_raises_and_by_default_serves():
    case = Case(dtype="bfloat16", layout="fused")
    filled, q = fill(case), queries(case, 1)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' does not serve this call: it needs an NVIDIA GPU"):
        page_attention(q, filled.kv, filled.lengths - 1, filled.lengths, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="These do: 'xla'"):
        page_scores(q[:, 0], filled.meta, filled.lengths, page_size=16, implementation="mosaic_gpu")
    assert np.isfinite(np.asarray(page_attention(q, filled.kv, filled.lengths - 1, filled.lengths)[0])).all()


def test_the_target_decides_while_tracing():
    case = Case(dtype="bfloat16", layout="fused")
    before = dispatch.current_target()
    with dispatch.target("gpu", "NVIDIA H200", (9, 0)) as chosen:
        assert dispatch.current_target() == chosen
        call = dispatch.describe_call(dispatch.PoolShape(2, 8, 16, 64), jnp.bfloat16, "fused", 4)
        assert dispatch.resolve("page_attention", ATTENTION, call, None).name == "mosaic_gpu"
        assert call == call_of(case)
    assert dispatch.current_target() == before
