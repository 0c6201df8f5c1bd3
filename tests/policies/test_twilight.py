"""Twilight by pages, written once more in NumPy; its keys in 4 bits; what it counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import Sizes
from quest_jax.policies.four_bits import from_4_bits, to_4_bits
from quest_jax.policies.twilight import Twilight
from tests.models_for_tests import deep
from tests.pallas_kernels.cases import Case, queries
from tests.policies.test_baselines import LENGTHS, listed, view_of
from tests.policies.test_memories import PAGE, PROMPTS, STEPS, draw, run
from tests.policies.test_quest import numpy_bounds

CASES = [
    Case(lengths=LENGTHS, head_dim=32, group=1, layout="fused", table=True),
    Case(lengths=LENGTHS, head_dim=40, group=3, layout="fused", padded=True),
    Case(lengths=(100, 40), head_dim=16, group=4, kv_heads=1, page_size=8, dtype="bfloat16"),
]


def rounded(keys):
    """Keys ``[.., D]`` as 16 levels between their least and largest channel say them, in float64."""
    least, most = keys.min(axis=-1, keepdims=True), keys.max(axis=-1, keepdims=True)
    step = (most - least) / 15
    return least + step * np.round((keys - least) / np.where(step > 0, step, 1))


@functools.partial(jax.jit, static_argnums=0)
def choice(policy, q, view, keys):
    rows, kv_heads = len(q), pool_shape(view.kv).kv_heads
    memory = policy.new_memory(0, Sizes(rows, kv_heads, q.shape[-1], view.pages_per_row, view.page_size))
    first = view._replace(memory=memory, starts=jnp.zeros_like(view.starts))
    view = view._replace(memory=policy.remember(keys, keys, first))
    return policy.choose(q, view, None), policy.scored_in(view)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("p", "pages", "candidates"), [(0.85, 3, 2), (0.5, 4, 1), (1.0, 2, 2)])
def test_the_fewest_candidates_with_the_estimated_mass(case, p, pages, candidates):
    filled, view = view_of(case)
    q = queries(case, 1) * 2
    policy = Twilight(pages * case.page_size, p=p, candidates=candidates)
    keys = jnp.asarray(np.where(np.isfinite(filled.keys), filled.keys, 0), case.dtype)
    selection, scored = choice(policy, q, view, keys)
    found, exact = listed(selection), np.asarray(q[:, 0], np.float64)
    bounds = numpy_bounds(case, q[:, 0], filled, 0.5)
    for row, length in enumerate(case.lengths):
        used = -(-length // case.page_size)
        count = min(candidates * pages, used)
        tokens = length - (used - count) * case.page_size
        read = used * 2 * case.stored * 4 + tokens * (case.head_dim // 2 + 8)
        assert int(scored[row]) * policy.scored_nbytes(case.stored, 2) - read in range(16)
        for one in range(case.kv_heads):
            heads = slice(one * case.group, (one + 1) * case.group)
            by_score = np.argsort(-bounds[row, heads].mean(axis=0)[:used], kind="stable").tolist()
            taken = sorted(list(dict.fromkeys([used - 1, 0, *by_score]))[:count])
            at = [t for page in taken for t in range(page * case.page_size, min(length, (page + 1) * case.page_size))]
            scores = exact[row, heads] @ rounded(filled.keys[row, at, one]).T / np.sqrt(case.head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mass = np.bincount(
                np.array(at) // case.page_size, (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
            )
            forced = list(dict.fromkeys([0, used - 1]))
            order = list(dict.fromkeys([*forced, *sorted(taken, key=lambda page: -mass[page])]))
            sums = np.cumsum(mass[order])
            # Where the sum comes within rounding of p, one page more or less is right too.
            counts = {min(max(len(forced), int((sums < p + e).sum()) + 1), count, pages) for e in (-1e-4, 1e-4)}
            listed_here = found[row][one].tolist()
            assert len(listed_here) in counts and set(listed_here) == set(order[: len(listed_here)]), (row, one)


@pytest.mark.parametrize("width", [16, 7])
def test_keys_in_4_bits_are_within_half_a_step(width):
    rng = np.random.default_rng(0)
    keys = (10.0 ** rng.integers(-3, 3, (2, 5, 3, 1)) * rng.standard_normal((2, 5, 3, width))).astype(np.float32)
    keys[0, 0] = 4.25  # a key whose channels are all alike
    codes, scales = to_4_bits(jnp.asarray(keys))
    assert codes.dtype == jnp.uint8 and codes.shape[-1] == -(-width // 2)
    back = np.asarray(from_4_bits(codes, scales, width))
    np.testing.assert_allclose(back, rounded(keys.astype(np.float64)), rtol=1e-6, atol=1e-6 * np.abs(keys).max())
    half = (keys.max(axis=-1) - keys.min(axis=-1)) / 30
    assert (np.abs(back - keys).max(axis=-1) <= half * (1 + 1e-4)).all() and (back[0, 0] == 4.25).all()


@pytest.mark.slow
def test_every_key_is_kept_however_it_came():
    _, keys, _ = draw(3)
    policy = Twilight(16, dense_layers=0)
    out, state = run(policy, 3)
    expected = [np.asarray(x).swapaxes(1, 2) for x in to_4_bits(jnp.asarray(keys))]
    for chunk in (20, 1):
        again, state = (out, state) if chunk == 20 else run(policy, 3, chunk=chunk)
        np.testing.assert_allclose(again, out, atol=2e-5)
        for kept, want in zip(state.cache.memory[0], expected, strict=True):
            for row, prompt in enumerate(PROMPTS):
                np.testing.assert_array_equal(
                    np.asarray(kept)[row, :, : prompt + STEPS], want[row, :, : prompt + STEPS]
                )


@pytest.mark.slow
def test_a_generation_reads_no_more_than_the_budget_and_counts_it():
    params, policy = deep(), Twilight(32, p=0.3, candidates=2)
    out = quest_jax.generate(
        params, [[1, 2, 3, 4] * 20], policy=policy, page_size=PAGE, max_new_tokens=6, eos_token_ids=()
    )  # fmt: skip
    read = np.asarray(out.stats.pages_read)[:, 2:, 0]
    assert (read <= 4 * params.config.n_kv_heads).all() and (read < 4 * params.config.n_kv_heads).any()
    lengths = 81 + np.arange(6)
    used = -(-lengths // PAGE)
    scored = -(-(used * 2 * 16 * 4 + (lengths - (used - 8) * PAGE) * (8 + 8)) // 16) * 16 * params.config.n_kv_heads
    pages = read * PAGE * 2 * 16 * 4
    np.testing.assert_array_equal(out.stats.bytes_read()[:, 2:, 0] - pages, np.stack([scored, scored], axis=1))
    planned = quest_jax.plan(params, 2, 64, policy=policy, page_size=PAGE)
    assert planned.metadata - quest_jax.plan(params, 2, 64, page_size=PAGE).metadata == 4 * 2 * 2 * 64 * (8 + 8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Twilight(0), ValueError, "Twilight: expected budget to be at least 1, got 0"),
        (lambda: Twilight(64, candidates=0), ValueError, "candidates to be at least 1, got 0"),
        (lambda: Twilight(64.0), TypeError, "budget to be an integer, got 64.0"),
        (lambda: Twilight(64, p="x"), TypeError, "p to be a number, got 'x'"),
        (lambda: Twilight(64, p=1.5), ValueError, r"expected p in \(0, 1\].*got 1.5"),
        (lambda: Twilight(64, beta=-1), ValueError, r"expected beta in \[0, 1\], got -1"),
        (lambda: Twilight(16).check(16), ValueError, "at least two pages, 32 tokens, got 16"),
    ],
)
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_method_for_decoding_says_so_of_a_chunk():
    case = Case(lengths=(20,))
    memory = Twilight(64).new_memory(0, Sizes(1, case.kv_heads, case.head_dim, case.pages, case.page_size))
    with pytest.raises(ValueError, match="Quest: expected one query token per row, got 3"):
        Twilight(64).choose(queries(case, 3), view_of(case)[1]._replace(memory=memory), None)
