"""How the next token is drawn from logits.

A sampler is a pytree: numbers that may change from call to call (temperature, top_p) are leaves, so changing them
never recompiles; what decides the program (greedy or not, top_k, whether there is a top_p) is structure.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Key


class Greedy(struct.PyTreeNode):
    """Takes the most likely token; the lowest id wins a tie."""


class Sample(struct.PyTreeNode):
    """Draws from the softmax of ``logits / temperature``, restricted to ``top_k`` and then to ``top_p``.

    Attributes:
      temperature: positive; a number or one per row, ``[B]``.
      top_p: keeps the fewest most likely tokens whose probabilities sum to at least this; None keeps all.
      top_k: keeps the k most likely tokens; None keeps all. Static.
    """

    temperature: Any
    top_p: Any = None
    top_k: int | None = struct.field(pytree_node=False, default=None)


def make_sampler(temperature: Any = 0.0, top_k: int | None = None, top_p: Any = None) -> Greedy | Sample:
    """Checks the numbers and makes a sampler; temperature 0 is greedy.

    Raises:
      TypeError: not numbers.
      ValueError: temperature negative or not finite, top_k below 1, top_p outside (0, 1].
    """
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
            raise TypeError(f"top_k: expected an integer or None, got {top_k!r}.")
        if top_k < 1:
            raise ValueError(f"top_k: expected at least 1, or None for all tokens, got {top_k}.")
        top_k = int(top_k)
    _check("temperature", temperature, lambda x: (x >= 0) & np.isfinite(x), "a finite number of at least 0")
    if top_p is not None:
        _check("top_p", top_p, lambda x: (x > 0) & (x <= 1), "a number in (0, 1], or None")
    if not isinstance(temperature, jax.core.Tracer) and np.ndim(temperature) == 0 and temperature == 0:
        return Greedy()
    _check("temperature", temperature, lambda x: x > 0, "all positive, or the single number 0 for greedy")
    return Sample(jnp.float32(temperature), None if top_p is None else jnp.float32(top_p), top_k)


def sample(sampler: Greedy | Sample, logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """Draws one token per row, each with its own key: a row's draw does not depend on the batch around it.

    Raises:
      ValueError: while tracing, when top_k exceeds the vocabulary.
    """
    if isinstance(sampler, Greedy):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampler.top_k is not None and sampler.top_k > logits.shape[-1]:
        raise ValueError(f"top_k: expected at most the vocabulary, {logits.shape[-1]}, got {sampler.top_k}.")
    logits = logits / jnp.broadcast_to(sampler.temperature, logits.shape[0])[:, None]
    if sampler.top_k is not None or sampler.top_p is not None:
        logits, ids = lax.top_k(logits, sampler.top_k or logits.shape[-1])
    else:
        ids = None
    if sampler.top_p is not None:
        before = jnp.cumsum(jax.nn.softmax(logits, axis=-1), axis=-1)
        before = jnp.concatenate([jnp.zeros_like(before[:, :1]), before[:, :-1]], axis=-1)
        keep = before < jnp.broadcast_to(sampler.top_p, logits.shape[0])[:, None]
        logits = jnp.where(keep, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    return drawn.astype(jnp.int32)


def _check(name, value, holds, expected):
    if isinstance(value, jax.core.Tracer):
        return
    array = np.asarray(value)
    if array.dtype == bool or not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name}: expected {expected}, got {value!r}.")
    if not np.all(holds(array)):
        raise ValueError(f"{name}: expected {expected}, got {value!r}.")
