"""Methods that remember: every step of a generation against each written once more in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.policies.base import Policy, Sizes
from quest_jax.policies.h2o import H2O
from quest_jax.policies.keydiff import KeyDiff
from quest_jax.policies.quest_compensated import Compensated
from quest_jax.policies.sparq import SparQ
from quest_jax.policies.tova import TOVA
from tests.models_for_tests import tiny

KV_HEADS, WIDTH, CAPACITY, PAGE, CHUNK = 2, 16, 96, 8, 20
PROMPTS, STEPS = (50, 13, 41), 24


def draw(group, seed=0):
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((len(PROMPTS), CAPACITY, KV_HEADS * group, WIDTH))
    k, v = rng.standard_normal((2, len(PROMPTS), CAPACITY, KV_HEADS, WIDTH))
    return tuple(x.astype(np.float32) for x in (q, k, v + 0.5))


def run(policy, group, rows=slice(None), chunk=CHUNK):
    """Outputs ``[B, STEPS, H, D]`` of decode steps after prompts that were read in chunks."""
    q, k, v = (x[rows] for x in draw(group))
    prompts = np.array(PROMPTS)[rows]
    state = quest_jax.init_attention(
        1, KV_HEADS, WIDTH, batch=len(q), capacity=CAPACITY, page_size=PAGE, policy=policy, n_heads=q.shape[2]
    )
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.cache.kv, state.cache.meta))
    state = state.replace(cache=state.cache.replace(kv=poisoned[0], meta=poisoned[1]))

    @jax.jit
    def step(state, q, k, v, new):
        return quest_jax.attend(0, q, k, v, quest_jax.extend(state, new))

    for start in range(0, max(prompts), chunk):
        new = np.clip(prompts - start, 0, chunk)
        _, state = step(state, *(x[:, start : start + chunk] for x in (q, k, v)), jnp.asarray(new))
    outs = []
    for i in range(STEPS):
        at = (prompts + i)[:, None, None, None]
        own = [np.take_along_axis(x, at, axis=1) for x in (q, k, v)]
        out, state = step(state, *own, jnp.ones(len(q), int))
        outs.append(np.asarray(out)[:, 0])
    return np.stack(outs, axis=1), state


def weights_of(q, k, tokens, scale=WIDTH**-0.5):
    """Softmax of one query head over ``tokens``, in their order."""
    scores = k[tokens] @ q * scale
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def in_numpy(method, budget, group, row):
    """The same of one row, by sets of tokens, in float64."""
    q, k, v = (x[row].astype(np.float64) for x in draw(group))
    prompt = PROMPTS[row]
    heads, group_of = range(KV_HEADS * group), lambda kv: range(kv * group, (kv + 1) * group)
    sums = np.zeros((KV_HEADS, CAPACITY))
    alive = [list(range(prompt)) for _ in range(KV_HEADS)]

    def watch(t):
        """What the query at ``t`` gives to the tokens that are alive."""
        for kv in range(KV_HEADS):
            got = sum(weights_of(q[t, h], k[:, kv], [j for j in alive[kv] if j <= t]) for h in group_of(kv))
            seen = [j for j in alive[kv] if j <= t]
            if method == "h2o":
                sums[kv, seen] += got
            else:
                sums[kv] = 0
                sums[kv, seen] = got
        if method == "tova":
            sums[:] = sums.mean(axis=0)

    for t in range(prompt):
        watch(t)
    outs = []
    for t in range(prompt, prompt + STEPS):
        for kv in range(KV_HEADS):
            alive[kv].append(t)
            if method == "keydiff":
                keys = k[alive[kv], kv] / np.linalg.norm(k[alive[kv], kv], axis=1, keepdims=True)
                mean = keys.mean(axis=0)
                rank = dict(zip(alive[kv], -keys @ mean / np.linalg.norm(mean), strict=True))
            else:
                rank = {j: sums[kv, j] for j in alive[kv]}
            if method == "h2o":
                rank |= {j: np.inf for j in alive[kv] if j > t - budget // 2}
            rank[t] = np.inf
            alive[kv] = sorted(sorted(alive[kv], key=lambda j: (-rank[j], j))[:budget])
        outs.append([weights_of(q[t, h], k[:, h // group], alive[h // group]) @ v[alive[h // group], h // group]
                     for h in heads])  # fmt: skip
        if method != "keydiff":
            watch(t)
    return np.array(outs)


@pytest.mark.parametrize(("name", "policy", "group"), [
    ("h2o", H2O, 3), ("tova", TOVA, 3), ("keydiff", KeyDiff, 3),
    pytest.param("h2o", H2O, 1, marks=pytest.mark.slow), pytest.param("tova", TOVA, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_once_dropped_stay_dropped(name, policy, group):
    out, state = run(policy(16, dense_layers=0), group)
    for row in range(len(PROMPTS)):
        np.testing.assert_allclose(out[row], in_numpy(name, 16, group, row), atol=2e-5, err_msg=str(row))
    alive = np.asarray(state.cache.memory[0]["alive"])
    for row, prompt in enumerate(PROMPTS):
        assert (alive[row, :, : prompt + STEPS].sum(axis=-1) == 16).all()
    # Neither the chunks of the prompt nor the rows beside it matter.
    for rows, chunk in ((slice(None), 7), (slice(0, 1), CHUNK)):
        np.testing.assert_allclose(run(policy(16, dense_layers=0), group, rows, chunk)[0], out[rows], atol=2e-5)


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_channels_of_the_query_choose_and_the_mean_value_stands_for_the_rest(group):
    budget, channels = 16, 5
    out, _ = run(SparQ(budget, channels=channels, recent=3, dense_layers=0), group)
    for row, prompt in enumerate(PROMPTS):
        q, k, v = (x[row].astype(np.float64) for x in draw(group))
        for i in range(STEPS):
            t = prompt + i
            for kv in range(KV_HEADS):
                own = q[t, kv * group : (kv + 1) * group]
                kept = np.argsort(-np.abs(own).sum(axis=0), kind="stable")[:channels]
                share = np.abs(own[:, kept]).sum(axis=1) / np.abs(own).sum(axis=1)
                scores = own[:, kept] @ k[: t + 1, kv][:, kept].T / np.sqrt(WIDTH * share)[:, None]
                rank = scores.sum(axis=0)
                rank[t - 2 :] = np.inf
                read = np.sort(np.argsort(-rank, kind="stable")[: min(budget, t + 1)])
                for g in range(group):
                    estimate = np.exp(scores[g] - scores[g].max())
                    alpha = estimate[read].sum() / estimate.sum() if t + 1 > budget else 1
                    want = alpha * weights_of(own[g], k[:, kv], read) @ v[read, kv]
                    want = want + (1 - alpha) * v[: t + 1, kv].mean(axis=0)
                    np.testing.assert_allclose(out[row, i, kv * group + g], want, atol=2e-5, err_msg=f"{row} {i}")


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_pages_that_are_not_read_take_part_as_one_token_each(group):
    policy = Compensated(16, dense_layers=0)
    out, state = run(policy, group)
    plain, _ = run(quest_jax.Quest(16, dense_layers=0), group)
    closer = []
    for row, prompt in enumerate(PROMPTS):
        q, k, v = (x[row].astype(np.float64) for x in draw(group))
        t = prompt + STEPS - 1
        selection = policy.choose(jnp.asarray(draw(group)[0][:, t : t + 1]), state.view(0), None)
        for h in range(KV_HEADS * group):
            kv = h // group
            read = set(np.asarray(selection.pages)[row, kv, : int(selection.counts[row, kv])].tolist())
            keys, values, counts = [], [], []
            for page in range(-(-(t + 1) // PAGE)):
                tokens = list(range(page * PAGE, min(t + 1, (page + 1) * PAGE)))
                groups = [[token] for token in tokens] if page in read else [tokens]
                keys += [k[own, kv].mean(axis=0) for own in groups]
                values += [v[own, kv].mean(axis=0) for own in groups]
                counts += [len(own) for own in groups]
            scores = np.array(keys) @ q[t, h] / np.sqrt(WIDTH) + np.log(counts)
            weights = np.exp(scores - scores.max())
            want = weights / weights.sum() @ np.array(values)
            np.testing.assert_allclose(out[row, -1, h], want, atol=2e-5)
            true = weights_of(q[t, h], k[:, kv], list(range(t + 1))) @ v[: t + 1, kv]
            closer.append(np.linalg.norm(want - true) - np.linalg.norm(plain[row, -1, h] - true))
    assert np.mean(closer) < 0, "the compensated output is nearer to dense attention"


def test_a_memory_belongs_to_the_policy_that_read_the_prompt():
    params = tiny()
    prompts = [[1, 2, 3, 4] * 10, [5, 6, 7] * 9]
    state = quest_jax.prefill(params, prompts, policy=H2O(16), page_size=PAGE, eos_token_ids=())
    assert state.attention.cache.memory is not None
    assert quest_jax.replace_policy(state, policy=H2O(24)).attention.cache.memory is not None
    dense = quest_jax.replace_policy(state)
    assert dense.attention.cache.memory is None
    for other in (dense, quest_jax.prefill(params, prompts, page_size=PAGE)):
        with pytest.raises(ValueError, match="H2O keeps a memory of the prompt, which this state has not"):
            quest_jax.replace_policy(other, policy=H2O(16))
    with pytest.raises(ValueError, match="TOVA keeps a memory"):
        quest_jax.replace_policy(state, policy=TOVA(16))


def test_nothing_comes_back_to_life():
    """A larger budget finds what the smaller one has left, and what came since."""
    params, small = tiny(), TOVA(8, dense_layers=0)
    state = quest_jax.prefill(params, [[1, 2, 3, 4] * 10, [5, 6, 7]], policy=small, page_size=PAGE, eos_token_ids=())
    for _ in range(3):
        state, _ = quest_jax.decode_step(params, state)
    for budget in (32, 4096):
        larger = quest_jax.replace_policy(state, policy=TOVA(budget, dense_layers=0))
        for alive in (9, 10):
            larger, _ = quest_jax.decode_step(params, larger)
            kv_heads = params.config.n_kv_heads
            assert (np.asarray(larger.attention.reads.read) == np.array([alive, alive - 2]) * kv_heads).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [H2O(24), SparQ(24), Compensated(24)], ids=lambda policy: type(policy).__name__)
def test_generation_by_a_method_that_remembers(policy):
    params, prompts = tiny(), [[1, 2, 3, 4] * 12, [5, 6, 7] * 9]
    options = dict(max_new_tokens=10, page_size=PAGE, eos_token_ids=())
    out = quest_jax.generate(params, prompts, policy=policy, **options)
    again = quest_jax.generate(params, prompts, policy=policy, **options)
    np.testing.assert_array_equal(out.tokens, again.tokens)
    assert out.stats.sparse.any()
    whole = type(policy)(128)
    everything = quest_jax.generate(params, prompts, policy=whole, **options)
    np.testing.assert_array_equal(everything.tokens, quest_jax.generate(params, prompts, **options).tokens)
    planned = quest_jax.plan(params, 2, 64, policy=policy, page_size=PAGE)
    assert planned.metadata > quest_jax.plan(params, 2, 64, page_size=PAGE).metadata


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: H2O(8, granularity="page"), ValueError, "H2O: expected granularity 'token', got 'page'"),
        (lambda: SparQ(8, granularity="page"), ValueError, "SparQ: expected granularity 'token'"),
        (lambda: SparQ(8, channels=0), ValueError, "channels to be at least 1, got 0"),
        (lambda: SparQ(8, recent=9), ValueError, "recent within the budget of 8 tokens, got 9"),
        (lambda: SparQ(8, recent=1.5), TypeError, "recent to be an integer, got 1.5"),
        (lambda: Compensated(64, block_pages=4), ValueError, "expected block_pages None"),
    ],
)
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_policy_remembers_nothing_unless_it_says_so():
    assert Policy().new_memory(0, Sizes(1, 1, 1, 1, 16)) is None and not Policy().remembers
    state = quest_jax.init_attention(1, 1, 8, batch=1, capacity=32, policy=quest_jax.Quest(16))
    assert state.cache.memory is None
