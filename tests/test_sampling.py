"""Choosing tokens: against exact probabilities, against a definition by sorting, and what must not happen."""

import collections
import inspect

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from quest_jax.sampling import NO_TOKEN, Greedy, Sample, _nucleus, make_sampler, sample

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = jnp.asarray(np.log(PROBABILITIES) + 3.0, jnp.float32)
N_DRAWS = 20_000


def keys_of(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def frequencies(sampler, logits=LOGITS, n=N_DRAWS):
    drawn = jax.jit(sample)(sampler, jnp.broadcast_to(logits, (n, len(logits))), keys_of(n))
    assert drawn.dtype == jnp.int32
    return np.bincount(np.asarray(drawn), minlength=len(logits)) / n


def renormalised(*kept, temperature=1.0):
    powers = PROBABILITIES ** (1 / temperature)
    powers[[i for i in range(len(powers)) if kept and i not in kept]] = 0
    return powers / powers.sum()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(temperature=1.0), renormalised()),
        (dict(temperature=0.5), renormalised(temperature=0.5)),
        (dict(temperature=2.0), renormalised(temperature=2.0)),
        (dict(temperature=3e38), np.full(5, 0.2)),
        (dict(temperature=1.0, top_k=1), renormalised(1)),
        (dict(temperature=1.0, top_k=3), renormalised(1, 3, 4)),
        (dict(temperature=1.0, top_k=5), renormalised()),
        (dict(temperature=1.0, top_p=0.39), renormalised(1)),
        (dict(temperature=1.0, top_p=0.41), renormalised(1, 3)),
        (dict(temperature=1.0, top_p=0.94), renormalised(0, 1, 3, 4)),
        (dict(temperature=1.0, top_p=1.0), renormalised()),
        (dict(temperature=1.0, top_p=1e-30), renormalised(1)),
        # After top_k=3 the probabilities are 0.47, 0.29, 0.24: the mass is of these, not of the whole.
        (dict(temperature=1.0, top_k=3, top_p=0.7), renormalised(1, 3)),
        # The temperature comes first: at 2 the best two have 0.49 of the mass, at 1 they have 0.65.
        (dict(temperature=2.0, top_p=0.6), renormalised(1, 3, 4, temperature=2.0)),
    ],
)
def test_draws_follow_the_exact_probabilities(settings, expected):
    found = frequencies(make_sampler(**settings))
    assert np.all(found[expected == 0] == 0)
    deviation = np.sqrt(expected * (1 - expected) / N_DRAWS)
    assert np.all(np.abs(found - expected) <= 4 * deviation)


def nucleus_by_sorting(weights, top_p):
    """The definition, in float64; None where only rounding decides."""
    weights = weights.astype(np.float64)
    order = np.argsort(-weights, kind="stable")
    shares = weights[order] / weights.sum()
    before = np.cumsum(shares) - shares
    if np.any(np.abs(before[1:] - top_p) < 1e-5):
        return None
    kept = np.zeros(len(weights), bool)
    kept[order[before < top_p]] = True
    return kept


