"""What the baselines list, against each method written once more in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import LayerView
from quest_jax.policies.base import checked
from quest_jax.policies.oracle import Oracle, OracleChunk
from quest_jax.policies.random_tokens import Random, RandomChunk
from quest_jax.policies.sample_attention import SampleAttention
from quest_jax.policies.sink_window import SinkWindow, SinkWindowChunk
from quest_jax.policies.top_p import TopP
from tests.pallas_kernels.cases import Case, fill, queries
from tests.policies.test_quest import numpy_bounds

LENGTHS = (128, 97, 65, 64, 63, 17, 16, 15, 1)
CASES = [
    Case(lengths=LENGTHS, head_dim=32),
    Case(lengths=LENGTHS, head_dim=32, group=3, kv_heads=3, layout="fused", table=True),
    Case(lengths=(100, 40), head_dim=16, group=1, page_size=8, dtype="bfloat16"),
]


def view_of(case, new=1):
    filled = fill(case)
    starts = jnp.maximum(filled.lengths - new, 0)
    return filled, LayerView(filled.kv, filled.meta, None, starts, filled.lengths, filled.table)


def listed(selection):
    """[B][lists] arrays of what is live."""
    pages, counts = (np.asarray(x) for x in selection)
    return [[pages[b, n, : counts[b, n]] for n in range(pages.shape[1])] for b in range(len(pages))]


def attention_of(case, q, filled, row, at):
    """[H, L] softmax of the query ``q [H, D]`` at position ``at`` over all it sees, in float64."""
    keys = np.repeat(filled.keys[row, : at + 1], case.group, axis=1)  # [L, H, D]
    scores = np.einsum("hd,lhd->hl", np.asarray(q, np.float64), keys) / np.sqrt(case.head_dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def top(scores, count):
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def of_head(by_head, case, one):
    return by_head.reshape(case.kv_heads, case.group, -1)[one]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("budget", "sink"), [(8, 4), (20, 0), (40, 4), (64, 17)])
def test_the_first_tokens_and_the_last(case, budget, sink):
    _, view = view_of(case)
    found = listed(SinkWindow(budget, sink=sink).choose(queries(case, 1), view, None))
    for row, length in enumerate(case.lengths):
        want = range(length) if length <= budget else [*range(sink), *range(length - budget + sink, length)]
        assert all(one.tolist() == list(want) for one in found[row])


@pytest.mark.parametrize("length", [16, 90, 128])
def test_the_first_pages_and_the_last(length):
    case = Case(lengths=(length,))
    found = listed(SinkWindow(48, granularity="page").choose(queries(case, 1), view_of(case)[1], None))[0]
    used = -(-length // 16)
    assert all(one.tolist() == sorted({0, *range(max(0, used - 2), used)}) for one in found)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("granularity", ["token", "page"])
def test_what_gets_most_attention(case, granularity):
    filled, view = view_of(case)
    q = queries(case, 1)
    budget = 3 * case.page_size
    found = listed(Oracle(budget, granularity=granularity).choose(q, view, None))
    unit = 1 if granularity == "token" else case.page_size
    for row, length in enumerate(case.lengths):
        mass = attention_of(case, q[row, 0], filled, row, length - 1)
        for one in range(case.kv_heads):
            own = of_head(mass, case, one).sum(axis=0)
            own = np.pad(own, (0, -length % unit)).reshape(-1, unit).sum(axis=1)
            own[-1] = np.inf
            count = budget // unit if length > budget else -(-length // unit)
            assert set(found[row][one].tolist()) == top(own, count), (row, one)


def test_random_tokens_are_all_equally_likely_and_a_draw_repeats_itself():
    case = Case(lengths=(64,) * 200, head_dim=16, capacity=64)
    _, view = view_of(case)
    q = queries(case, 1)
    policy = Random(16)
    selection = policy.choose(q, view, None)
    found = listed(selection)
    assert all(len(one) == 16 and one[-1] == 63 for row in found for one in row)
    counts = np.bincount(np.concatenate([one for row in found for one in row]), minlength=64)[:63]
    # Of 400 lists each of 63 tokens is in 15 / 63 of them: 95.2, with a deviation of 8.5.
    assert abs(counts - 400 * 15 / 63).max() < 5 * 8.5
    assert abs((counts - 400 * 15 / 63) ** 2).mean() < 1.5 * 8.5**2
    assert not np.array_equal(found[0][0], found[0][1]) and not np.array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(policy.choose(q, view, None).pages, selection.pages)
    assert not np.array_equal(Random(16, seed=1).choose(q, view, None).pages, selection.pages)
    half = LayerView(*(x if x is None or isinstance(x, tuple) else x for x in view))
    turned = policy.choose(q[::-1], half, None)
    np.testing.assert_array_equal(turned.pages[::-1], selection.pages)


def chunk_lists(case, policy, new):
    """The lists of a chunk by row and KV head, split into what is past and the rest, and how many tokens are past."""
    filled, view = view_of(case, new)
    q = queries(case, new)
    past = np.asarray(view.starts) // policy.unit(case.page_size)
    found = listed(policy.choose(q, view, None))
    for row, (start, length) in enumerate(zip(past, case.lengths, strict=True)):
        own = list(range(start, -(-length // policy.unit(case.page_size))))
        assert all(one.tolist()[-len(own) :] == own for one in found[row]), "the chunk's own, all of them"
    lists = [[one[one < start].tolist() for one in row] for row, start in zip(found, past, strict=True)]
    return filled, q, lists, past.tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("granularity", ["token", "page"])
def test_what_gets_most_attention_of_a_chunk(case, granularity):
    new, budget = 24, 2 * case.page_size
    policy = OracleChunk(budget, granularity=granularity)
    filled, q, lists, past = chunk_lists(case, policy, new)
    unit = policy.unit(case.page_size)
    for row, length in enumerate(case.lengths):
        start = max(length - new, 0)
        mass = np.zeros((case.heads, length + -length % unit))
        for at in range(start, length):
            mass[:, : at + 1] += attention_of(case, q[row, at - start], filled, row, at)
        for one in range(case.kv_heads):
            own = of_head(mass, case, one).sum(axis=0).reshape(-1, unit).sum(axis=1)[: past[row]]
            assert set(lists[row][one]) == top(own, budget // unit), (row, one)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("budget", "sink"), [(8, 4), (20, 0), (64, 17)])
def test_the_first_tokens_and_the_last_before_a_chunk(case, budget, sink):
    _, _, lists, past = chunk_lists(case, SinkWindowChunk(budget, sink=sink), 24)
    for start, row in zip(past, lists, strict=True):
        want = range(start) if start <= budget else [*range(sink), *range(start - budget + sink, start)]
        assert all(one == list(want) for one in row)


def test_a_chunk_draws_among_the_past_whatever_pads_it():
    case = Case(lengths=(64,) * 200, head_dim=16, capacity=64)
    _, view = view_of(case, 4)
    q, policy = queries(case, 8), RandomChunk(15)
    found = listed(policy.choose(q, view, None))
    assert all(len(one) == 19 and one[15:].tolist() == [60, 61, 62, 63] for row in found for one in row)
    counts = np.bincount(np.concatenate([one for row in found for one in row]), minlength=64)[:60]
    # Of 400 lists each of 60 tokens is in a quarter: 100, with a deviation of 8.7.
    assert abs(counts - 100).max() < 5 * 8.7 and abs((counts - 100) ** 2).mean() < 1.5 * 8.7**2
    for other in (q[:, :4], q.at[:, 4:].set(jnp.nan)):
        again = listed(policy.choose(other, view, None))
        assert all(np.array_equal(one, two) for row, two_row in zip(found, again, strict=True)
                   for one, two in zip(row, two_row, strict=True))  # fmt: skip
    changed = listed(policy.choose(q.at[:, 3].add(1.0), view, None))
    assert sum(np.array_equal(row[0], other[0]) for row, other in zip(found, changed, strict=True)) < 3


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("p", "pages"), [(0.5, 8), (0.9, 8), (0.9, 3), (1.0, 4)])
def test_as_many_pages_as_hold_the_mass(case, p, pages):
    filled, view = view_of(case)
    q = queries(case, 1)
    budget = pages * case.page_size
    found = listed(TopP(budget, p=p).choose(q, view, None))
    bounds = numpy_bounds(case, q[:, 0], filled, 0.5) / np.sqrt(case.head_dim)
    for row, length in enumerate(case.lengths):
        used = -(-length // case.page_size)
        weights = np.exp(bounds[row] - bounds[row].max(axis=1, keepdims=True))
        mass = (weights / weights.sum(axis=1, keepdims=True)).reshape(case.kv_heads, case.group, -1).mean(axis=1)
        for one in range(case.kv_heads):
            order = list(dict.fromkeys([0, used - 1, *np.argsort(-mass[one, :used], kind="stable").tolist()]))
            sums = np.cumsum(mass[one, order])
            # Where the sum comes within rounding of p, one page more or less is right too.
            counts = {min(max(len({0, used - 1}), int((sums < p + e).sum()) + 1), used, pages) for e in (-1e-5, 1e-5)}
            taken = set(found[row][one].tolist())
            assert len(taken) in counts and taken == set(order[: len(taken)]), (row, one)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("options", [
    {}, {"recent": 9}, {"n_queries": 3}, {"alpha": 0.6}, {"alpha": 0.95, "recent": 4}, {"alpha": 1.0},
], ids=str)  # fmt: skip
def test_the_columns_that_a_sample_of_queries_attends_to(case, options):
    new, budget = 24, 20
    filled, view = view_of(case, new)
    q = queries(case, new)
    policy = SampleAttention(budget, **options)
    found = listed(policy.choose(q, view, None))
    for row, length in enumerate(case.lengths):
        real = min(new, length)
        past, count = length - real, min(policy.n_queries, new)
        sample = [max((i + 1) * real // count - 1, 0) for i in range(count)]
        mass = np.zeros((case.heads, length))
        for at in sample:
            mass[:, : past + at + 1] += attention_of(case, q[row, at], filled, row, past + at)
        for one in range(case.kv_heads):
            own = of_head(mass, case, one).sum(axis=0)
            ranking = own[:past].copy()
            ranking[max(0, past - policy.recent) :] = np.inf
            order = np.argsort(-ranking, kind="stable").tolist()
            counts = {min(budget, past)}
            if policy.alpha is not None:
                last = min(policy.recent, past)
                sums = own[past:].sum() + np.concatenate([[0], np.cumsum(own[order])])
                enough = [policy.alpha * own.sum() + e for e in (-1e-4, 1e-4)]
                counts = {min(max(last, int((sums[:-1] < e).sum())), budget, past) for e in enough}
            taken = [token for token in found[row][one].tolist() if token < past]
            assert len(taken) in counts or min(counts) <= len(taken) <= max(counts), (row, one)
            assert set(taken) == set(order[: len(taken)])
            assert found[row][one].tolist()[len(taken) :] == list(range(past, length))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SinkWindow(0), ValueError, "SinkWindow: expected budget to be at least 1, got 0"),
        (lambda: Oracle(2.5), TypeError, "Oracle: expected budget to be an integer, got 2.5"),
        (lambda: SinkWindow(4), ValueError, "a budget above the sink of 4 tokens, .* got a budget of 4"),
        (lambda: TopP(64, p="x"), TypeError, "p to be a number, got 'x'"),
        (lambda: SampleAttention(64, alpha="x"), TypeError, "alpha to be a number or None, got 'x'"),
        (lambda: checked(SampleAttention(64), 16), ValueError, "reads prompts only; pass it as prefill_policy"),
        (lambda: checked(OracleChunk(64), 16), ValueError, "reads prompts only; pass it as prefill_policy"),
        (lambda: checked(Oracle(64), 16, prefills=True), ValueError, "selects for one query; pass it as policy"),
        (lambda: RandomChunk(8, chunk=0), ValueError, "RandomChunk: expected chunk to be at least 1, got 0"),
        (lambda: SinkWindowChunk(4), ValueError, "a budget above the sink of 4 tokens, .* got a budget of 4"),
        (lambda: SinkWindow(8, sink=True), TypeError, "sink to be an integer, got True"),
        (lambda: Random(8, seed=-1), ValueError, "seed to be an integer of at least 0, got -1"),
        (lambda: Random(8, granularity="row"), ValueError, "granularity 'token' or 'page', got 'row'"),
        (lambda: Random(8, granularity="page").check(16), ValueError, "at least one page, 16 tokens, got 8"),
        (lambda: TopP(64, p=0), ValueError, r"expected p in \(0, 1\].*got 0"),
        (lambda: TopP(64, beta=2), ValueError, r"expected beta in \[0, 1\], got 2"),
        (lambda: TopP(16).check(16), ValueError, "at least two pages, 32 tokens, got 16"),
        (lambda: TopP(64, dense_layers=-1), ValueError, "dense_layers to be at least 0, got -1"),
        (lambda: SampleAttention(64, alpha=1.5), ValueError, r"alpha in \(0, 1\] or None, got 1.5"),
        (lambda: SampleAttention(64, recent=65), ValueError, "recent within the budget of 64 tokens, got 65"),
        (lambda: SampleAttention(64, n_queries=0), ValueError, "n_queries to be at least 1, got 0"),
    ],
)
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("policy", [SinkWindow(8), Oracle(8), Random(8), TopP(64)], ids=str)
def test_methods_for_decoding_say_so_of_a_chunk(policy):
    case = Case()
    with pytest.raises(ValueError, match="expected one query token per row, got 3"):
        policy.choose(queries(case, 3), view_of(case)[1], None)
