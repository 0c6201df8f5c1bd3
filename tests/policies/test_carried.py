"""What is handed from layer to layer and from step to step: every layer and step against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.evals import fidelity
from quest_jax.evals.capture import capture
from quest_jax.policies.less_is_more import LessIsMore
from quest_jax.policies.quest_reuse import QuestReuse
from quest_jax.policies.tidal_decode import TidalDecode
from tests.models_for_tests import DEEP, deep
from tests.policies.test_quest import numpy_shared

KV_HEADS, WIDTH, CAPACITY, PAGE, LAYERS = 2, 16, 64, 8, 5
PROMPTS, STEPS, BUDGET = (50, 13, 41), 3, 24
CHOSEN = dict(dense_layers=1, selecting=(1, 3))


@functools.cache
def draw(group, layers=LAYERS):
    rng = np.random.default_rng(group)
    shape = (layers, len(PROMPTS), CAPACITY)
    q = 2 * rng.standard_normal((*shape, KV_HEADS * group, WIDTH))
    k, v = rng.standard_normal((2, *shape, KV_HEADS, WIDTH))
    return tuple(x.astype(np.float32) for x in (q, k, v))


@jax.jit
def through_layers(q, k, v, state, new):
    state, outs = quest_jax.extend(state, new), []
    for layer in range(len(q)):
        out, state = quest_jax.attend(layer, q[layer], k[layer], v[layer], state)
        outs.append(out)
    return jnp.stack(outs), state


def run(policy, group, rows=slice(None), steps=STEPS, layers=LAYERS):
    """Outputs ``[STEPS, layers, B, H, D]`` of decode steps after dense prompts, and what every step read."""
    q, k, v = (x[:, rows] for x in draw(group, layers))
    prompts = np.array(PROMPTS)[rows]
    state = quest_jax.init_attention(
        layers, KV_HEADS, WIDTH, batch=len(prompts), capacity=CAPACITY, page_size=PAGE, policy=policy
    )
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.cache.kv, state.cache.meta))
    state = state.replace(cache=state.cache.replace(kv=poisoned[0], meta=poisoned[1]))
    longest = max(PROMPTS)
    _, state = through_layers(*(x[:, :, :longest] for x in (q, k, v)), state, jnp.asarray(prompts))
    outs, reads = [], []
    for i in range(steps):
        at = (prompts + i)[None, :, None, None, None]
        own = (np.take_along_axis(x, at, axis=2) for x in (q, k, v))
        out, state = through_layers(*own, state, jnp.ones(len(prompts), int))
        outs.append(np.asarray(out)[:, :, 0])
        reads.append({name: np.asarray(getattr(state.reads, name)) for name in ("read", "live", "scored", "whole")})
    return np.stack(outs), reads


def attended(q, k, v, lists):
    """[H, D] of the query ``q [H, D]`` over ``lists``, one of tokens for every KV head."""
    out = np.zeros(q.shape)
    group = len(q) // KV_HEADS
    for head, query in enumerate(q):
        tokens = np.array(lists[head // group])
        scores = k[tokens, head // group] @ query / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[tokens, head // group]
    return out


def in_turn(scores, budget, recent, sink):
    """LessIsMore's list by ``scores [H, L]``, head after head and rank after rank."""
    length = scores.shape[1]
    if length <= budget:
        return list(range(length))
    ranked = int(budget * (1 - recent))
    last = budget - ranked - sink
    orders = [[t for t in np.argsort(-one, kind="stable") if sink <= t < length - last] for one in scores]
    taken = []
    for rank in range(ranked):
        for order in orders:
            if rank < len(order) and order[rank] not in taken and len(taken) < ranked:
                taken.append(int(order[rank]))
    return sorted([*range(sink), *taken, *range(length - last, length)])


