"""Bounds of what was missed: never below the truth in float64, near it where pages are, and kept for every step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.evals.ask import ask
from quest_jax.pallas_kernels.metadata import encode
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.policies import diagnosed
from quest_jax.policies.base import LayerView, Policy, Selection, Sizes
from quest_jax.policies.lists import marked
from quest_jax.stats import make_stats
from tests import models_for_tests

ROWS, KV_HEADS, GROUP, PAGES, PAGE, WIDTH, READ = 64, 2, 3, 128, 4, 8, 16
HEADS = KV_HEADS * GROUP
CONFIG = dataclasses.replace(models_for_tests.CONFIG, n_layers=3)
KINDS = [  # of the cache, of the metadata, lists
    ("float32", "float32", KV_HEADS), ("bfloat16", "bfloat16", HEADS), ("float32", "bfloat16", KV_HEADS),
    ("float32", "int8", KV_HEADS), ("float16", "float32", KV_HEADS),
]  # fmt: skip


def draw(seed, tight=False):
    """Queries ``[B, H, D]``, keys and values ``[B, K, P, S, D]``, and the lengths of the rows.

    Logits from hundredths to hundreds; keys with and without a mean that they share; ``tight``: a page's are all equal.
    """
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, ROWS, KV_HEADS, PAGES, PAGE, WIDTH))
    size = 10 ** rng.uniform(-2, 1, (ROWS, 1, 1, 1, 1))
    keys = size * (keys + rng.choice([0, 30], (ROWS, 1, 1, 1, 1)) * rng.standard_normal(WIDTH))
    q = rng.standard_normal((ROWS, HEADS, WIDTH)) * rng.choice([0.1, 1, 3], (ROWS, 1, 1))
    if tight:
        keys = np.broadcast_to(keys[..., :1, :], keys.shape)
    lengths = rng.integers(READ * PAGE, PAGES * PAGE, ROWS, endpoint=True)
    return q, keys, values, lengths


def lists_of(rng, lengths, lists):
    """The first page, the last, and others."""
    used = -(-lengths // PAGE)
    pages = np.zeros((ROWS, lists, READ), np.int32)
    for row, count in enumerate(used):
        for one in range(lists):
            pages[row, one] = np.sort([0, count - 1, *(1 + rng.permutation(count - 2)[: READ - 2])])
    return pages, rng.integers(READ // 2, READ, (ROWS, lists), endpoint=True)


def make_step():
    """Attention over lists of pages, and the bounds: by head and by row."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(metadata, q, keys, values, lengths, pages, counts):
        real = (jnp.arange(PAGES * PAGE).reshape(PAGES, PAGE) < lengths[:, None, None])[:, None, ..., None]
        low, high = jnp.where(real, keys, jnp.inf).min(axis=-2), jnp.where(real, keys, -jnp.inf).max(axis=-2)
        pool = tuple(
            jnp.where(real, x, jnp.nan).swapaxes(0, 1).reshape(KV_HEADS, -1, PAGE, WIDTH) for x in (keys, values)
        )
        zero = jnp.zeros_like(lengths)
        view = LayerView(pool, encode(low, high, metadata), None, zero, lengths, None)
        policy = quest_jax.Diagnosed(64)
        memory = policy.new_memory(0, Sizes(ROWS, KV_HEADS, WIDTH, PAGES, PAGE))
        new = jnp.zeros((ROWS, PAGES * PAGE, KV_HEADS, WIDTH), keys.dtype)
        view = view._replace(memory=policy.remember(new, new, view._replace(memory=memory)), starts=lengths - 1)
        _, lse = page_attention(q[:, None], pool, view.starts, lengths, None, pages=pages, counts=counts)
        selection = Selection(pages, counts)
        by_head = diagnosed.missed_mass(q, view.meta, lengths, marked(selection, PAGES), lse[:, 0], PAGE)
        return by_head, policy.diagnose(q[:, None], view, selection, lse)

    return step


