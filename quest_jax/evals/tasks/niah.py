"""RULER's needles in a haystack: sentences that give a number for a key, and the keys that are asked for.

Needles, questions and the beginning of the answer are worded as RULER words them (arXiv 2404.06654, ``niah``,
Apache-2.0), because models are compared by these prompts; keys are pairs of our own words and the prose is Moby-Dick,
repeated where it ends, instead of Paul Graham's essays. Needles stand at random places, each before another sentence.
"""

import dataclasses
import functools
import random

from quest_jax.evals.needle import shipped_text, split_sentences
from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.passkey import FILLER
from quest_jax.evals.tasks.sizes import fill
from quest_jax.evals.tasks.task import Task, draw_of
from quest_jax.evals.tasks.words import pairs

N_NEW = 128
LEAST_HAYSTACK = 8


@dataclasses.dataclass(frozen=True)
class Needles:
    """One of RULER's settings.

    Attributes:
      name: of the task.
      haystack: ``noise`` (the passkey's five sentences a line), ``needles`` (of other keys) or ``prose``.
      keys: how many are hidden, and all are asked for.
      values: of each key.
    """

    name: str
    haystack: str
    keys: int = 1
    values: int = 1

    def __call__(self, tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
        """Builds samples; see :meth:`Task.make`."""

        def build(i: int, size: int) -> list[Sample]:
            return [self._sample(random.Random(draw_of(self.name, seed, i)), size)]

        return fill(tokenizer, n_tokens, n_cases, build, least=LEAST_HAYSTACK)

    def _sample(self, draw: random.Random, size: int) -> Sample:
        keys = draw.sample(pairs(), self.keys)
        numbers = [str(number) for number in draw.sample(range(10**6, 10**7), self.keys * self.values)]
        needles = [_needle(key, number) for key, number in zip(keys * self.values, numbers, strict=True)]
        draw.shuffle(needles)
        places = sorted(draw.sample(range(size), len(needles)))
        lines = self._lines(draw, size, {*keys, *numbers})
        for place, needle in zip(reversed(places), needles, strict=True):
            lines.insert(place, needle)
        one = len(needles) == 1
        head = (
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
            "about the number afterwards."
            if one
            else "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will "
            "quiz you about the numbers afterwards."
        )
        asked = f"for {_listed(keys)} mentioned in the provided text"
        question = (
            f"\nWhat is the special magic number {asked}? The special magic number {asked} is"
            if one
            else f"\nWhat are all the special magic numbers {asked}? The special magic numbers {asked} are"
        )
        text = (" " if self.haystack == "prose" else "\n").join(lines)
        return Sample(f"{head}\n{text}", question, tuple(numbers), "all_of", N_NEW, places[0] / size if one else None)

    def _lines(self, draw: random.Random, size: int, taken: set[str]) -> list[str]:
        if self.haystack == "noise":
            return [FILLER] * size
        if self.haystack == "prose":
            prose = _prose()
            return [prose[i % len(prose)] for i in range(size)]
        return [_other_needle(draw, taken) for _ in range(size)]


def _listed(keys: list[str]) -> str:
    """Keys as RULER writes them in a question: ``a``, ``a, and b``, ``a, b, and c``."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _needle(key: str, number: str) -> str:
    return f"One of the special magic numbers for {key} is: {number}."


def _other_needle(draw: random.Random, taken: set[str]) -> str:
    """A needle with neither key nor number of those asked for; others may repeat, as in RULER."""
    while True:
        key, number = draw.choice(pairs()), str(draw.randrange(10**6, 10**7))
        if not {key, number} & taken:
            return _needle(key, number)


@functools.cache
def _prose() -> tuple[str, ...]:
    return tuple(split_sentences(shipped_text()))


_SOURCE = "RULER, arXiv 2404.06654"
TASKS = (
    Task("niah_single", "a number in noise", f"{_SOURCE}, niah_single_1", Needles("niah_single", "noise")),
    Task("niah_multikey", "one of many numbers", f"{_SOURCE}, niah_multikey_2", Needles("niah_multikey", "needles")),
    Task("niah_multivalue", "four numbers of one key in prose", f"{_SOURCE}, niah_multivalue",
         Needles("niah_multivalue", "prose", values=4)),
    Task("niah_multiquery", "the numbers of four keys in prose", f"{_SOURCE}, niah_multiquery",
         Needles("niah_multiquery", "prose", keys=4)),
)  # fmt: skip
