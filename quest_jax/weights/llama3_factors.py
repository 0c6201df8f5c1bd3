"""The Llama 3 RoPE that hides in a GGUF file's tensor ``rope_freqs.weight``.

Converters write no parameters but the divisor of every frequency. From the parameters (Llama 3.1 model card) it is,
with wavelength w and trained length L: 1 where w < L/high, factor where w > L/low, and between them
``1 / ((1 - s)/factor + s)`` with ``s = (L/w - low) / (high - low)``. So the parameters are those that reproduce it.
"""

import math

import numpy as np

from quest_jax.models.config import RopeConfig

_LOW, _HIGH = 1.0, 4.0  # of every published Llama 3
_TRAINED = (8192, *(2**bits for bits in range(10, 21) if bits != 13))  # the published one first
_TOLERANCE = 1e-4


def rope_from_factors(factors: np.ndarray, theta: float, head_dim: int, where: str) -> RopeConfig:
    """Finds the parameters whose divisors are ``factors``.

    Args:
      factors: ``[D/2]`` divisors of the frequencies.
      theta: base of the frequencies.
      head_dim: [D].
      where: the file, for errors.

    Raises:
      ValueError: another number of divisors than pairs in a head.
      NotImplementedError: the divisors follow no Llama 3 rule (LongRoPE files have such tensors).
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"{where}: rope_freqs.weight: expected the shape ({head_dim // 2},), got {factors.shape}.")
    if np.all(factors == 1):
        return RopeConfig(theta=theta)
    if np.isfinite(factors).all() and (factors > 0).all() and theta > 0:
        largest = float(factors.max())
        for factor in dict.fromkeys((largest, float(round(largest)), 32.0, 8.0, 4.0, 16.0, 2.0)):
            for trained in _TRAINED:
                expected = llama3_factors(theta, head_dim, factor, trained)
                if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
                    return RopeConfig(
                        theta=theta,
                        kind="llama3",
                        factor=factor,
                        original_max_positions=trained,
                        low_freq_factor=_LOW,
                        high_freq_factor=_HIGH,
                    )
    raise NotImplementedError(
        f"{where}: the divisors in rope_freqs.weight follow no Llama 3 rule, and no other is implemented; "
        "load the Hugging Face checkpoint of the model, whose config names the rule."
    )


def llama3_factors(theta: float, head_dim: int, factor: float, trained: int) -> np.ndarray:
    """Divisor of every frequency, float64 ``[D/2]``, by the equation above."""
    wavelengths = 2 * math.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((trained / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)  # 1: keep, 0: divide
    return 1 / ((1 - share) / factor + share)
