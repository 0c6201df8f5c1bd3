"""Quest: which pages it takes, against a transcription of the rules in NumPy, and the edges of the budget."""

import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.policies.quest import Quest
from tests.pallas_kernels.cases import Case, fill, queries


def numpy_bounds(case, q, filled, beta):
    """[B, H, P] bounds of the live pages, -inf elsewhere."""
    q = np.asarray(q, np.float64)
    out = np.full((len(case.lengths), case.heads, case.pages), -np.inf)
    for row, length in enumerate(case.lengths):
        for page in range(-(-length // case.page_size)):
            real = filled.keys[row, page * case.page_size : min(length, (page + 1) * case.page_size)]
            for head in range(case.heads):
                keys = real[:, head // case.group]
                middle, half = (keys.max(0) + keys.min(0)) / 2, (keys.max(0) - keys.min(0)) / 2
                out[row, head, page] = q[row, head] @ middle + beta * np.abs(q[row, head]) @ half
    return out


def numpy_shared(bounds, reduce, head_dim):
    """One ranking ``[P]`` from the bounds ``[G, P]`` of a group."""
    if reduce == "mean":
        return bounds.mean(axis=0)
    if reduce == "max":
        return bounds.max(axis=0)
    live = np.isfinite(bounds[0])
    if reduce in ("sum_softmax", "max_softmax"):
        weights = np.exp((bounds - bounds.max(axis=1, keepdims=True)) / np.sqrt(head_dim))
        shares = weights / weights.sum(axis=1, keepdims=True)
        return np.where(live, shares.sum(axis=0) if reduce == "sum_softmax" else shares.max(axis=0), -np.inf)
    order = np.argsort(-bounds, axis=1, kind="stable")
    taken = list(dict.fromkeys(order.T.ravel().tolist()))  # round by round, the first mention counts
    ranking = np.empty(bounds.shape[1])
    ranking[taken] = -np.arange(len(taken))
    return np.where(live, ranking, -np.inf)


def numpy_select(ranking, length, policy, page_size):
    """The set of pages that a list takes."""
    used = -(-length // page_size)
    order = [page for page in np.argsort(-ranking, kind="stable") if page < used]
    if policy.variant == "sim":
        return set(order[: max(3, min(policy.budget, length) // page_size)])
    if length <= policy.budget:
        return set(range(used))
    forced = [used - 1] + (list(range(min(policy.sink_pages, used - 1))) if policy.variant == "quest" else [])
    return set((forced + [page for page in order if page not in forced])[: policy.budget // page_size])


def select(policy, case, q, filled):
    scores = policy.score(q, filled.meta, filled.lengths, case.page_size, None)
    return policy.select(scores, filled.lengths, case.page_size)


POLICIES = [
    Quest(64),
    Quest(64, reduce="max"),
    Quest(64, reduce="sum_softmax"),
    Quest(64, reduce="max_softmax"),
    Quest(64, reduce="mean"),
    Quest(64, reduce="round_robin"),
    Quest(64, reduce="per_head"),
    Quest(64, ranking="box"),
    Quest(64, ranking="shrunk_box", beta=0.0),
    Quest(64, variant="sim", ranking="shrunk_box"),
    Quest(64, variant="kernel"),
    Quest(64, variant="sim"),
    Quest(64, sink_pages=2),
    Quest(70),
    Quest(16),
    Quest(32),
]


@pytest.mark.parametrize("case", [
    Case(lengths=(128, 97, 65, 64, 63, 17, 16, 15, 1)),
    Case(lengths=(128, 100), group=3, kv_heads=3),
    Case(lengths=(128, 100), group=1),
    Case(lengths=(100,), group=4, kv_heads=1, page_size=8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_takes_what_the_rules_say(policy, case):
    filled, q = fill(case), queries(case, 1)[:, 0]
    pages, counts = (np.asarray(x) for x in select(policy, case, q, filled))
    ranking = policy.ranking or {"quest": "shrunk_box", "kernel": "box", "sim": "box"}[policy.variant]
    bounds = numpy_bounds(case, q, filled, 1.0 if ranking == "box" else policy.beta)
    per_head = policy.variant == "sim" or policy.reduce == "per_head"
    assert pages.shape[1] == (case.heads if per_head else case.kv_heads)
    for row, length in enumerate(case.lengths):
        for one in range(pages.shape[1]):
            own = bounds[row, one : one + 1] if per_head else bounds[row].reshape(case.kv_heads, case.group, -1)[one]
            agreed = policy.reduce or {"quest": "max_softmax", "kernel": "mean"}.get(policy.variant)
            ranking = own[0] if per_head else numpy_shared(own, agreed, case.head_dim)
            live = pages[row, one, : counts[row, one]]
            assert (np.diff(live) > 0).all(), "ascending, no page twice"
            assert set(live.tolist()) == numpy_select(ranking, length, policy, case.page_size)
            assert (pages[row, one] >= 0).all() and (pages[row, one] < case.pages).all(), "in range, dead ones too"


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_tokens_read_stay_within_the_budget(page_size):
    case = Case(lengths=(4096, 3000, 513, 512), capacity=4096, page_size=page_size, head_dim=16)
    policy = Quest(512)
    _, counts = select(policy, case, queries(case, 1)[:, 0], fill(case))
    assert (np.asarray(counts)[:3] * page_size <= 512).all()
    assert (np.asarray(counts)[3] == 512 // page_size).all()


@pytest.mark.parametrize("length", [*range(49, 66), 100, 112, 113])
def test_a_row_within_the_budget_is_read_whole(length):
    case = Case(lengths=(length,))
    for budget in (64, 100, 112, 128):
        _, counts = select(Quest(budget), case, queries(case, 1)[:, 0], fill(case))
        used = -(-length // 16)
        whole = length <= budget
        assert (np.asarray(counts) == (used if whole else budget // 16)).all(), (length, budget)


def test_ties_go_to_the_lowest_page():
    case = Case(lengths=(128,))
    filled = fill(case)
    same = jnp.broadcast_to(filled.meta[:, :, :1], filled.meta.shape)
    policy = Quest(64)
    scores = policy.score(queries(case, 1)[:, 0], same, filled.lengths, 16, None)
    pages, _ = policy.select(scores, filled.lengths, 16)
    assert pages.tolist() == [[[0, 1, 2, 7]] * 2]


@pytest.mark.parametrize("bad", [3e38, float("inf"), float("nan")])
def test_one_bound_that_overflowed_spoils_no_other_page(bad):
    case = Case(lengths=(128, 100))
    filled, q = fill(case), queries(case, 1)[:, 0]
    meta = filled.meta.at[0, :, 3].set(jnp.where(jnp.arange(filled.meta.shape[-1]) < case.head_dim, -bad, bad))
    policy = Quest(64)
    scores = policy.score(q, meta, filled.lengths, 16, None)
    assert not np.isnan(scores).any()
    pages, _ = policy.select(scores, filled.lengths, 16)
    assert all({0, 3, 7} <= set(row) for row in pages[0].tolist())
    other, _ = policy.select(policy.score(q, filled.meta, filled.lengths, 16, None), filled.lengths, 16)
    assert pages[1].tolist() == other[1].tolist()


def test_a_head_sure_of_one_page_still_ranks_the_rest():
    """Its other shares are below the smallest float32; they must not tie."""
    policy = Quest(48, sink_pages=0)
    own = jnp.array([[5000.0, 10, 40, 30, 20, 0, 0, 0]])  # G = 1: its order is the page's order
    scores = policy.agree(own[None, None], 16, jnp.array([128]), 16)
    pages, _ = policy.select(scores, jnp.array([128]), 16)
    assert pages.tolist() == [[[0, 2, 7]]]


def test_the_current_page_is_never_the_one_that_gives_way():
    case = Case(lengths=(128,))
    filled, q = fill(case), queries(case, 1)[:, 0]
    huge = filled.meta.at[:, :, :-1].set(jnp.where(jnp.arange(128) < 64, -3e38, 3e38))  # overflows to +inf
    for policy in (Quest(16), Quest(32), Quest(48, sink_pages=8), Quest(32, reduce="mean")):
        scores = policy.score(q, huge, filled.lengths, 16, None)
        pages, counts = policy.select(scores, filled.lengths, 16)
        live = np.asarray(pages)[0, 0, : counts[0, 0]]
        assert 7 in live, policy


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget to be at least 1, got 0"),
        ({"budget": 64.0}, TypeError, "budget to be an integer, got 64.0"),
        ({"budget": True}, TypeError, "budget to be an integer, got True"),
        ({"budget": 64, "dense_layers": -1}, ValueError, "dense_layers to be at least 0"),
        ({"budget": 64, "variant": "paper"}, ValueError, "'quest', 'kernel', 'sim'"),
        ({"budget": 64, "ranking": "ball"}, ValueError, "'box', 'shrunk_box'"),
        ({"budget": 64, "reduce": "median"}, ValueError, "'sum_softmax', 'max_softmax', 'round_robin', 'per_head'"),
        ({"budget": 64, "beta": 1.5}, ValueError, r"beta in \[0, 1\]"),
        ({"budget": 64, "beta": float("nan")}, ValueError, r"beta in \[0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(as_a_user, fields, error, message):
    with pytest.raises(error, match=message):
        Quest(**fields)


@pytest.mark.parametrize("budget", [1, 15])
def test_a_budget_below_a_page_is_refused(budget):
    with pytest.raises(ValueError, match=f"at least one page, 16 tokens, got {budget}"):
        Quest(budget).check(16)
