"""How an answer is judged: a number in [0, 1] for a text and what is right.

============== ===================================================================================================
all_of         share of the answers that the text contains, in any case (RULER, ``string_match_all``)
any_of         1 if the text contains one of them (RULER, ``string_match_part``)
whole_word     1 if it contains one of them as a whole word, in any case (the needles of this project)
first_integer  1 if its first run of digits is one of them, as a number (Quest, ``evaluation/passkey``)
f1             F1 of the words it shares with the best answer (LongBench ``qa_f1_score``, English)
f1_first_line  the same of its first line, as LongBench judges few-shot tasks: a model goes on with the next example
rouge_l        F1 of the longest common subsequence of words with the best answer (Lin 2004, ROUGE-L)
============== ===================================================================================================

RULER: arXiv 2404.06654, ``scripts/eval/synthetic``. LongBench: arXiv 2308.14508, ``metrics.py``; its ROUGE-L is that
of the package ``rouge``, which adds up sentences, ours takes the text as one sequence: compare runs, not publications.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence

_DIGITS = 4000
"""Python turns no more than 4300 digits into a number."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(metric: str, answer: str, answers: Sequence[str]) -> float:
    """Judges an answer.

    Args:
      metric: one of ``NAMES``.
      answer: what a model wrote.
      answers: what is right, at least one.

    Returns:
      0 (wrong) to 1 (right).

    Raises:
      ValueError: no such metric, or no answers.

    Example:
      >>> score("all_of", "They are 17 and 4.", ("17", "5"))
      0.5
    """
    if metric not in _METRICS:
        raise ValueError(f"metric: expected one of {', '.join(NAMES)}, got {metric!r}.")
    if not answers:
        raise ValueError("answers: expected at least one, got none.")
    return _METRICS[metric](answer, answers)


def first_integer(answer: str) -> int | None:
    """The first run of digits of an answer as a number, None if there is none."""
    found = re.search(r"\d+", answer)
    return int(found.group()[:_DIGITS]) if found else None


def holds_word(text: str, word: str) -> bool:
    """Whether ``word`` stands in ``text``, in any case and not as a part of another word."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, in time ``len(other)`` operations on integers of ``len(one)`` bits.

    Bit i of ``rest`` is 0 where the length for the first i + 1 items of ``one`` is above that for the first i (Hyyro
    2004).
    """
    places: dict[str, int] = collections.defaultdict(int)
    for i, item in enumerate(one):
        places[item] |= 1 << i
    every = (1 << len(one)) - 1
    rest = every
    for item in other:
        met = rest & places.get(item, 0)
        rest = ((rest + met) | (rest - met)) & every
    return len(one) - rest.bit_count()


def _share_found(answer: str, answers: Sequence[str]) -> float:
    return sum(one.lower() in answer.lower() for one in answers) / len(answers)


def _any_found(answer: str, answers: Sequence[str]) -> float:
    return float(any(one.lower() in answer.lower() for one in answers))


def _any_word(answer: str, answers: Sequence[str]) -> float:
    return float(any(holds_word(answer, one) for one in answers))


def _first_integer(answer: str, answers: Sequence[str]) -> float:
    number = first_integer(answer)
    return float(number is not None and number in map(first_integer, answers))


def _f1(answer: str, answers: Sequence[str]) -> float:
    words = _plain_words(answer)
    return max(_of_words(words, _plain_words(one)) for one in answers)


def _f1_first_line(answer: str, answers: Sequence[str]) -> float:
    return _f1(answer.lstrip("\n").split("\n")[0], answers)


def _rouge_l(answer: str, answers: Sequence[str]) -> float:
    words = re.findall(r"\w+", answer.lower())
    others = [re.findall(r"\w+", one.lower()) for one in answers]
    return max(_harmonic(common_length(words, other), len(words), len(other)) for other in others)


def _plain_words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _of_words(words: list[str], others: list[str]) -> float:
    common = collections.Counter(words) & collections.Counter(others)
    return _harmonic(common.total(), len(words), len(others))


def _harmonic(common: int, one: int, other: int) -> float:
    """Harmonic mean of ``common / one`` and ``common / other``."""
    return 2 * common / (one + other) if common else 0.0


_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "all_of": _share_found,
    "any_of": _any_found,
    "whole_word": _any_word,
    "first_integer": _first_integer,
    "f1": _f1,
    "f1_first_line": _f1_first_line,
    "rouge_l": _rouge_l,
}
NAMES = tuple(_METRICS)
