"""SnapKV: every step of a generation against the method written once more in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.policies.snapkv import SnapKV
from tests.models_for_tests import tiny
from tests.policies.test_memories import CAPACITY, KV_HEADS, PAGE, PROMPTS, STEPS, WIDTH, draw, run, weights_of

BUDGET, WINDOW = 20, 6


def kept_of_prompt(group, row, pool, kernel=5):
    """Per KV head the tokens of the prompt that stay, in float64."""
    q, k, _ = (x[row].astype(np.float64) for x in draw(group))
    prompt = PROMPTS[row]
    if prompt <= BUDGET:
        return [list(range(prompt))] * KV_HEADS
    prefix, kept = prompt - WINDOW, []
    for kv in range(KV_HEADS):
        scores = np.zeros(prefix)
        for h in range(kv * group, (kv + 1) * group):
            # The last queries see all of the prefix, and of one another those that are not later.
            sums = sum(weights_of(q[t, h], k[:, kv], list(range(t + 1)))[:prefix] for t in range(prefix, prompt))
            near = np.pad(sums, kernel // 2)
            near = np.stack([near[i : i + prefix] for i in range(kernel)])
            scores += near.max(axis=0) if pool == "max" else near.mean(axis=0)
        best = np.argsort(-scores, kind="stable")[: BUDGET - WINDOW]
        kept.append(sorted(best.tolist()) + list(range(prefix, prompt)))
    return kept


@pytest.mark.parametrize(
    ("group", "pool"),
    [pytest.param(1, "avg", marks=pytest.mark.slow), (3, "avg"), pytest.param(4, "max", marks=pytest.mark.slow)],
)
def test_the_end_of_the_prompt_chooses_once(group, pool):
    policy = SnapKV(BUDGET, dense_layers=0, window=WINDOW, pool=pool)
    out, state = run(policy, group)
    alive = np.asarray(state.cache.memory[0]["alive"])
    for row, prompt in enumerate(PROMPTS):
        q, k, v = (x[row].astype(np.float64) for x in draw(group))
        kept = kept_of_prompt(group, row, pool)
        for i in range(STEPS):
            for h in range(KV_HEADS * group):
                read = kept[h // group] + list(range(prompt, prompt + i + 1))
                want = weights_of(q[prompt + i, h], k[:, h // group], read) @ v[read, h // group]
                np.testing.assert_allclose(out[row, i, h], want, atol=2e-5, err_msg=f"{row} {i} {h}")
        for kv in range(KV_HEADS):
            assert np.flatnonzero(alive[row, kv, :prompt]).tolist() == kept[kv]
    assert np.asarray(state.reads.read)[0].tolist() == [KV_HEADS * (min(n, BUDGET) + STEPS) for n in PROMPTS]
    if group == 3:  # the chunks of the prompt do not matter, those shorter than the window neither
        np.testing.assert_allclose(run(policy, group, chunk=5)[0], out, atol=2e-5)


def test_a_later_turn_is_kept_whole():
    """What follows the first decoded token is never chosen from again, however many tokens a turn brings."""
    q, k, v = (jnp.asarray(x) for x in draw(1))
    state = quest_jax.init_attention(
        1, KV_HEADS, WIDTH, batch=len(q), capacity=CAPACITY, page_size=PAGE, n_heads=KV_HEADS,
        policy=SnapKV(BUDGET, dense_layers=0, window=WINDOW),
    )  # fmt: skip
    step = jax.jit(lambda state, q, k, v, new: quest_jax.attend(0, q, k, v, quest_jax.extend(state, new))[1])
    for start, end, width in ((0, 40, 40), (40, 41, 1), (41, 60, 40), (60, 61, 1)):  # of 40, some are padding
        new = jnp.full(len(q), end - start)
        state = step(state, *(x[:, start : start + width] for x in (q, k, v)), new)
    assert np.asarray(state.reads.read)[0].tolist() == [KV_HEADS * (BUDGET + 21)] * len(q)
    assert np.asarray(state.cache.memory[0]["alive"])[:, :, 40:].all()


@pytest.mark.slow
def test_a_generation_keeps_its_question():
    params, prompts = tiny(), [[1, 2, 3, 4] * 15, [5, 6, 7] * 5]
    options = dict(page_size=PAGE, eos_token_ids=(), capacity=128)
    state = quest_jax.prefill(params, prompts, policy=SnapKV(24), **options)
    state = quest_jax.feed_tokens(params, state, [[9, 8, 7], [9, 8, 7]])
    read = np.asarray(state.attention.reads.read)
    assert (read[2:] == params.config.n_kv_heads * np.array([27, 18])).all()  # 60 cut to 24; 15 whole
    assert (read[:2] == params.config.n_kv_heads * np.array([63, 18])).all()
    with pytest.raises(ValueError, match="SnapKV keeps a memory .* or not for this policy"):
        quest_jax.replace_policy(state, policy=SnapKV(64))
    small, plain = (quest_jax.plan(params, 1, 4096, policy=one) for one in (SnapKV(64), None))
    assert small.metadata > plain.metadata and small.decode > plain.decode


def test_what_it_cannot_do_is_refused(as_a_user):
    for changes, error, message in (
        (dict(window=0), ValueError, "window of 1 to 64 tokens, the budget, got 0"),
        (dict(window=65), ValueError, "window of 1 to 64 tokens, the budget, got 65"),
        (dict(window=4.5), TypeError, "window to be an integer, got 4.5"),
        (dict(kernel=4), ValueError, "kernel to be odd and at least 1, got 4"),
        (dict(kernel="5"), TypeError, "kernel to be an integer"),
        (dict(pool="sum"), ValueError, "pool 'avg' or 'max', got 'sum'"),
        (dict(granularity="page"), ValueError, "expected granularity 'token'"),
    ):
        with pytest.raises(error, match=message):
            SnapKV(64, **changes)
    with pytest.raises(ValueError, match="pass n_heads to init_attention"):
        quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=1, capacity=64, policy=SnapKV(32))
    assert SnapKV(24, window=16).continues(SnapKV(32)) and not SnapKV(64).continues(SnapKV(32))
