"""Pages ranked by other summaries of their keys than min and max: against NumPy, and how the summaries are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.arkvale import ArkVale
from quest_jax.policies.ball import Ball
from quest_jax.policies.base import Sizes
from quest_jax.policies.page_memory import Summarized
from quest_jax.policies.quest_compensated import Compensated
from tests.models_for_tests import deep
from tests.pallas_kernels.cases import Case, queries
from tests.policies.test_baselines import LENGTHS, listed, view_of
from tests.policies.test_memories import KV_HEADS, PAGE, PROMPTS, STEPS, WIDTH, draw, run, weights_of
from tests.policies.test_quest import numpy_shared

BUDGET = 3 * PAGE
CASES = [
    Case(lengths=LENGTHS, head_dim=32, group=1, layout="fused", table=True),
    Case(lengths=LENGTHS, head_dim=40, group=3, layout="fused", padded=True),
    Case(lengths=LENGTHS, head_dim=32, group=4),
    Case(lengths=(100, 40), head_dim=16, group=3, kv_heads=1, page_size=8, dtype="bfloat16"),
]
MAKERS = {
    "arkvale": ArkVale, "ball": Ball, "ball_box": lambda budget, **options: Ball(budget, with_box=True, **options)
}  # fmt: skip


def summary_of(name, keys):
    """What ``keys [n, D]`` of a page are known by: a centre, and how far they reach around it."""
    if name == "arkvale":
        centre = (keys.max(axis=0) + keys.min(axis=0)) / 2
        return centre, np.abs(keys - centre).mean(axis=0)
    centre = keys.mean(axis=0)
    return centre, max(np.sqrt(((key - centre) ** 2).sum()) for key in keys)


def score_of(name, q, keys, size=1.0):
    """The score of a page for one query head, with what is around the centre ``size`` times as large."""
    centre, reach = summary_of(name, keys)
    if name == "arkvale":
        return q @ centre + size * np.abs(q) @ reach
    score = q @ centre + size * np.linalg.norm(q) * reach
    if name == "ball":
        return score
    low, high = keys.min(axis=0), keys.max(axis=0)
    return min(score, q @ (low + high) / 2 + size * np.abs(q) @ (high - low) / 2)


def pages_of(by_head, reduce, budget, page_size, length, head_dim):
    """The pages to read, given the scores ``[G, P]`` of a group over the pages in use."""
    used = by_head.shape[1]
    if length <= budget:
        return list(range(used))
    order = np.argsort(-numpy_shared(by_head, reduce, head_dim), kind="stable").tolist()
    return sorted(list(dict.fromkeys([used - 1, 0, *order]))[: budget // page_size])


def in_numpy(name, group, row):
    """Outputs of all decode steps of one row, in float64, every summary made anew."""
    q, k, v = (x[row].astype(np.float64) for x in draw(group))
    outs = []
    for t in range(PROMPTS[row], PROMPTS[row] + STEPS):
        out = np.zeros((KV_HEADS * group, WIDTH))
        for kv in range(KV_HEADS):
            pages = [k[first : min(t + 1, first + PAGE), kv] for first in range(0, t + 1, PAGE)]
            heads = range(kv * group, (kv + 1) * group)
            by_head = np.array([[score_of(name, q[t, h], page) for page in pages] for h in heads])
            read = pages_of(by_head, "mean", BUDGET, PAGE, t + 1, WIDTH)
            tokens = [j for page in read for j in range(page * PAGE, min(t + 1, (page + 1) * PAGE))]
            for h in heads:
                out[h] = weights_of(q[t, h], k[:, kv], tokens) @ v[tokens, kv]
        outs.append(out)
    return np.array(outs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arkvale", "ball_box"])
def test_every_step_of_a_generation(name):
    policy = MAKERS[name](BUDGET, dense_layers=0)
    out, state = run(policy, 3)
    for row in range(len(PROMPTS)):
        np.testing.assert_allclose(out[row], in_numpy(name, 3, row), atol=2e-5, err_msg=str(row))
    # Neither the chunks of the prompt nor the rows beside it matter to outputs and summaries.
    for rows, chunk in ((slice(None), 1), (slice(1, 2), 7)):
        again, other = run(policy, 3, rows, chunk)
        np.testing.assert_allclose(again, out[rows], atol=2e-5)
        for row, prompt in enumerate(PROMPTS[rows]):
            used = -(-(prompt + STEPS) // PAGE)
            kept = (
                np.asarray(x.cache.memory[0])[i, :, :used] for x, i in ((state, (rows.start or 0) + row), (other, row))
            )
            np.testing.assert_allclose(*kept, atol=2e-6)


@functools.partial(jax.jit, static_argnums=0)
def choice(policy, q, view):
    """What ``policy`` lists, its memory made of all tokens at once."""
    rows, kv_heads = len(q), pool_shape(view.kv).kv_heads
    memory = policy.new_memory(0, Sizes(rows, kv_heads, q.shape[-1], view.pages_per_row, view.page_size))
    new = jnp.zeros((rows, view.capacity, kv_heads, q.shape[-1]))
    kept = policy.remember(new, new, view._replace(memory=memory, starts=jnp.zeros_like(view.starts)))
    return policy.choose(q, view._replace(memory=kept), None)


def compare(name, case, **options):
    budget = 3 * case.page_size
    filled, view = view_of(case)
    q = queries(case, 1)
    exact = np.asarray(q[:, 0], np.float64)
    found = listed(choice(MAKERS[name](budget, **options), q, view))
    size, reduce = (0.5 if "ranking" in options else 1.0), options.get("reduce", "mean")
    for row, length in enumerate(case.lengths):
        for one in range(case.kv_heads):
            keys = filled.keys[row, :length, one]
            pages = [keys[first : first + case.page_size] for first in range(0, length, case.page_size)]
            heads = range(one * case.group, (one + 1) * case.group)
            by_head = np.array([[score_of(name, exact[row, h], page, size) for page in pages] for h in heads])
            if reduce == "per_head":
                lists = [by_head[[g]] for g in range(case.group)]
            else:
                lists = [by_head]
            for g, scores in enumerate(lists):
                want = pages_of(
                    scores, "mean" if len(lists) > 1 else reduce, budget, case.page_size, length, case.head_dim
                )
                assert found[row][one * len(lists) + g].tolist() == want, (row, one, g)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_the_pages_of_highest_score(case, name):
    compare(name, case)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["max", "sum_softmax", "round_robin", "per_head"])
def test_however_a_group_agrees(reduce):
    compare("arkvale", CASES[2], reduce=reduce)
    compare("ball_box", CASES[2], reduce=reduce, ranking="shrunk_box")


@pytest.mark.parametrize("make", [ArkVale, Ball, Compensated])
def test_what_was_overwritten_is_forgotten(make):
    q, k, v = (jnp.asarray(x[:, :31]) for x in draw(3))
    policy = make(BUDGET, dense_layers=0)
    state = quest_jax.init_attention(1, KV_HEADS, WIDTH, batch=len(q), capacity=96, page_size=PAGE, policy=policy)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def step(state, start, tokens, scale=1.0):
        own = [x[:, start : start + tokens] for x in (q, jnp.float32(scale) * k, v)]
        return quest_jax.attend(0, *own, quest_jax.extend(state, jnp.full(len(q), tokens)))[1]

    state = step(state, 0, 13)
    spoilt = step(state, 13, 18, scale=9.0)
    back = spoilt.replace(cache=spoilt.cache.replace(lengths=state.cache.lengths))
    for tokens, used in ((1, 2), (9, 3)):
        want, got = (np.asarray(step(x, 13, tokens).cache.memory[0])[:, :, :used] for x in (state, back))
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_generation_reads_and_plans_what_it_says():
    params, policy = deep(), Ball(24, with_box=True)
    options = dict(page_size=PAGE, eos_token_ids=())
    out = quest_jax.generate(params, [[1, 2, 3, 4] * 12, [5, 6, 7] * 9], policy=policy, max_new_tokens=6, **options)
    used = -(-(48 + 1 + np.arange(6)) // PAGE)
    read = params.config.n_kv_heads * (3 * PAGE * 2 * 16 * 4 + used * (17 + 32) * 4)
    assert out.stats.bytes_read()[:, 2, 0].tolist() == read.tolist()
    assert [make(24).scored_nbytes(16, 2, "bfloat16") for make in MAKERS.values()] == [32 * 4, 17 * 4, 17 * 4 + 32 * 2]
    planned = quest_jax.plan(params, 2, 64, policy=policy, page_size=PAGE)
    assert planned.metadata - quest_jax.plan(params, 2, 64, page_size=PAGE).metadata == 4 * 2 * 2 * 8 * 17 * 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ArkVale(64, block_pages=4), ValueError, "ArkVale: expected block_pages None"),
        (lambda: Ball(64, with_box=1), TypeError, "Ball: expected with_box to be a bool, got 1"),
        (lambda: Ball(8).check(16), ValueError, "at least one page, 16 tokens, got 8"),
        (lambda: Summarized(64).width(8), NotImplementedError, "Summarized has no summary"),
    ],
)
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_methods_for_decoding_say_so_of_a_chunk():
    case = dataclasses.replace(CASES[0], table=False)
    for policy in (ArkVale(64), Ball(64)):
        memory = policy.new_memory(
            0, Sizes(len(case.lengths), case.kv_heads, case.head_dim, case.pages, case.page_size)
        )
        with pytest.raises(ValueError, match="expected one query token per row, got 3"):
            policy.choose(queries(case, 3), view_of(case)[1]._replace(memory=memory), None)
