"""How the next token is chosen from logits: the most likely one, or a draw with temperature, top-k and top-p.

A sampler is a pytree: numbers that may change from call to call (temperature, top_p) are leaves, so changing them
never recompiles; what decides the program (greedy or not, top_k, whether there is a top_p) is structure.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

NO_TOKEN = -1
"""What :func:`sample` gives for a row in which there is nothing to choose from."""


class Greedy(struct.PyTreeNode):
    """Takes the most likely token; the lowest id wins a tie."""


class Sample(struct.PyTreeNode):
    """Draws from the softmax of ``logits / temperature``, restricted to ``top_k`` and then to ``top_p``.

    :func:`make_sampler` makes one and checks the values.

    Attributes:
      temperature: float32, a number or one per row, ``[B]``; a row with 0 is greedy.
      top_p: float32, a number or ``[B]``: keeps the fewest most likely tokens whose probabilities sum to at least
        this; None keeps all.
      top_k: keeps the k most likely tokens; None keeps all. Static.
    """

    temperature: Any
    top_p: Any = None
    top_k: int | None = struct.field(pytree_node=False, default=None)


def make_sampler(temperature: Any = 0.0, top_k: int | None = None, top_p: Any = None) -> Greedy | Sample:
    """Checks the numbers and makes a sampler.

    Args:
      temperature: at least 0 and finite; the number 0 is greedy. An array has one for each row of the batch, of which
        some may be 0. Values that are traced by ``jax.jit`` cannot be checked and never give ``Greedy``.
      top_k: at least 1, or None for all tokens.
      top_p: in (0, 1], or None for all tokens; or one for each row. Renormalises after ``top_k``.

    Returns:
      ``Greedy`` for a temperature of 0, whatever ``top_k`` and ``top_p`` are; else ``Sample``.

    Raises:
      TypeError: not numbers, or truth values.
      ValueError: out of range, NaN, infinite, or an array of more than one dimension.

    Example:
      >>> make_sampler(0.7, top_k=50).top_k, make_sampler(0)
      (50, Greedy())
    """
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
            raise TypeError(f"top_k: expected an integer or None, got {top_k!r:.80}.")
        if top_k < 1:
            raise ValueError(f"top_k: expected at least 1, or None for all tokens, got {top_k}.")
        top_k = int(top_k)
    # Checked as float32, in which 1e39 is infinite and 1e-50 is 0.
    temperature = _as_numbers("temperature", temperature, lambda x: (x >= 0) & np.isfinite(x), "finite and at least 0")
    if top_p is not None:
        top_p = _as_numbers("top_p", top_p, lambda x: (x > 0) & (x <= 1), "in (0, 1]")
    if isinstance(temperature, np.ndarray) and temperature.ndim == 0 and temperature == 0:
        return Greedy()
    return Sample(jnp.asarray(temperature), None if top_p is None else jnp.asarray(top_p), top_k)


def sample(sampler: Greedy | Sample, logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """Chooses one token per row, each with its own key: a row's draw does not depend on the batch around it.

    A row that holds a NaN, or -inf throughout, describes no distribution. It gives ``NO_TOKEN``, -1, rather than some
    token by accident. Where logits are +inf, one of these tokens is chosen. Of equally likely tokens at the edge of
    ``top_k`` or ``top_p``, those with the lowest ids are kept.

    Args:
      sampler: of :func:`make_sampler`.
      logits: computed with in float32.
      keys: typed keys (``jax.random.key``), each for one call only. ``Greedy`` does not read them.

    Raises:
      TypeError: another kind of sampler.
      ValueError: while tracing, when top_k exceeds the vocabulary, or a setting per row has another number of rows.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> sample(make_sampler(), jnp.array([[0.0, 2.0, 1.0], [jnp.nan, 2.0, 1.0]]), keys).tolist()
      [1, -1]
    """
    if not isinstance(sampler, Greedy | Sample):
        raise TypeError(f"sampler: expected Greedy or Sample, got {type(sampler).__name__}; use make_sampler.")
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1)  # takes a NaN for the largest, so that `peak` is NaN if any logit is
    peak = jnp.take_along_axis(logits, best[:, None], axis=-1)
    token = best if isinstance(sampler, Greedy) else _draw(sampler, logits, best, peak, keys)
    undefined = jnp.isnan(peak[:, 0]) | (peak[:, 0] == -jnp.inf)
    return jnp.where(undefined, NO_TOKEN, token).astype(jnp.int32)


def _draw(sampler: Sample, logits: Array, best: Array, peak: Array, keys: Array) -> Array:
    n_rows, n_tokens = logits.shape
    if sampler.top_k is not None and sampler.top_k > n_tokens:
        raise ValueError(f"top_k: expected at most the vocabulary, {n_tokens}, got {sampler.top_k}.")
    temperature = _per_row("temperature", sampler.temperature, n_rows)
    # A temperature so small that 1 / temperature overflows is greedy as well.
    greedy = temperature < jnp.finfo(jnp.float32).tiny
    # The peak is at 0 before the division, so a small temperature cannot carry two tokens to +inf, and +inf - +inf
    # does not arise.
    scaled = jnp.where(logits == peak, 0.0, logits - peak) / jnp.where(greedy, 1.0, temperature)[:, None]
    ids = None
    if sampler.top_k is not None:
        scaled, ids = lax.top_k(scaled, sampler.top_k)
    if sampler.top_p is not None:
        scaled = jnp.where(_nucleus(jnp.exp(scaled), _per_row("top_p", sampler.top_p, n_rows)), scaled, -jnp.inf)
    noise = _per_key(lambda key: jax.random.gumbel(key, scaled.shape[1:], jnp.float32), keys)
    drawn = jnp.argmax(scaled + noise, axis=-1)  # a draw from the softmax: the Gumbel-max trick
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    return jnp.where(greedy, best, drawn)


def _nucleus(weights: Float[Array, "B N"], top_p: Float[Array, "B"]) -> Bool[Array, "B N"]:
    """The fewest largest weights that sum to ``top_p`` of all, ties by the lowest index; without sorting.

    Bisects for the largest weight ``w`` such that the weights of at least ``w`` suffice. Bit patterns of non-negative
    floats are ordered as the floats are, so 30 halvings settle every bit of a weight in [0, 1].
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    wanted = top_p * weights.sum(axis=-1)

    def mass_from(least):
        return jnp.where(bits >= least[:, None], weights, 0.0).sum(axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = mass_from(middle) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    start = jnp.zeros(len(weights), jnp.int32), jnp.full(len(weights), one + 1)
    least, _ = lax.fori_loop(0, 30, halve, start)
    above, tied = bits > least[:, None], bits == least[:, None]
    missing = wanted - jnp.where(above, weights, 0.0).sum(axis=-1)
    weight = lax.bitcast_convert_type(least, jnp.float32)
    n_tied = jnp.maximum(1, jnp.ceil(missing / weight)).astype(jnp.int32)
    kept = above | (tied & (jnp.cumsum(tied, axis=-1) <= n_tied[:, None]))
    return kept | (top_p >= 1)[:, None]  # rounding must not drop the tail when nothing is to be dropped


def _per_key(draw: Callable[[Array], Array], keys: Array) -> Array:
    if jax.random.key_impl(keys) == "threefry2x32":
        return jax.vmap(draw)(keys)
    return lax.map(draw, keys)  # other generators give a row other numbers when they are vectorised


def _per_row(name: str, value: Any, n_rows: int) -> Float[Array, "B"]:
    value = jnp.asarray(value, jnp.float32)
    if value.shape not in ((), (1,), (n_rows,)):
        raise ValueError(f"{name}: expected one number, or one for each of {n_rows} rows, got shape {value.shape}.")
    return jnp.broadcast_to(value, n_rows)


def _as_numbers(name: str, value: Any, holds: Callable[[np.ndarray], Any], expected: str) -> Any:
    """The value as float32: a NumPy array that was checked, or a tracer."""
    if isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, jnp.float32)
    array = np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name}: expected numbers, {expected}, got {value!r:.80}.")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if array.ndim > 1 or array.size == 0 or not np.all(holds(array)):
        raise ValueError(f"{name}: expected a number (or one for each row), {expected}, got {value!r:.80}.")
    return array
