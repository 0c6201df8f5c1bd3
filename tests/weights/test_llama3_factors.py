import numpy as np
import pytest

from quest_jax.models.config import RopeConfig
from quest_jax.models.rope import inverse_frequencies
from quest_jax.weights.llama3_factors import llama3_factors, rope_from_factors


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "trained"),
    [
        (500000.0, 128, 8.0, 8192),  # Llama 3.1
        (500000.0, 64, 32.0, 8192),  # Llama 3.2 1B
        (500000.0, 128, 8.0, 4096),
        (10000.0, 64, 4.0, 2048),
        (1e6, 96, 2.5, 32768),
    ],
)
def test_parameters_are_recovered(theta, head_dim, factor, trained):
    """From the frequencies of the model itself: what a converter divides them by."""
    wanted = RopeConfig(theta, "llama3", factor, trained, 1.0, 4.0)
    factors = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(wanted, head_dim)
    assert rope_from_factors(factors, theta, head_dim, "file") == wanted


def test_published_values():
    """The first, the blended and the last divisors of Llama-3.2-1B's rope_freqs.weight, computed by hand.

    w_j = 2 pi 500000**(j/32). w_14 = 1956.4 < 8192/4: 1. w_15 = 2948.1: s = (8192/w - 1)/3 = 0.5929,
    1/((1 - s)/32 + s) = 1.6508. w_18 = 10088 > 8192: 32.
    """
    factors = llama3_factors(500000.0, 64, 32.0, 8192)
    np.testing.assert_allclose(factors[[0, 14, 15, 18, 31]], [1, 1, 1.6508, 32, 32], rtol=1e-3)


def test_ones_mean_no_scaling():
    assert rope_from_factors(np.ones(32, np.float32), 1e4, 64, "file") == RopeConfig(1e4)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_wrong_number(length):
    with pytest.raises(ValueError, match=rf"^file: rope_freqs.weight: expected the shape \(32,\), got \({length},\)"):
        rope_from_factors(np.full(length, 2.0), 1e4, 64, "file")


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 8, 32),
        np.full(32, 2.0),
        np.full(32, np.nan),
        np.full(32, np.inf),
        np.zeros(32),
        np.full(32, -1.0),
        llama3_factors(1e4, 64, 8.0, 8192)[::-1],
    ],
    ids=lambda f: f"{f[0]}..{f[-1]}",
)
def test_other_rules_are_refused(factors):
    with pytest.raises(NotImplementedError, match="^file: the divisors in rope_freqs.weight follow no Llama 3 rule"):
        rope_from_factors(factors, 1e4, 64, "file")
