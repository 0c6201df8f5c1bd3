"""QuoKA against a transcription of Algorithm 1 in float64 NumPy, token by token, and the edges of its budget."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax import LayerView, QuoKA
from quest_jax.cache import rebuild_metadata, rebuild_norms

HEADS, KV_HEADS, WIDTH, GROUP, PAGE = 6, 2, 16, 3, 16


prefill_attention = jax.jit(quest_jax.prefill_attention, static_argnums=0)


def unit(x):
    return x / max(np.linalg.norm(x), 1e-6)


def numpy_queries(q, policy):
    """``[K][R]`` averages over the groups of the picked queries of ``q [T, H, D]``, or these one by one."""
    picks = []
    for head in range(HEADS):
        mean = unit(q[:, head].mean(axis=0))
        picks.append([float(unit(one) @ mean) for one in q[:, head]])
    if policy.share_query_index:
        picks = [
            np.sum([picks[h] for h in range(HEADS) if h // GROUP == head // GROUP], axis=0) for head in range(HEADS)
        ]
    if len(q) > policy.n_queries:
        order = [sorted(range(len(q)), key=lambda t, p=p: (p[t], t))[: policy.n_queries] for p in picks]
    else:
        order = [list(range(len(q)))] * HEADS
    length = unit if policy.score == "cosine" else np.asarray
    queries = []
    for group in range(KV_HEADS):
        heads = range(group * GROUP, (group + 1) * GROUP)
        ranks = range(len(order[0]))
        if policy.group == "each":
            queries.append([length(q[order[head][r], head]) for head in heads for r in ranks])
            continue
        queries.append([np.mean([length(q[order[head][r], head]) for head in heads], axis=0) for r in ranks])
    return queries


def numpy_quoka(policy, q, k, v, past):
    """Which pieces of the past each KV head takes, and the output, of one row without padding.

    ``q [T, H, D]``; ``k``, ``v`` ``[past + T, K, D]``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    size = PAGE if policy.granularity == "page" else 1
    compete = policy.chunk_mode == "compete"
    end = len(k) if compete else past
    out = np.zeros(q.shape)
    taken = []
    for head, queries in enumerate(numpy_queries(q, policy)):
        scores = []
        for at in range(end):
            key = unit(k[at, head]) if policy.score == "cosine" else k[at, head]
            products = [query @ key for query in queries]
            score = max(products) if policy.reduce == "max" else sum(products) / len(products)
            scores.append(np.inf if at < policy.sink or at >= end - policy.recent else score)
        pieces = -(-end // size) if compete else end // size
        best = [max(scores[piece * size : (piece + 1) * size]) for piece in range(pieces)]
        order = sorted(range(pieces), key=lambda piece: (-best[piece], piece))
        taken.append(set(order if end <= policy.budget else order[: policy.budget // size]))
        chosen = {at for at in range(len(k)) if at // size in taken[-1]}
        if not compete:
            chosen |= set(range(past // size * size, len(k)))
        for t in range(len(q)):
            seen = sorted({at for at in chosen if at <= past + t} | {past + t})
            for h in range(head * GROUP, (head + 1) * GROUP):
                logits = k[seen, head] @ q[t, h] / np.sqrt(WIDTH)
                weights = np.exp(logits - logits.max())
                out[t, h] = weights @ v[seen, head] / weights.sum()
    return taken, out


def run(policy, q, k, v, pasts, lengths, table=False):
    """Selection and output of the chunk ``q [B, T, H, D]`` after ``pasts`` tokens; rows end at ``lengths``."""
    state = quest_jax.init_attention(
        1, KV_HEADS, WIDTH, batch=len(q), capacity=k.shape[1], prefill_policy=policy, policy=policy, page_size=PAGE
    )
    if table:  # the rows' pages interleaved in the pool
        rows, pages = len(q), state.cache.pages_per_row
        order = jnp.arange(rows * pages, dtype=jnp.int32).reshape(pages, rows).T
        state = state.replace(cache=state.cache.replace(page_table=order))
    before = jnp.asarray(pasts)
    filled = quest_jax.extend(state.replace(prefill_policy=quest_jax.Dense()), before)
    _, filled = prefill_attention(0, jnp.zeros((*k.shape[:2], HEADS, WIDTH)), k, v, filled)
    state = quest_jax.extend(filled.replace(prefill_policy=policy), jnp.asarray(lengths) - before)
    index = jnp.minimum(before[:, None] + jnp.arange(q.shape[1]), k.shape[1] - 1)[..., None, None]
    new_k, new_v = (jnp.take_along_axis(x, index, axis=1) for x in (k, v))
    out, state = prefill_attention(0, q, new_k, new_v, state)
    cache = state.cache
    view = LayerView(
        cache.kv[0], cache.meta[0], cache.norms[0] if cache.norms else None, before, cache.lengths, cache.page_table
    )
    return policy.choose(q, view, None), out, state


def check(policy, q, k, v, pasts, lengths, **options):
    selection, out, state = run(policy, q, k, v, pasts, lengths, **options)
    for row, (past, length) in enumerate(zip(pasts, lengths, strict=True)):
        new = length - past
        expected_sets, expected = numpy_quoka(policy, q[row, :new], k[row, :length], v[row, :length], past)
        for head in range(KV_HEADS):
            live = np.asarray(selection.pages[row, head, : selection.counts[row, head]])
            assert (np.diff(live) > 0).all(), "ascending, none twice"
            chosen = set(live.tolist())
            if policy.chunk_mode == "dense":
                first = past // policy.unit(PAGE)
                assert set(range(first, -(-length // policy.unit(PAGE)))) <= chosen, "the chunk itself"
                chosen = {one for one in chosen if one < first}
            assert chosen == expected_sets[head]
        np.testing.assert_allclose(out[row, :new], expected, atol=1e-5)
        assert (np.asarray(out[row, new:]) == 0).all()
    assert int(state.cache.lengths.max()) == max(lengths)


def draw(rows=2, tokens=32, room=192, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, tokens, HEADS, WIDTH)) + rng.normal(size=(HEADS, WIDTH))
    k, v = rng.normal(size=(2, rows, room, KV_HEADS, WIDTH))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


base = functools.partial(QuoKA, 40, n_queries=8, granularity="token")
POLICIES = {
    "default": base(),
    "each": base(group="each"),
    "each-shared-dot-mean": base(group="each", share_query_index=True, score="dot", reduce="mean"),
    "each-page": base(group="each", granularity="page"),
    "shared": base(share_query_index=True),
    "dot": base(score="dot"),
    "mean": base(reduce="mean"),
    "dot-mean": base(score="dot", reduce="mean"),
    "compete": base(chunk_mode="compete"),
    "page": base(granularity="page"),
    "page-compete": base(granularity="page", chunk_mode="compete"),
    "sink-recent": base(sink=4, recent=9),
    "compete-recent": base(chunk_mode="compete", recent=9),
    "one-query": base(n_queries=1),
    "all-queries": base(n_queries=32),
    "one-token": QuoKA(1, n_queries=8, granularity="token"),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
some = {name: POLICIES[name] for name in ("default", "each", "shared", "dot-mean", "page", "compete")}
some_policies = pytest.mark.parametrize("policy", some.values(), ids=some)


@each_policy
def test_is_algorithm_1(policy):
    """Rows of a batch: a whole chunk, a short one, an empty past, a past within the budget, a chunk of one token."""
    q, k, v = draw(rows=5, seed=1)
    check(policy, q, k, v, (160, 150, 0, 37, 100), (192, 155, 32, 69, 101))


@pytest.mark.parametrize("name", ["default", "page", "compete", "mean"])
def test_through_a_page_table(name):
    q, k, v = draw(seed=2)
    check(POLICIES[name], q, k, v, (150, 41), (182, 73), table=True)


@some_policies
@pytest.mark.parametrize("what", ["zero keys", "zero queries", "equal keys", "equal queries", "opposite queries"])
def test_adversarial_input(policy, what):
    q, k, v = draw(seed=3)
    if what == "zero keys":
        k = k.at[:, 5:60].set(0)
    elif what == "zero queries":
        q = q.at[:, 3:20].set(0)
    elif what == "equal keys":  # ties at the cut: the first win
        k = jnp.broadcast_to(k[:, :1], k.shape)
    elif what == "equal queries":
        q = jnp.broadcast_to(q[:, :1], q.shape)
    else:  # the chunk's mean is zero
        q = jnp.concatenate([q[:, :16], -q[:, :16]], axis=1)
    if what == "opposite queries" and policy.n_queries < 32:
        # Cosines with a mean of zero are rounding: which are picked is not defined, but they are, and nothing is NaN.
        _, out, _ = run(policy, q, k, v, (150, 160), (182, 192))
        assert np.isfinite(out).all()
        return
    check(policy, q, k, v, (150, 160), (182, 192))


@some_policies
def test_memory_outside_the_tokens_changes_nothing(policy):
    q, k, v = draw(seed=4)
    lengths, pasts = (150, 97), (120, 90)
    real = (jnp.arange(k.shape[1]) < jnp.array(lengths)[:, None])[..., None, None]
    _, clean, _ = run(policy, q, k, v, pasts, lengths)
    selection, dirty, _ = run(policy, q, jnp.where(real, k, 0), jnp.where(real, v, 0), pasts, lengths)
    np.testing.assert_array_equal(clean, dirty)

    def poison(x):
        return jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x

    state = quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=2, capacity=192, prefill_policy=policy)
    outs = []
    for start in (state, jax.tree.map(poison, state)):
        for at, size in ((0, 96), (96, 32)):
            start = quest_jax.extend(start, jnp.clip(jnp.array([150, 97]) - at, 0, size))
            piece = jnp.tile(q, (1, 3, 1, 1))[:, :size]
            out, start = prefill_attention(0, piece, k[:, at : at + size], v[:, at : at + size], start)
        outs.append(out)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("chunk", [16, 31, 64])
def test_a_past_within_the_budget_is_dense_attention(granularity, chunk):
    q, k, v = draw(tokens=192, seed=5)
    outs = []
    for policy in (None, QuoKA(128, n_queries=4, granularity=granularity)):
        state = quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=2, capacity=192, prefill_policy=policy)
        out = []
        for at in range(0, 128, chunk):
            state = quest_jax.extend(state, jnp.clip(jnp.array([128, 77]) - at, 0, chunk))
            piece = slice(at, at + chunk)
            got, state = prefill_attention(0, q[:, piece], k[:, piece], v[:, piece], state)
            out.append(got)
        outs.append(jnp.concatenate(out, axis=1)[:, :128])
    np.testing.assert_allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("length", [33, 40, 47])
def test_a_row_within_a_budget_that_is_no_multiple_of_a_page_is_read_whole(granularity, length):
    """Next to a long row, so that not the whole batch is within it."""
    q, k, v = draw(seed=10)
    policy = QuoKA(47, n_queries=8, granularity=granularity, chunk_mode="compete")
    past = length - 32
    _, out, _ = run(policy, q, k, v, (160, past), (192, length))
    _, dense, _ = run(quest_jax.QuoKA(192, granularity=granularity), q, k, v, (160, past), (192, length))
    np.testing.assert_allclose(out[1], dense[1], atol=1e-5)


def test_a_cache_without_norms_is_refused():
    q, k, v = draw(seed=11)
    state = quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=2, capacity=192)
    state = quest_jax.extend(state.replace(prefill_policy=POLICIES["default"]), jnp.array([32, 32]))
    with pytest.raises(ValueError, match="expected a cache with inverse key norms, got one without"):
        quest_jax.prefill_attention(0, q, k[:, :32], v[:, :32], state)


@pytest.mark.slow
def test_selecting_everything_is_dense_attention_too():
    """Not by the branch that skips selection: one row is long, so the others go through it."""
    q, k, v = draw(seed=6)
    _, out, _ = run(QuoKA(64, granularity="token"), q, k, v, (150, 60), (182, 92))
    _, dense, _ = run(QuoKA(192, granularity="token"), q, k, v, (150, 60), (182, 92))
    np.testing.assert_allclose(out[1], dense[1], atol=1e-5)
    assert np.abs(out[0] - dense[0]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICIES["default"], POLICIES["page"], POLICIES["compete"]], ids=str)
def test_chunks_of_any_size_fill_the_same_cache(policy):
    q, k, v = draw(tokens=192, seed=7)
    caches = []
    for chunk in (7, 32, 128):
        state = quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=2, capacity=192, prefill_policy=policy)
        for at in range(0, 192, chunk):
            piece = slice(at, at + chunk)
            state = quest_jax.extend(state, jnp.clip(jnp.array([192, 131]) - at, 0, q[:, piece].shape[1]))
            _, state = prefill_attention(0, q[:, piece], k[:, piece], v[:, piece], state)
        caches.append(state.cache)
    chex.assert_trees_all_equal(*caches)
    chex.assert_trees_all_equal(caches[0].meta, rebuild_metadata(caches[0]))
    chex.assert_trees_all_equal(caches[0].norms, rebuild_norms(caches[0]))


@pytest.mark.parametrize("policy", [POLICIES[name] for name in ("default", "each", "page", "compete")], ids=str)
def test_decoding_is_a_chunk_of_one(policy):
    q, k, v = draw(tokens=1, seed=8)
    _, expected, state = run(policy, q, k, v, (150, 97), (151, 98))
    state = state.replace(cache=state.cache.replace(lengths=jnp.array([150, 97], jnp.int32)))
    new_k, new_v = (jnp.stack([x[0, 150:151], x[1, 97:98]]) for x in (k, v))
    out, state = quest_jax.decode_attention(0, q, new_k, new_v, quest_jax.extend(state, jnp.array([1, 1])))
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_head_is_heard_though_the_group_points_the_other_way():
    """What one head looks for is in no mean of the group whose others look the other way."""
    rng = np.random.default_rng(12)
    q, k, v = (0.1 * x for x in draw(rows=1, seed=12))
    wanted = jnp.asarray(unit(rng.normal(size=WIDTH)), jnp.float32)
    k = k.at[0, 70, 0].set(wanted)
    q = q.at[0, 9, 0].set(wanted).at[0, 9, 1:GROUP].set(-wanted / 2)
    heard = {}
    for group in ("mean", "each"):
        selection, *_ = run(QuoKA(4, n_queries=8, granularity="token", group=group), q, k, v, (160,), (192,))
        heard[group] = 70 in selection.pages[0, 0, : selection.counts[0, 0]].tolist()
    assert heard == {"mean": False, "each": True}


def test_what_is_read_is_counted():
    q, k, v = draw(seed=9)
    *_, state = run(POLICIES["default"], q, k, v, (150, 41), (182, 60))
    reads = state.reads
    assert reads.read.tolist() == [[KV_HEADS * (40 + 32), KV_HEADS * (40 + 19)]]
    assert reads.live.tolist() == [[KV_HEADS * 182, KV_HEADS * 60]]
    assert reads.scored.tolist() == [[KV_HEADS * 150, KV_HEADS * 41]]
    *_, state = run(POLICIES["page"], q, k, v, (150, 41), (182, 60))
    assert state.reads.read.tolist() == [[KV_HEADS * (2 + 3), KV_HEADS * (2 + 2)]]
    assert state.reads.live.tolist() == [[KV_HEADS * 12, KV_HEADS * 4]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget to be at least 1, got 0"),
        ({"budget": 64.0}, TypeError, "budget to be an integer, got 64.0"),
        ({"budget": 64, "n_queries": 0}, ValueError, "n_queries to be at least 1"),
        ({"budget": 64, "chunk": True}, TypeError, "chunk to be an integer, got True"),
        ({"budget": 64, "chunk_mode": "sparse"}, ValueError, "chunk_mode to be one of 'dense', 'compete'"),
        ({"budget": 64, "group": "max"}, ValueError, "group to be one of 'mean', 'each', got 'max'"),
        ({"budget": 64, "score": "l2"}, ValueError, "score to be one of 'cosine', 'dot', got 'l2'"),
        ({"budget": 64, "reduce": "sum"}, ValueError, "reduce to be one of 'max', 'mean', got 'sum'"),
        ({"budget": 64, "granularity": "block"}, ValueError, "granularity to be one of 'auto', 'token', 'page'"),
        ({"budget": 64, "share_query_index": 1}, TypeError, "share_query_index to be a bool, got 1"),
        ({"budget": 64, "dense_layers": -1}, ValueError, "dense_layers to be at least 0, got -1"),
        ({"budget": 64, "sink": 40, "recent": 40}, ValueError, "within the budget of 64 tokens, got 40 and 40"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused(as_a_user, fields, error, message):
    with pytest.raises(error, match=message):
        QuoKA(**fields)


def test_a_budget_below_a_page_is_refused_only_where_pages_are_listed():
    QuoKA(8, granularity="token").check(16)
    with pytest.raises(ValueError, match="at least one page, 16 tokens, got 8"):
        QuoKA(8, granularity="page").check(16)


def test_pages_of_sink_and_recent_must_fit():
    QuoKA(64, granularity="page", sink=16, recent=17).check(16)
    QuoKA(16, granularity="token", sink=8, recent=8).check(16)
    with pytest.raises(ValueError, match="at least 2 pages of 16 tokens for sink 8 and recent 1, got 16 tokens"):
        QuoKA(16, granularity="page", sink=8, recent=1).check(16)
