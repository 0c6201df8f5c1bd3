"""Contexts of a given length: how much haystack fits."""

import functools
import math
from collections.abc import Callable, Sequence

from quest_jax.evals.samples import Encoder, Sample

MOST_TOKENS = 2**24
"""More than any model reads; what is asked for beyond it is a slip, and would take memory without end."""


def n_tokens_of(tokenizer: Encoder, samples: Sequence[Sample]) -> int:
    """Tokens that samples of one context need at most: context, question and answer, tokenised as they are fed.

    The question continues the context, so that no begin-of-text token stands in front of it.
    """
    asked = max(len(tokenizer.encode(one.question, add_special_tokens=False)) + one.n_new for one in samples)
    return len(tokenizer.encode(samples[0].context)) + asked


def check_numbers(n_tokens: int, n_cases: int) -> None:
    """Refuses what no task can make.

    Raises:
      ValueError: fewer than 1, or more tokens than ``MOST_TOKENS``.
    """
    if n_cases < 1:
        raise ValueError(f"n_cases: expected at least 1, got {n_cases}.")
    if not 1 <= n_tokens <= MOST_TOKENS:
        raise ValueError(f"n_tokens: expected 1 to {MOST_TOKENS}, got {n_tokens}.")


def fill(
    tokenizer: Encoder,
    n_tokens: int,
    n_contexts: int,
    build: Callable[[int, int], list[Sample]],
    *,
    least: int,
    most: int | None = None,
) -> list[Sample]:
    """Builds contexts as large as ``n_tokens`` allows.

    The largest size of the first context is searched for; the others begin with it, and are made larger or smaller
    where their words take fewer or more tokens. So a context is tokenised two or three times.

    Args:
      tokenizer: counts.
      n_tokens: of context, question and answer together.
      n_contexts: how many to build.
      build: the samples of a context by its number and its size, in whatever the haystack consists of. One number must
        give the same questions at all sizes, and more tokens at larger sizes.
      least: smallest size that ``build`` takes.
      most: largest size that ``build`` takes; None if there is none.

    Raises:
      ValueError: ``n_tokens`` is less than the smallest needs or more than the largest has.
    """
    check_numbers(n_tokens, n_contexts)
    size = _largest(lambda size: n_tokens_of(tokenizer, build(0, size)), n_tokens, least, most)
    samples: list[Sample] = []
    for context in range(n_contexts):
        samples += _fitting(tokenizer, n_tokens, functools.partial(build, context), size, least, most)
    return samples


def _largest(length: Callable[[int], int], n_tokens: int, least: int, most: int | None) -> int:
    """The largest size that fits, or one that lacks less than a thousandth: some haystacks grow by characters.

    Lengths are near a straight line in the size; every other step halves the range, for where they are not.
    """
    low, short, high = least, length(least), None
    _check_least(short, n_tokens)
    slope, halve = short / least, False
    while n_tokens - short > n_tokens // 1000 and (high is None or high - low > 1):
        if low == most:
            raise ValueError(
                f"n_tokens: this task has text for {short} tokens at most, got {n_tokens}; ask for shorter prompts."
            )
        if high is None:
            top = min(4 * low, most or 4 * low)
            size = low + int((n_tokens - short) / slope)
        else:
            top = high - 1
            size = (low + high) // 2 if halve else low + int((n_tokens - short) / slope)
            halve = not halve
        size = min(max(size, low + 1), top)
        found = length(size)
        slope = max(found - short, 1) / (size - low)
        if found <= n_tokens:
            low, short = size, found
        else:
            high = size
    return low


def _fitting(
    tokenizer: Encoder, n_tokens: int, build: Callable[[int], list[Sample]], size: int, least: int, most: int | None
) -> list[Sample]:
    """The samples of one context, of about ``size``: more in proportion, then less until they are not too long."""
    samples = build(size)
    length = n_tokens_of(tokenizer, samples)
    if (more := min(size * n_tokens // length, most or MOST_TOKENS)) > size:
        size, samples = more, build(more)
        length = n_tokens_of(tokenizer, samples)
    while length > n_tokens:
        if size == least:
            _check_least(length, n_tokens)
        size = max(least, size - math.ceil((length - n_tokens) * size / length))
        samples = build(size)
        length = n_tokens_of(tokenizer, samples)
    return samples


def _check_least(shortest: int, n_tokens: int) -> None:
    if shortest > n_tokens:
        raise ValueError(
            f"n_tokens: expected at least {shortest} for question, answer and the least of context, got {n_tokens}; "
            "ask for longer prompts."
        )
