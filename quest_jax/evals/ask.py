"""One prefilled context, many questions and policies: question and answer both decoded, token by token."""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from quest_jax import DecodeState, DecodeStats, Greedy, Params, decode_step
from quest_jax.attention import init_reads
from quest_jax.inputs import as_batch, as_size
from quest_jax.stats import make_stats

# Widths of questions are rounded up to this, so that a few lengths share a program.
_WIDTH = 32


class Answers(NamedTuple):
    """What :func:`ask` returns.

    Attributes:
      tokens: int32 ``[B, max_new_tokens]``, the greedy answers.
      stats: reads of every step, those of the questions first.
      steps: decode steps that were run, for questions and answers.
      seconds: wall time of these steps; with compiling, if this was the first time.
    """

    tokens: Int[np.ndarray, "B n"]
    stats: DecodeStats
    steps: int
    seconds: float


def ask(
    params: Params,
    state: DecodeState,
    questions: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> Answers:
    """Feeds every row its question and decodes an answer greedily, both by the policy of ``state``.

    ``state`` stays usable, so that it can be asked again, with another policy by
    :func:`quest_jax.decode.replace_policy`. While this runs the cache exists twice.

    Args:
      params: as for :func:`quest_jax.decode.decode_step`.
      state: prefilled with ``eos_token_ids=()`` and without temperature.
      questions: token ids, one question a row, of any lengths.
      max_new_tokens: length of the answers; eos ids are tokens like others here.

    Raises:
      ValueError: a state that samples or stops at an eos, not one question a row, or no room for it and its answer.
    """
    given, lengths, steps = _check(params, state, questions, max_new_tokens)
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    start = time.perf_counter()
    state, made, reads = jax.block_until_ready(_run(params, state, given, lengths, steps))
    seconds = time.perf_counter() - start
    steps, made = int(steps), np.asarray(made)
    answers = [row[n : n + max_new_tokens] for row, n in zip(made, np.asarray(lengths), strict=True)]
    return Answers(np.stack(answers), make_stats(state, jax.tree.map(lambda read: read[:steps], reads)), steps, seconds)


def _check(params, state, questions, max_new_tokens):
    """Returns the questions, padded with room for the answers, their lengths, and the steps to run."""
    max_new_tokens = as_size("max_new_tokens", max_new_tokens)
    if not isinstance(state.sampler, Greedy) or state.eos.tolist() != [-1]:
        raise ValueError("ask: expected a greedy state without eos; prefill with temperature=0 and eos_token_ids=().")
    given, lengths = as_batch([list(question) for question in questions], None, params.config.vocab_size)
    if len(given) != len(state.done):
        raise ValueError(f"ask: expected {len(state.done)} questions, one a row, got {len(given)}.")
    # Rows with a shorter question run on to the common end; what they make past their answer is dropped.
    steps = given.shape[1] + max_new_tokens
    longest, capacity = int(state.lengths.max()) + steps, state.attention.cache.capacity
    if longest > capacity:
        raise ValueError(
            f"ask: expected context, question and answer to fit the capacity of {capacity} tokens, got {longest}; "
            "prefill with a larger capacity."
        )
    padding = -given.shape[1] % _WIDTH + max_new_tokens
    return jnp.pad(jnp.asarray(given), ((0, 0), (0, padding))), jnp.asarray(lengths), jnp.int32(steps)


@functools.partial(jax.jit, donate_argnames="state")
def _run(params, state, given, lengths, steps):
    """Decodes ``steps`` tokens a row, the first ``lengths`` of them ``given``."""
    layers, rows = state.attention.reads.read.shape

    def step(t, carry):
        state, tokens, reads = carry
        # A given token is one that is certain: a single model in the program serves question and answer.
        token = lax.dynamic_index_in_dim(given, t, axis=1)
        certain = jnp.where(jnp.arange(state.logits.shape[1]) == token, 0.0, -jnp.inf)
        logits = jnp.where((t < lengths)[:, None], certain, state.logits)
        state, token = decode_step(params, state.replace(logits=logits))
        reads = jax.tree.map(lambda all_steps, now: all_steps.at[t].set(now), reads, state.attention.reads)
        return state, tokens.at[:, t].set(token), reads

    carry = (state, jnp.zeros_like(given), init_reads(given.shape[1], layers, rows))
    return lax.fori_loop(0, steps, step, carry)