def truth(q, keys, values, lengths, pages, counts):
    """The mass that was missed ``[B, H]``, and the norm of what that changed, in float64."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    listed = np.zeros((ROWS, pages.shape[1], PAGES), bool)
    for row in range(ROWS):
        for one in range(pages.shape[1]):
            listed[row, one, pages[row, one, : counts[row, one]]] = True
    listed = np.repeat(np.repeat(listed, HEADS // pages.shape[1], axis=1), PAGE, axis=-1)
    flat = (x.reshape(ROWS, KV_HEADS, -1, WIDTH).repeat(GROUP, axis=1) for x in (keys, values))
    keys, values = flat
    scores = np.einsum("bhd,bhld->bhl", q, keys) / np.sqrt(WIDTH)
    scores[~np.broadcast_to(np.arange(PAGES * PAGE) < lengths[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total, kept = weights.sum(axis=-1), (weights * listed).sum(axis=-1)
    mass = (weights * ~listed).sum(axis=-1) / total
    # From the logits of what was read alone: its weights may be too small beside the others.
    alone = np.where(listed, scores, -np.inf)
    alone = np.exp(alone - alone.max(axis=-1, keepdims=True))
    outs = [np.einsum("bhl,bhld->bhd", w / w.sum(axis=-1, keepdims=True), values) for w in (weights, alone)]
    assert (kept >= 0).all()
    return mass, np.linalg.norm(outs[0] - outs[1], axis=-1)


def compare(step, kind, seed, tight=False, opposed=False):
    """How far above the truth the bounds are: of the mass by head, relative; of the output by row; and the true mass.

    ``opposed``: what is read and what is not have opposite values, which is the worst there is.
    """
    dtype, metadata, lists = kind
    q, keys, values, lengths = draw(seed, tight)
    q, keys, values = (jnp.asarray(x, dtype) for x in (q, keys, values))
    pages, counts = lists_of(np.random.default_rng(seed), lengths, lists)
    if opposed:
        marks = np.asarray(marked(Selection(jnp.asarray(pages), jnp.asarray(counts)), PAGES))
        values = jnp.broadcast_to(jnp.where(marks, 1, -1)[..., None, None], values.shape).astype(dtype)
    arrays = (jnp.asarray(x, jnp.int32) for x in (lengths, pages, counts))
    by_head, missed = step(metadata, q, keys, values, *arrays)
    mass, away = truth(q, keys, values, lengths, pages, counts)
    by_head, missed = jax.tree.map(lambda x: np.asarray(x, np.float64), (by_head, missed))
    assert (by_head > 0).all() and (by_head <= 1).all()
    np.testing.assert_array_equal(missed.mass, by_head.max(axis=1))
    return by_head / np.maximum(mass, 1e-300) - 1, missed.output / np.maximum(away.max(axis=1), 1e-300) - 1, mass


@pytest.mark.slow
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_page_of_a_million_holds_more_than_the_bound(kind, tight):
    step, far, pages = make_step(), [], 0
    for seed in range(7):
        mass, output, true = compare(step, kind, seed, tight)
        assert mass.min() >= 0, f"the bound is {-mass.min()} below the truth"
        assert output.min() >= 0
        far += [mass[true > 1e-3].max()]
        pages += ROWS * KV_HEADS * PAGES
    assert pages * len(KINDS) * 2 >= 1_000_000
    if tight and kind[1] == "float32":
        assert max(far) < 0.1, "where the box of a page is its keys, the bound is the truth"


def test_what_is_read_and_what_is_not_cannot_be_farther_apart():
    mass, output, true = compare(make_step(), KINDS[0], 0, tight=True, opposed=True)
    loose = np.where(true > 1e-3, mass, 0).max(axis=1)
    assert (output >= 0).all() and (output <= loose + 1e-4).all()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=str)
def test_a_bound_without_room_for_rounding_is_found_out(monkeypatch, kind):
    monkeypatch.setattr(diagnosed, "_UNIT", 0.0)
    mass, _, true = compare(make_step(), kind, 0, tight=True)
    assert mass[true < 0.99].min() < -1e-8


RECORDED = []


@dataclasses.dataclass(frozen=True)
class Recorded(quest_jax.Diagnosed):
    """Tells what every sparse step and layer was given, and said."""

    def diagnose(self, q, view, selection, lse):
        missed = super().diagnose(q, view, selection, lse)
        seen = q[:, 0], view.kv, view.lengths, marked(selection, view.pages_per_row), missed
        jax.debug.callback(lambda *x: RECORDED.append(jax.tree.map(np.asarray, x)), *seen, ordered=True)
        return missed


def lost(q, kv, lengths, listed):
    """The largest missed mass and the largest change of an output ``[B]`` of one layer, in float64."""
    keys, values = (x.astype(np.float64).reshape(CONFIG.n_kv_heads, len(q), -1, CONFIG.head_dim) for x in kv)
    group, lists = CONFIG.n_heads // CONFIG.n_kv_heads, listed.shape[1]
    mass, away = np.zeros((2, len(q), CONFIG.n_heads))
    for row, length in enumerate(lengths):
        for head in range(CONFIG.n_heads if length else 0):
            k, v = keys[head // group, row, :length], values[head // group, row, :length]
            weights = np.exp(k @ q[row, head].astype(np.float64) / np.sqrt(CONFIG.head_dim))
            read = np.repeat(listed[row, head * lists // CONFIG.n_heads], 8)[:length]
            mass[row, head] = weights[~read].sum() / weights.sum()
            away[row, head] = np.linalg.norm(
                weights @ v / weights.sum() - weights[read] @ v[read] / weights[read].sum()
            )
    return mass.max(axis=1), away.max(axis=1)


PROMPTS, STEPS = [[1, 2, 3, 4] * 12, [5, 6, 7] * 9, [8, 9]], 6
EOS = tuple(range(0, 97, 7))
OPTIONS = dict(page_size=8, chunk=16, eos_token_ids=EOS)


@functools.cache
def model():
    """Three layers whose attention is flat: bounds that are well below 1."""
    return quest_jax.random_params(CONFIG, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "metadata"), [({}, "float32"), ({"reduce": "per_head"}, "int8")])
def test_the_bounds_of_a_generation_are_those_of_its_steps(options, metadata):
    policy = Recorded(24, dense_layers=1, **options)
    RECORDED.clear()
    out = quest_jax.generate(model(), PROMPTS, policy=policy, metadata=metadata, max_new_tokens=STEPS, **OPTIONS)
    jax.effects_barrier()
    bounds = np.asarray(out.stats.missed_mass_bound), np.asarray(out.stats.output_error_bound)
    steps = len(bounds[0])
    assert bounds[0].shape == bounds[1].shape == (steps, 3, 3) and len(RECORDED) == 2 * steps
    assert not bounds[0][:, 0].any() and not bounds[1][:, 0].any(), "a dense layer misses nothing"
    assert not bounds[0][:, :, 2].any(), "nor does a row within the budget"
    ran = np.arange(steps)[:, None] < np.asarray(out.lengths) - np.isin(out.tokens, EOS).any(axis=1)
    for i, (q, kv, lengths, listed, missed) in enumerate(RECORDED):
        truth = lost(q, kv, lengths, listed)
        for row in range(3):
            for bound, said, true in zip(bounds, missed, truth, strict=True):
                here = bound[i // 2, 1 + i % 2, row]
                assert here == (said[row] if ran[i // 2, row] else 0)
                assert here >= true[row] or not ran[i // 2, row]
    assert 0 < bounds[0][0, 1:, :2].min() < 0.9 and (~ran).any() and ran.any(axis=0).all(), "this case can tell"
    with pytest.raises(ValueError, match=r"decode with policy=quest_jax.Diagnosed\(budget\)"):
        out.stats.prefill.missed_mass_bound  # noqa: B018
    if not options:
        same = dict(policy=dataclasses.replace(policy, budget=32), max_new_tokens=STEPS)
        inside = jax.jit(lambda params: quest_jax.generate(params, PROMPTS, **same, **OPTIONS))(model())
        assert (inside.stats.missed_mass_bound[0, 1:, 0] < bounds[0][0, 1:, 0]).all(), "a page more is read"


@pytest.mark.slow
def test_what_is_not_known_is_not_said():
    policy = quest_jax.Diagnosed(24, dense_layers=1, dense_below=40)
    options = dict(page_size=8, eos_token_ids=(), prefill_policy=quest_jax.QuoKA(16, chunk=16))
    state = quest_jax.prefill(model(), PROMPTS[:2], policy=policy, **options)
    assert np.isnan(state.attention.reads.missed.mass[:, 0]).all(), "what a prompt missed is not known"
    stats = ask(model(), state, [[1, 2], [3]], 3).stats
    bound = np.asarray(stats.missed_mass_bound)
    assert stats.reads.read.shape == bound.shape == stats.output_error_bound.shape
    assert (bound[:, 1:, 0] > 0).all() and not bound[:, :, 1].any(), "a row below dense_below is read whole"
    plain = quest_jax.replace_policy(state, policy=quest_jax.Quest(24))
    assert len(jax.tree.leaves(plain.attention.reads)) == 4, "what is not asked for costs nothing"
    after = jax.eval_shape(
        lambda *args: jax.tree.leaves(quest_jax.decode_step(*args)[0].attention.reads), model(), plain
    )
    assert len(after) == 4
    for name in ("missed_mass_bound", "output_error_bound"):
        with pytest.raises(ValueError, match=r"decode with policy=quest_jax.Diagnosed\(budget\)"):
            getattr(make_stats(plain, plain.attention.reads), name)
    with pytest.raises(ValueError, match="Diagnosed keeps a memory of the prompt"):
        quest_jax.replace_policy(plain, policy=policy)


def test_a_policy_diagnoses_nothing_unless_it_says_so(as_a_user):
    with pytest.raises(NotImplementedError, match="Policy diagnoses nothing; see quest_jax.Diagnosed"):
        Policy().diagnose(*[None] * 4)


def test_what_is_not_a_number_bounds_nothing():
    ones = jnp.ones((1, 2, WIDTH))
    meta = jnp.ones((1, 1, 4, 2 * WIDTH)).at[0, 0, 1].set(jnp.nan)
    listed = jnp.array([[[True, False, True, True]]])
    lengths, lse = jnp.array([16]), jnp.zeros((1, 2))
    assert diagnosed.missed_mass(ones, meta, lengths, listed, lse, PAGE).tolist() == [[1, 1]]
    assert diagnosed.missed_mass(ones, meta, lengths, listed | True, lse, PAGE).tolist() == [[0, 0]]
    assert diagnosed.missed_mass(ones, meta, lengths, listed & False, lse - jnp.inf, PAGE).tolist() == [[1, 1]]
    assert diagnosed.missed_mass(ones, meta, 0 * lengths, listed & False, lse - jnp.inf, PAGE).tolist() == [[0, 0]]
    # So little that float32 cannot say it: no bound is zero.
    assert diagnosed.missed_mass(ones, meta * 0 - 1e3, lengths, listed, lse + 1e4, PAGE)[0, 0] > 0
