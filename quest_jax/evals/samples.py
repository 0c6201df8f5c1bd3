"""A question about a context, and what a right answer is: what every task of ``quest-jax eval`` consists of."""

import dataclasses
from typing import Protocol, runtime_checkable


@runtime_checkable
class Encoder(Protocol):
    """The part of a tokenizer that building a case needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with a begin-of-text token in front if the model wants one and nothing precedes."""
        ...


@runtime_checkable
class Decoder(Encoder, Protocol):
    """The part of a tokenizer that judging an answer needs as well."""

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``."""
        ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
      context: text that is read as a prompt is. Samples with the same context share its reading.
      question: text that follows it, with the beginning of the answer where the task gives one; decoded by the method
        under test, token by token.
      answers: what is right, as the metric takes it.
      metric: name of one of :mod:`quest_jax.evals.metrics`.
      n_new: tokens of the answer.
      depth: where the fact stands in the context, 0 start, 1 end; None where it has no one place.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    n_new: int
    depth: float | None = None
