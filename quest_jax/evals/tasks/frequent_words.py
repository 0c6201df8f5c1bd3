"""RULER's two tasks of counting words: those that stand in a list most often.

Worded as RULER words them (arXiv 2404.06654, ``common_words_extraction`` and ``freq_words_extraction``, Apache-2.0).
Ordinary words are those of the shipped prose; where they are not enough, pairs (``curious-teapot``) are among them.
"""

import math
import random
import string
from collections.abc import Sequence

from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.sizes import fill
from quest_jax.evals.tasks.task import Task, draw_of
from quest_jax.evals.tasks.words import pairs, prose_words

COMMON = 10
"""Words that stand in the list of ``cwe`` more often than the others."""
CODED = 3
"""Words that ``fwe`` asks for."""
CODED_LENGTH = 6
LONG = 4096
"""Tokens from which on RULER repeats common words 30 times and others 3 times; below, 6 times and once."""


def generate_common(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
    """A numbered list in which ten words are more frequent, after a short solved one; see :meth:`Task.make`."""
    often, seldom = (30, 3) if n_tokens >= LONG else (6, 1)
    example = (40, 10, 3) if n_tokens >= LONG else (20, 3, 1)

    def build(i: int, n_words: int) -> list[Sample]:
        draw = random.Random(draw_of("cwe", seed, i))
        shown, found = _list(draw, *example)
        asked, answers = _list(draw, n_words, often, seldom)
        context = f"{shown}{_COMMON_QUESTION} {_numbered(found)}\n{asked}"
        return [Sample(context, _COMMON_QUESTION, tuple(answers), "all_of", n_new=120)]

    return fill(tokenizer, n_tokens, n_cases, build, least=2 * COMMON, most=len(prose_words()) + len(pairs()))


def generate_coded(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
    r"""Coded words whose counts fall as the square of their rank, the first of them dots; see :meth:`Task.make`.

    Of n words, rank k has floor(n k^-2 / zeta(2)).
    """

    def build(i: int, n_words: int) -> list[Sample]:
        draw = random.Random(draw_of("fwe", seed, i))
        counts = coded_counts(n_words)
        words = ["...", *_coded(draw, len(counts) - 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        draw.shuffle(text)
        head = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words."
        )
        answers = tuple(words[1 : 1 + CODED])
        return [Sample(f"{head} {' '.join(text)}", _CODED_QUESTION, answers, "all_of", n_new=50)]

    return fill(tokenizer, n_tokens, n_cases, build, least=_LEAST_CODED)


def coded_counts(n_words: int) -> list[int]:
    """How often each rank stands in a text of about ``n_words``, from the first to the last that is there at all."""
    scale = 6 * n_words / math.pi**2
    return [int(scale / rank**2) for rank in range(1, math.isqrt(int(scale)) + 1)]


def _list(draw: random.Random, n_words: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """A numbered list of ``n_words`` different words, and those that are frequent in it."""
    plain = min(n_words, len(prose_words()))
    words = draw.sample(prose_words(), plain) + draw.sample(pairs(), n_words - plain)
    draw.shuffle(words)
    common, others = words[:COMMON], words[COMMON:]
    text = common * often + others * seldom
    draw.shuffle(text)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often."
    )
    return f"{head}\n{_numbered(text)}", common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _coded(draw: random.Random, count: int) -> list[str]:
    """Different words of six random letters."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(string.ascii_lowercase, k=CODED_LENGTH))] = None
    return list(words)


_LEAST_CODED = 150
"""Words with which the third of those asked for stands there five times and the next word three times."""
_COMMON_QUESTION = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
    "in the list are:"
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
TASKS = (
    Task("cwe", "the ten most common words of a list", "RULER, arXiv 2404.06654, cwe", generate_common),
    Task("fwe", "the three most frequent coded words", "RULER, arXiv 2404.06654, fwe", generate_coded),
)  # fmt: skip