def most_attended(scores, budget, group):
    """TidalDecode's lists by ``scores [H, L]``, one for every KV head."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mass = (weights / weights.sum(axis=1, keepdims=True)).reshape(KV_HEADS, group, -1).sum(axis=1)
    mass[:, -1] = np.inf
    return [sorted(np.argsort(-one, kind="stable")[:budget].tolist()) for one in mass]


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [
    LessIsMore(BUDGET, **CHOSEN), TidalDecode(BUDGET, **CHOSEN),
    pytest.param(LessIsMore(BUDGET, selecting=(3,), recent=0.5, sink=0), marks=pytest.mark.slow),
], ids=lambda policy: f"{type(policy).__name__}-{policy.selecting}")  # fmt: skip
def test_layers_read_what_the_last_that_chose_has_listed(policy, group):
    outs, reads = run(policy, group)
    q, k, v = (x.astype(np.float64) for x in draw(group))
    for row, prompt in enumerate(PROMPTS):
        for i in range(STEPS):
            length = prompt + i + 1
            lists = None
            for layer in range(LAYERS):
                own, keys, values = q[layer, row, length - 1], k[layer, row, :length], v[layer, row, :length]
                whole = lists is None or layer in policy.selecting
                seen = [range(length)] * KV_HEADS if whole else lists
                want = attended(own, keys, values, seen)
                np.testing.assert_allclose(outs[i, layer, row], want, atol=2e-5, err_msg=f"{row} {i} {layer}")
                assert (
                    reads[i]["read"][layer, row] == sum(map(len, seen)) and reads[i]["live"][layer, row] == 2 * length
                )
                assert reads[i]["scored"][layer, row] == (KV_HEADS * length if layer in policy.selecting else 0)
                assert reads[i]["whole"][layer, row] == (whole or length <= BUDGET)
                if layer in policy.selecting:
                    scores = np.einsum("hd,lhd->hl", own, np.repeat(keys, group, axis=1)) / np.sqrt(WIDTH)
                    if isinstance(policy, LessIsMore):
                        lists = [in_turn(scores, BUDGET, policy.recent, policy.sink)] * KV_HEADS
                    else:
                        lists = most_attended(scores, BUDGET, group)
    if group == 3:
        np.testing.assert_allclose(run(policy, group, slice(1, 2))[0][:, :, 0], outs[:, :, 1], atol=2e-6)


def test_layers_of_one_role_share_a_trace():
    policy, (q, k, v) = TidalDecode(BUDGET, **CHOSEN), (x[:, :, :1] for x in draw(3))
    state = quest_jax.init_attention(LAYERS, KV_HEADS, WIDTH, batch=3, capacity=CAPACITY, page_size=PAGE, policy=policy)
    program = jax.make_jaxpr(through_layers)(q, k, v, state, jnp.ones(3, int)).eqns[0].params["jaxpr"].jaxpr
    layers = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.params.get("name") == "_attend_alone"]
    traces = [id(one) for one in layers]
    assert len({*traces}) == 3 and traces[1] == traces[3] and traces[2] == traces[4]


def test_layers_that_choose_by_the_depth_and_around_windows():
    assert LessIsMore(64).selects_in(32) == (2, 13) and TidalDecode(64).selects_in(30) == (2, 12)
    assert LessIsMore(64).selects_in(9) == (2,) and LessIsMore(64, dense_layers=5).selects_in(32) == (5, 13)
    roles = [LessIsMore(64).at(layer, 10).role for layer in range(10)]
    assert roles == ["whole"] * 2 + ["select", "reuse", "select"] + ["reuse"] * 5
    # What nothing would read is not chosen: in a last layer, and before one that chooses again.
    assert TidalDecode(64).at(2, 3).role == "whole"
    again = TidalDecode(64, selecting=(2, 3))
    assert [again.at(layer, 5).role for layer in range(5)] == ["whole"] * 3 + ["select", "reuse"]
    one_in_three = dataclasses.replace(DEEP, n_layers=32, windows=tuple(0 if i % 3 == 1 else 128 for i in range(32)))
    fitted = LessIsMore(64).fitted(one_in_three)
    assert fitted.selects_in(32) == (4, 13) and fitted.fitted(one_in_three) == fitted
    assert LessIsMore(64).fitted(DEEP) == LessIsMore(64)


def bounds(keys, length):
    """Quest's shrunk box: lows and highs of the pages of ``keys [L, K, D]``."""
    pages = [keys[at : min(at + PAGE, length)] for at in range(0, length, PAGE)]
    return np.stack([(page.min(axis=0), page.max(axis=0)) for page in pages], axis=2)  # [2, K, P, D]


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [3, pytest.param(11, marks=pytest.mark.slow)])
def test_steps_read_what_the_last_that_chose_has_listed(every, group):
    steps, policy = 13, QuestReuse(BUDGET, every=every, dense_layers=1)
    outs, reads = run(policy, group, steps=steps, layers=3)
    q, k, v = (x.astype(np.float64) for x in draw(group, 3))
    for row, prompt in enumerate(PROMPTS):
        for layer in range(3):
            for i in range(steps):
                length = prompt + i + 1
                used = -(-length // PAGE)
                if layer == 0:
                    lists = [range(used)] * KV_HEADS
                elif i % every == 0:
                    low, high = bounds(k[layer, row, :length], length)
                    own = q[layer, row, length - 1].reshape(KV_HEADS, group, 1, WIDTH)
                    by_head = (own * ((low + high) / 2)[:, None] + abs(own) * ((high - low) / 4)[:, None]).sum(axis=-1)
                    score = np.array([numpy_shared(one, "max_softmax", WIDTH) for one in by_head])
                    score[:, 0] = score[:, -1] = np.inf
                    lists = [sorted(np.argsort(-one, kind="stable")[: BUDGET // PAGE].tolist()) for one in score]
                else:
                    lists = [sorted({*one, *range(one[-1], used)}) for one in lists]
                tokens = [[t for p in one for t in range(p * PAGE, min(length, (p + 1) * PAGE))] for one in lists]
                want = attended(q[layer, row, length - 1], k[layer, row], v[layer, row], tokens)
                np.testing.assert_allclose(outs[i, layer, row], want, atol=2e-5, err_msg=f"{row} {layer} {i}")
                assert reads[i]["read"][layer, row] == sum(map(len, lists))
                assert reads[i]["scored"][layer, row] == (KV_HEADS * used if layer and i % every == 0 else 0)
    if group == 3:
        alone = run(policy, group, slice(1, 2), steps, layers=3)[0]
        np.testing.assert_allclose(alone[:, :, 0], outs[:, :, 1], atol=2e-6)


def test_choosing_in_every_step_is_quest():
    outs, reads = run(QuestReuse(BUDGET, every=1, dense_layers=0), 3, layers=1)
    same, expected = run(quest_jax.Quest(BUDGET, dense_layers=0), 3, layers=1)
    np.testing.assert_array_equal(outs, same)
    for one, other in zip(reads, expected, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_rows_that_are_read_whole_keep_their_list():
    """Rows below ``dense_below`` are covered; when they have grown to it they choose."""
    policy = QuestReuse(BUDGET, every=4, dense_layers=0, dense_below=44)
    _, reads = run(policy, 3, steps=8, layers=1)
    scored = np.stack([one["scored"][0] for one in reads])  # [steps, B]
    assert (scored[:, 0] > 0).tolist() == [True, False, False, False] * 2
    assert not scored[:, 1].any()
    assert (scored[:, 2] > 0).tolist() == [False, False, True, False, False, False, True, False]


@pytest.mark.slow
def test_a_row_that_has_ended_keeps_its_turn():
    params, policy = deep(), QuestReuse(16, every=3, dense_layers=0)
    state = quest_jax.prefill(
        params, [[1, 2, 3, 4] * 12, [5, 6, 7] * 9], policy=policy, page_size=PAGE, eos_token_ids=()
    )
    state = state.replace(done=jnp.array([False, True]))
    for chosen in (49, 49, 49, 52):
        state, _ = quest_jax.decode_step(params, state)
        assert state.attention.carry[2]["length"].tolist() == [chosen, 0]
    state = quest_jax.feed_tokens(params, state, [[5], [6]])  # the second step of one, the first of the other
    assert (np.asarray(state.attention.reads.scored)[2] > 0).tolist() == [False, True]
    assert state.attention.carry[2]["length"].tolist() == [52, 28]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [
    LessIsMore(24), TidalDecode(24), QuestReuse(24, every=3),
], ids=lambda policy: type(policy).__name__)  # fmt: skip
def test_generation(policy):
    params, prompts = deep(), [[1, 2, 3, 4] * 12, [5, 6, 7] * 9]
    options = dict(max_new_tokens=10, page_size=PAGE, eos_token_ids=())
    out = quest_jax.generate(params, prompts, policy=policy, **options)
    sparse = np.asarray(out.stats.sparse)
    assert sparse[:, 3].all() and not sparse[:, :2].any()
    assert sparse[:, 2].all() == isinstance(policy, QuestReuse)
    scored = np.asarray(out.stats.reads.scored)
    lengths = np.array([48, 27]) + 1 + np.arange(10)[:, None]
    if isinstance(policy, QuestReuse):
        assert ((scored[:, 3] > 0).T == (np.arange(10) % 3 == 0)).all()
    else:
        np.testing.assert_array_equal(scored[:, 2], DEEP.n_kv_heads * lengths)
        assert not scored[:, 3].any()
    whole = quest_jax.generate(params, prompts, policy=dataclasses.replace(policy, budget=64), **options)
    np.testing.assert_array_equal(whole.tokens, quest_jax.generate(params, prompts, **options).tokens)
    # A policy that hands on replaces any other: it needs nothing of the prompt.
    dense = quest_jax.prefill(params, prompts, capacity=96, page_size=PAGE, eos_token_ids=())
    assert dense.attention.carry is None
    state = quest_jax.replace_policy(dense, policy=policy)
    for i in range(10):
        state, token = quest_jax.decode_step(params, state)
        np.testing.assert_array_equal(token, out.tokens[:, i])
    assert state.attention.policy == policy and quest_jax.replace_policy(state).attention.carry is None
    plain = dataclasses.replace(policy, budget=96) if isinstance(policy, QuestReuse) else policy
    more = quest_jax.plan(params, 2, 96, policy=plain, page_size=PAGE)
    kept = jax.tree.leaves(quest_jax.replace_policy(dense, policy=plain).attention.carry)
    assert more.metadata == quest_jax.plan(params, 2, 96, page_size=PAGE).metadata + sum(x.nbytes for x in kept)


@pytest.mark.slow
def test_figures_of_a_layer_are_by_the_list_that_it_was_handed():
    ids, queries, budget = [(7 * i * i + i) % 97 for i in range(260)], 6, 40
    found = fidelity.run(deep(), ids, {"tidal": TidalDecode(budget)}, queries=queries, page_size=PAGE)["tidal"]
    assert found.mass[0].min() > 1 - 1e-5 and found.error[0].max() < 1e-4
    captured = capture(deep(), ids, PAGE)
    masses = []
    for at in range(len(ids) - queries, len(ids)):
        weights = []
        for layer in (2, 3):
            keys, _ = fidelity._by_position(captured.state.cache.kv[layer], DEEP.head_dim)
            own = np.asarray(captured.queries[layer][0, at], np.float64)
            keys = np.repeat(np.asarray(keys[0, : at + 1], np.float64), DEEP.group_size, axis=1)
            scores = np.einsum("hd,lhd->hl", own, keys) / np.sqrt(DEEP.head_dim)
            weights.append(np.exp(scores - scores.max(axis=1, keepdims=True)))
            weights[-1] /= weights[-1].sum(axis=1, keepdims=True)
        mass = weights[0].reshape(KV_HEADS, -1, at + 1).sum(axis=1)
        mass[:, -1] = np.inf
        lists = [np.argsort(-one, kind="stable")[:budget] for one in mass]
        masses.append([weights[1][h, lists[h // DEEP.group_size]].sum() for h in range(DEEP.n_heads)])
    np.testing.assert_allclose(found.mass[1], np.mean(masses, axis=0), atol=1e-4)
    lengths = np.arange(len(ids) - queries, len(ids)) + 1
    assert found.share == pytest.approx((1.5 * lengths.sum() + budget * queries) / (2 * lengths.sum()))


def test_what_cannot_work_is_refused(as_a_user):
    state = quest_jax.init_attention(4, KV_HEADS, WIDTH, batch=1, capacity=32)
    q = jnp.ones((1, 1, 6, WIDTH))
    kv = jnp.ones((1, 1, KV_HEADS, WIDTH))
    with pytest.raises(ValueError, match="LessIsMore hands on what it chooses, and this state has no room for it"):
        quest_jax.attend(0, q, kv, kv, state.replace(policy=LessIsMore(24)))
    state = quest_jax.init_attention(4, KV_HEADS, WIDTH, batch=1, capacity=32, policy=LessIsMore(24))
    with pytest.raises(ValueError, match="layer that sees everything .* got layer 2, which has a window of 8"):
        quest_jax.attend(2, q, kv, kv, state, window=8)
    with pytest.raises(ValueError, match=r"selecting below the 4 layers of the model, got \(2, 13\)"):
        quest_jax.prefill(deep(), [[1, 2]], policy=TidalDecode(24, selecting=(2, 13)))
    windows = dataclasses.replace(DEEP, windows=(0, 0, 64, 0))
    with pytest.raises(ValueError, match=r"layers that see everything, \[0, 1, 3\], got \(2,\)"):
        TidalDecode(24, selecting=(2,)).fitted(windows)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: LessIsMore(24, granularity="page"), ValueError, "LessIsMore: expected granularity 'token', got 'page'"),
    (lambda: TidalDecode(24, selecting=[2]), TypeError, r"selecting to be a tuple of layers or None, got \[2\]"),
    (lambda: TidalDecode(24, selecting=(4, 3)), ValueError, r"selecting to be ascending, .* got \(4, 3\)"),
    (lambda: TidalDecode(24, selecting=(1,)), ValueError, r"from layer 2 on \(dense_layers\), got \(1,\)"),
    (lambda: TidalDecode(24, role="last"), ValueError, "role to be left alone, got 'last'"),
    (lambda: LessIsMore(16), ValueError, "a sink of at least 0 and below the 4 tokens that go by position, got 4"),
    (lambda: LessIsMore(16, sink=1.5), TypeError, "sink to be an integer, got 1.5"),
    (lambda: LessIsMore(16, recent=2), ValueError, r"recent in \[0, 1\], a share of the budget, got 2"),
    (lambda: LessIsMore(16, recent="all"), TypeError, "recent to be a number, got 'all'"),
    (lambda: QuestReuse(16, every=0), ValueError, "every to be at least 1, got 0"),
    (lambda: QuestReuse(16, every=2.5), TypeError, "every to be an integer, got 2.5"),
    (lambda: QuestReuse(16, reduce="per_head"), ValueError, "one list per KV head, got one per query head"),
    (lambda: QuestReuse(16, variant="sim"), ValueError, "one list per KV head, got one per query head"),
])  # fmt: skip
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()
