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

from quest_jax.sampling import NO_TOKEN, Greedy, Sample, make_sampler, sample

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


def nucleus_by_sorting(logits, top_k, top_p):
    """The tokens that may be drawn, in float64; None where rounding decides."""
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    weights = np.exp(logits[order] - logits[order[0]])
    before = np.cumsum(weights) / weights.sum() - weights / weights.sum()
    if np.any(np.abs(before[1:] - top_p) < 1e-4):
        return None
    return set(order[before < top_p].tolist())


@given(
    hnp.arrays(np.float32, st.integers(1, 12), elements=st.integers(-6, 6).map(lambda x: np.float32(x / 2))),
    st.floats(0.01, 1.0),
    st.none() | st.integers(1, 12),
)
def test_the_set_drawn_from_is_that_of_the_definition(logits, top_p, top_k):
    top_k = None if top_k is None else min(top_k, len(logits))
    expected = nucleus_by_sorting(logits, top_k, top_p)
    if expected is None:
        return
    # At this temperature the tokens in the set are all but equally likely, so 300 draws show each of them.
    flat = jnp.broadcast_to(jnp.asarray(logits), (300, len(logits)))
    drawn = sample(make_sampler(1.0, top_k, top_p), flat, keys_of(300))
    assert set(np.asarray(drawn).tolist()) <= expected
    best = np.asarray(logits).argmax()
    assert best in expected
