"""A fact hidden in real prose, and the question that asks for it."""

import dataclasses
import importlib.resources
import re
from collections.abc import Callable

from quest_jax.evals.metrics import holds_word

INSTRUCTION = (
    "There is some important information hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something a text says once in passing.

    Small models find a fact best when it is stated, restated, and when the beginning of the answer repeats its words;
    a "Question: ... Answer:" frame makes them worse.

    Attributes:
      subject: what is asked, as in "password of the vault".
      answer: the word that no other part of the text can supply.
    """

    subject: str = "password of the vault"
    answer: str = "accordion"

    @property
    def statement(self) -> str:
        """The sentences hidden in the text."""
        return f'The {self.subject} is "{self.answer}". Remember that the {self.subject} is "{self.answer}".'

    @property
    def question(self) -> str:
        """The question with the beginning of its answer."""
        return f'\nWhat is the {self.subject}? The {self.subject} is "'

    def found_in(self, answer: str) -> bool:
        """Whether a model's answer holds the fact, as a whole word, in any case."""
        return holds_word(answer, self.answer)


def shipped_text() -> str:
    """About 12 000 tokens of Moby-Dick (public domain; source in ``data/README.md``), one paragraph a line."""
    return importlib.resources.files("quest_jax").joinpath("data", "moby_dick.txt").read_text(encoding="ascii")


def split_sentences(text: str) -> list[str]:
    """Cuts prose after the full stops, question and exclamation marks that end a sentence; white space becomes one."""
    pieces = re.split(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z])|(?<=[.!?][\"')])\s+(?=[\"'(]?[A-Z])|\n", text)
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def hide(fact: Fact, text: str, n_tokens: int, depth: float, count: Callable[[str], int]) -> str:
    """Builds a document of at most ``n_tokens`` tokens from whole sentences of ``text``, with the fact inside.

    Args:
      fact: what to hide.
      text: prose to take from, from its beginning on.
      n_tokens: length of the document, instruction and fact included.
      depth: where the fact stands, as a fraction of the sentences before it (0 start, 1 end).
      count: number of tokens of a string.

    Returns:
      The document, within one sentence of ``n_tokens`` tokens.

    Raises:
      ValueError: a depth outside [0, 1], fewer tokens than instruction and fact need, more than ``text`` has, or a text
        that already holds the answer.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth: expected a fraction in [0, 1], got {depth}.")
    if fact.found_in(text):
        raise ValueError(f"the text already holds the answer {fact.answer!r}; hide a word that it does not use.")
    sentences = split_sentences(text)

    def document(n_sentences: int) -> str:
        before = round(n_sentences * depth)
        body = " ".join([*sentences[:before], fact.statement, *sentences[before:n_sentences]])
        return f"{INSTRUCTION}\n{body}"

    shortest, longest = count(document(0)), count(document(len(sentences)))
    if not shortest <= n_tokens <= longest:
        raise ValueError(
            f"tokens: expected {shortest} to {longest} with this text and fact, got {n_tokens}; "
            "ask for a length in that range."
        )
    low, high = 0, len(sentences)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(document(middle)) <= n_tokens else (low, middle - 1)
    return document(low)