@pytest.mark.slow
@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-40, 0).map(lambda x: np.float32(x / 4))),
    st.floats(0.01, 1.0),
)
def test_the_nucleus_is_the_smallest_set_lowest_ids_first(logits, top_p):
    logits[len(logits) // 2] = 0.0  # as the caller has it: the largest weight is 1
    weights = np.exp(logits)
    expected = nucleus_by_sorting(weights, top_p)
    if expected is not None:
        found = _nucleus(jnp.asarray(weights)[None], jnp.full(1, top_p, jnp.float32))
        np.testing.assert_array_equal(np.asarray(found)[0], expected)


@pytest.mark.parametrize("top_p", [1e-30, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_nucleus_of_a_whole_vocabulary(top_p):
    weights = np.exp(np.random.default_rng(0).normal(0, 3, 49152).astype(np.float32))
    weights /= weights.max()
    kept = np.asarray(_nucleus(jnp.asarray(weights)[None], jnp.full(1, top_p, jnp.float32)))[0]
    share = weights[kept].astype(np.float64).sum() / weights.sum(dtype=np.float64)
    smallest = weights[kept].min().astype(np.float64) / weights.sum(dtype=np.float64)
    assert share >= top_p - 1e-6
    assert share - smallest <= top_p + 1e-6
    assert kept.sum() == (weights >= weights[kept].min()).sum()
    assert kept.all() == (top_p == 1.0)


def test_ties_at_the_edge_keep_the_lowest_ids():
    equal = jnp.zeros(8)
    assert np.flatnonzero(frequencies(make_sampler(1.0, top_k=3), equal, 500)).tolist() == [0, 1, 2]
    assert np.flatnonzero(frequencies(make_sampler(1.0, top_p=0.3), equal, 500)).tolist() == [0, 1, 2]
    assert sample(Greedy(), jnp.array([[1.0, 7.0, 7.0]]), keys_of(1)).tolist() == [1]


@pytest.mark.parametrize(
    "sampler",
    [make_sampler(1.3), make_sampler(0.8, top_k=7), make_sampler(1.0, top_p=0.8), make_sampler(1.5, 12, 0.9), Greedy()],
)
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_row_does_not_depend_on_its_batch(sampler, generator):
    logits = jax.random.normal(jax.random.key(5), (6, 30)) * 2
    keys = jax.random.split(jax.random.key(1, impl=generator), 6)
    together = np.asarray(sample(sampler, logits, keys))
    order = np.array([4, 0, 5])
    np.testing.assert_array_equal(sample(sampler, logits[order], keys[order]), together[order])
    for row in range(6):
        alone = sample(sampler, logits[row : row + 1], keys[row : row + 1])
        assert alone.tolist() == [together[row]]


def test_equal_logits_and_different_keys_differ():
    logits = jnp.zeros((64, 1000))
    assert len(set(np.asarray(sample(make_sampler(1.0), logits, keys_of(64))).tolist())) > 50


def test_each_row_has_its_own_settings():
    sampler = make_sampler([0.0, 1.0, 1.0, 2.0], top_p=[1.0, 0.3, 1.0, 1.0])
    logits = jnp.broadcast_to(LOGITS, (4, 5))
    drawn = collections.defaultdict(set)
    for seed in range(200):
        for row, token in enumerate(np.asarray(jax.jit(sample)(sampler, logits, keys_of(4, seed)))):
            drawn[row].add(int(token))
    assert drawn == {0: {1}, 1: {1}, 2: {0, 1, 2, 3, 4}, 3: {0, 1, 2, 3, 4}}
    singles = [make_sampler(t, top_p=p) for t, p in ((1.0, 0.3), (1.0, 1.0), (2.0, 1.0))]
    together = sample(sampler, logits, keys_of(4))
    for row, single in enumerate(singles, start=1):
        alone = sample(single, logits[row : row + 1], keys_of(4)[row : row + 1])
        assert alone[0] == together[row]


def test_changed_numbers_do_not_recompile_and_changed_structure_does():
    traces = []

    @jax.jit
    def step(sampler, logits, keys):
        traces.append(sampler)
        return sample(sampler, logits, keys)

    logits = jnp.broadcast_to(LOGITS, (2, 5))
    for seed, (temperature, top_p) in enumerate([(0.7, 0.9), (1, 0.5), (np.float64(2.5), 1), (jnp.float32(0.1), 1e-9)]):
        step(make_sampler(temperature, 3, top_p), logits, keys_of(2, seed))
    assert len(traces) == 1
    for sampler in (make_sampler(1.0, 4, 0.9), make_sampler(1.0, 3), make_sampler(1.0, None, 0.9), make_sampler()):
        step(sampler, logits, keys_of(2))
    assert len(traces) == 5


def test_a_traced_temperature_samples():
    @jax.jit
    def step(temperature, top_p):
        return sample(make_sampler(temperature, top_p=top_p), LOGITS[None], keys_of(1))

    assert step(0.0, 0.5).tolist() == [1]
    assert {int(step(1.0, 0.3)[0]), int(step(1e-20, 1.0)[0])} == {1}


INF, NAN = np.inf, np.nan
SAMPLERS = {
    "greedy": make_sampler(),
    "sample": make_sampler(1.0),
    "top_k": make_sampler(1.0, top_k=2),
    "top_p": make_sampler(1.0, top_p=0.9),
    "both": make_sampler(1e-3, 2, 0.9),
    "rows": make_sampler([0.0, 1.0, 1.0, 1.0, 1.0, 0.5]),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_row_without_a_distribution_gives_no_token(sampler):
    rows = [
        [0.0, NAN, 1.0, 2.0],
        [NAN] * 4,
        [-INF] * 4,
        [INF, NAN, 0.0, 0.0],
        [-INF, 5.0, -INF, -INF],
        [0.0, 1.0, INF, -INF],
    ]
    for seed in range(20):
        drawn = jax.jit(sample)(sampler, jnp.array(rows, jnp.float32), keys_of(6, seed))
        assert drawn.tolist() == [NO_TOKEN] * 4 + [1, 2]


@pytest.mark.parametrize("sampler", list(SAMPLERS.values())[1:5], ids=list(SAMPLERS)[1:5])
def test_masked_tokens_are_never_drawn(sampler):
    logits = jnp.array([-INF, 1.0, -INF, 1.0, 1.0, -INF])
    found = frequencies(sampler, logits, 2000)
    assert np.all(found[[0, 2, 5]] == 0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1.2e-38, 1e-40, 1e-45])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = jnp.array([[-80.0, 3e38, 80.0, 2.9e38], [1.0, 2.0, 88.0, 87.0]])
    assert sample(make_sampler(temperature), logits, keys_of(2)).tolist() == [1, 2]


def test_lower_precision_logits_are_widened():
    logits = jnp.array([[0.0, 4.0, -2.0]], jnp.bfloat16)
    assert sample(make_sampler(1e-4), logits, keys_of(1)).tolist() == [1]
    assert sample(Greedy(), logits, keys_of(1)).dtype == jnp.int32


def test_temperature_zero_is_greedy_whatever_the_rest():
    assert all(isinstance(make_sampler(*args), Greedy) for args in ((), (0,), (0.0, 5, 0.5), (-0.0,), (np.float32(0),)))
    assert isinstance(make_sampler(1e-9), Sample)
    assert isinstance(make_sampler([0.0, 0.0]), Sample)


BAD = [
    (dict(temperature=-0.1), ValueError, "temperature: expected .* at least 0.*-0.1"),
    (dict(temperature=NAN), ValueError, "temperature"),
    (dict(temperature=INF), ValueError, "temperature"),
    (dict(temperature=1e39), ValueError, "temperature"),
    (dict(temperature=[1.0, NAN]), ValueError, "temperature"),
    (dict(temperature=[1.0, -1.0]), ValueError, "temperature"),
    (dict(temperature=[]), ValueError, "temperature"),
    (dict(temperature=[[1.0]]), ValueError, "temperature"),
    (dict(temperature=True), TypeError, "temperature"),
    (dict(temperature=[True]), TypeError, "temperature"),
    (dict(temperature="1"), TypeError, "temperature"),
    (dict(temperature=None), TypeError, "temperature"),
    (dict(temperature=1j), TypeError, "temperature"),
    (dict(temperature=1.0, top_k=0), ValueError, "top_k: expected at least 1.*got 0"),
    (dict(temperature=1.0, top_k=-3), ValueError, "top_k"),
    (dict(temperature=0.0, top_k=0), ValueError, "top_k"),
    (dict(temperature=1.0, top_k=True), TypeError, "top_k"),
    (dict(temperature=1.0, top_k=2.0), TypeError, "top_k"),
    (dict(temperature=1.0, top_k="2"), TypeError, "top_k"),
    (dict(temperature=1.0, top_p=0.0), ValueError, r"top_p: expected .*\(0, 1\].*got 0.0"),
    (dict(temperature=1.0, top_p=-0.5), ValueError, "top_p"),
    (dict(temperature=1.0, top_p=1.0001), ValueError, "top_p"),
    (dict(temperature=1.0, top_p=NAN), ValueError, "top_p"),
    (dict(temperature=1.0, top_p=1e-50), ValueError, "top_p"),
    (dict(temperature=0.0, top_p=2.0), ValueError, "top_p"),
    (dict(temperature=1.0, top_p=True), TypeError, "top_p"),
    (dict(temperature=1.0, top_p="0.9"), TypeError, "top_p"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD, ids=[str(settings) for settings, *_ in BAD])
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(make_sampler)(**settings)  # without the type checks of the tests


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (make_sampler(1.0, top_k=6), ValueError, "top_k: expected at most the vocabulary, 5, got 6"),
        (make_sampler([1.0, 1.0, 1.0]), ValueError, "temperature: .*one for each of 2 rows"),
        (make_sampler(1.0, top_p=[0.5, 0.5, 0.5]), ValueError, "top_p: .*one for each of 2 rows"),
        (0.7, TypeError, "make_sampler"),
    ],
)
def test_what_does_not_fit_the_logits_is_refused_before_it_is_compiled(sampler, error, message):
    shape = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda x: inspect.unwrap(sample)(sampler, x, keys_of(2)), shape)
