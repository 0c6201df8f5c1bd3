"""One prefilled context, many questions, texts and policies, all decoded token by token."""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax import DecodeState, DecodeStats, Greedy, Params, decode_step
from quest_jax.inputs import as_batch, as_size
from quest_jax.reads import room_for
from quest_jax.stats import make_stats

Logits = Float[Array, "W B V"]

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


class Followed(NamedTuple):
    """What :func:`follow` returns, for every token but the first, ``[n, B]``; NaN past a row's text.

    The first is left out: what predicts it was made before the policy read anything.

    Attributes:
      nll: negative log-likelihood of the token, in nats.
      kl: Kullback-Leibler divergence from the reference's distribution, in nats.
      agree: 1 where the likeliest token is the reference's.
      stats: reads of every step.
    """

    nll: Float[np.ndarray, "n B"]
    kl: Float[np.ndarray, "n B"]
    agree: Float[np.ndarray, "n B"]
    stats: DecodeStats


def ask(
    params: Params,
    state: DecodeState,
    questions: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    reference: Logits | None = None,
) -> Answers:
    """Feeds every row its question and decodes an answer greedily, both by the policy of ``state``.

    ``state`` stays usable, so that it can be asked again, with another policy by
    :func:`quest_jax.decode.replace_policy`. While this runs the cache exists twice.

    Args:
      params: as for :func:`quest_jax.decode.decode_step`.
      state: prefilled with ``eos_token_ids=()`` and without temperature.
      questions: token ids, one question a row, of any lengths.
      max_new_tokens: length of the answers; eos ids are tokens like others here.
      reference: of :func:`predict`, not used: with it the program is that of :func:`follow`.

    Raises:
      ValueError: a state that samples or stops at an eos, not one question a row, or no room for it and its answer.
    """
    given, lengths, steps = _check(params, state, questions, as_size("max_new_tokens", max_new_tokens), reference)
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    start = time.perf_counter()
    _, made, reads, _ = jax.block_until_ready(_run(params, state, given, lengths, steps, reference))
    seconds = time.perf_counter() - start
    steps, made = int(steps), np.asarray(made)
    answers = [row[n : n + max_new_tokens] for row, n in zip(made, np.asarray(lengths), strict=True)]
    return Answers(np.stack(answers), make_stats(state, jax.tree.map(lambda read: read[:steps], reads)), steps, seconds)


def predict(params: Params, state: DecodeState, texts: Sequence[Sequence[int]], room: int = 0) -> Logits:
    """Feeds every row its text by the policy of ``state``, and returns the logits before each of its tokens.

    Args:
      params, state: as for :func:`ask`.
      texts: token ids, one text a row, of any lengths.
      room: tokens that are to be fed with these logits as a reference at least; more rows of zeros.
    """
    given, lengths, steps = _check(params, state, texts, 0, None, room)
    return _run(params, jax.tree.map(jnp.copy, state), given, lengths, steps, None, keep=True)[3]


def follow(params: Params, state: DecodeState, texts: Sequence[Sequence[int]], reference: Logits) -> Followed:
    """Feeds every row its text by the policy of ``state``: how likely it finds it, and how far from the reference.

    Args:
      params, state: as for :func:`ask`.
      texts: token ids, one text of at least two a row, of any lengths.
      reference: the logits of :func:`predict` for these texts.

    Raises:
      ValueError: as :func:`ask`, or a reference of other sizes.
    """
    given, lengths, steps = _check(params, state, texts, 0, reference)
    copied = jax.tree.map(jnp.copy, state)
    _, _, reads, measured = jax.block_until_ready(_run(params, copied, given, lengths, steps, reference))
    steps = int(steps)
    real = np.arange(1, steps)[:, None] < np.asarray(lengths)
    nll, kl, agree = (np.where(real, np.asarray(one)[1:steps], np.nan) for one in measured)
    return Followed(nll, kl, agree, make_stats(state, jax.tree.map(lambda read: read[:steps], reads)))


def forget_programs() -> None:
    """Frees the compiled programs of the policies so far: those of a model of 30 layers take hundreds of MB each."""
    jax.clear_caches()  # those that read prompts too: of 29 policies that do, they took 24 GB


def _check(params, state, questions, max_new_tokens, reference, room=0):
    """Returns the questions, padded with room for the answers, their lengths, and the steps to run."""
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
    width = max(room, -(-given.shape[1] // _WIDTH) * _WIDTH + max_new_tokens)
    if reference is not None:
        width = len(reference)
        if reference.shape[1:] != state.logits.shape or width < steps:
            raise ValueError(
                f"ask: expected a reference of {len(given)} rows, {state.logits.shape[1]} tokens of vocabulary and at "
                f"least {steps} steps, got {reference.shape}."
            )
    given = jnp.pad(jnp.asarray(given), ((0, 0), (0, width - given.shape[1])))
    return given, jnp.asarray(lengths), jnp.int32(steps)


@functools.partial(jax.jit, donate_argnames="state", static_argnames="keep")
def _run(params, state, given, lengths, steps, reference, keep: bool = False):
    """Decodes ``steps`` tokens a row, the first ``lengths`` of them ``given``.

    Returns the state, the tokens, the reads, and of every step the logits (``keep``) or, with a reference, measures.
    """
    width, (rows, vocab) = given.shape[1], state.logits.shape

    def step(t, carry):
        state, tokens, reads, kept = carry
        # A given token is one that is certain: a single model in the program serves question and answer.
        token = lax.dynamic_index_in_dim(given, t, axis=1)
        certain = jnp.where(jnp.arange(vocab) == token, 0.0, -jnp.inf)
        if keep:
            kept = kept.at[t].set(state.logits)
        elif reference is not None:
            now = _measure(state.logits, reference[t], token[:, 0])
            kept = jax.tree.map(lambda every, one: every.at[t].set(one), kept, now)
        logits = jnp.where((t < lengths)[:, None], certain, state.logits)
        state, token = decode_step(params, state.replace(logits=logits))
        reads = jax.tree.map(lambda all_steps, now: all_steps.at[t].set(now), reads, state.attention.reads)
        return state, tokens.at[:, t].set(token), reads, kept

    kept = jnp.zeros((width, rows, vocab)) if keep else (jnp.zeros((width, rows)),) * 3
    carry = (state, jnp.zeros_like(given), room_for(width, state.attention.reads), kept)
    return lax.fori_loop(0, steps, step, carry)


def _measure(logits, reference, token):
    """Of one step, ``[B]`` each: negative log-likelihood, divergence, agreement."""
    own, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    nll = -jnp.take_along_axis(own, token[:, None], axis=-1)[:, 0]
    kl = (jnp.exp(other) * (other - own)).sum(axis=-1)
    return nll, kl, (own.argmax(axis=-1) == other.argmax(axis=-1)).astype(jnp.float32)
