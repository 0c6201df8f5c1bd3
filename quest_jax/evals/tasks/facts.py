"""Short facts in real prose, several in a context and asked for one by one: what small models can answer.

A fact is stated and restated, and the question repeats its words up to the answer. A context has one fact of a kind:
asked for one of two passwords, SmolLM2-135M names the other one as often as not. It answers these kinds where it fails
most of RULER.
"""

import dataclasses
import functools
import random

from quest_jax.evals.needle import INSTRUCTION, shipped_text, split_sentences
from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.sizes import check_numbers, fill
from quest_jax.evals.tasks.task import Task, draw_of

N_NEW = 6
FACTS = 6
"""In a context."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Facts of one form.

    Attributes:
      subjects: what is told about.
      answers: what is told; none of them is in the prose.
      question: what is asked, ``{}`` being the subject.
      begins: the statement up to its answer.
      ends: what follows the answer.
    """

    subjects: tuple[str, ...]
    answers: tuple[str, ...]
    question: str
    begins: str
    ends: str = ""

    def statement(self, subject: str, answer: str) -> str:
        """The sentences that stand in the prose."""
        begins = self.begins.format(subject)
        return f"{begins}{answer}{self.ends}. Remember that {begins[0].lower()}{begins[1:]}{answer}{self.ends}."

    def asked(self, subject: str) -> str:
        """The question with the beginning of its answer; without a last space, which belongs to the next word."""
        return f"\n{self.question.format(subject)} {self.begins.format(subject).rstrip(' ')}"


KINDS = {
    "password": Kind(
        tuple("vault cellar library castle laboratory workshop greenhouse museum bakery airport theater".split()),
        tuple(
            "accordion porcupine saxophone marmalade trampoline kangaroo microwave pineapple waterfall dinosaur "
            "carousel chocolate bicycle helicopter xylophone sunflower penguin volcano spaghetti cinnamon broccoli "
            "hamburger snowman tornado flamingo gorilla keyboard popcorn pyjamas toothbrush".split()
        ),
        "What is the password of the {}?", 'The password of the {} is "', '"',
    ),
    "fruit": Kind(
        tuple("wizard plumber gardener detective pianist astronaut librarian florist magician dentist pilot".split()),
        tuple("papaya mango apricot coconut banana kiwi lychee guava tangerine raspberry blueberry nectarine".split()),
        "What is the favorite fruit of the {}?", "The favorite fruit of the {} is the ",
    ),
    "color": Kind(
        tuple("spaceship submarine orchestra football festival railway hospital tournament parade circus".split()),
        tuple("orange purple turquoise pink yellow brown lavender indigo violet scarlet".split()),
        "What is the official color of the {}?", "The official color of the {} is ",
    ),
    "room": Kind(
        tuple(
            "golden violin|silver trophy|wooden puppet|broken typewriter|antique globe|glass slipper|stuffed parrot|"
            "marble statue|leather suitcase|copper teapot".split("|")
        ),
        tuple(str(number) for number in range(101, 1000) if number != 500),  # Moby-Dick names 500
        "Where is the {} kept?", "The {} is kept in room number ",
    ),
    "year": Kind(
        tuple("robot factory|ice rink|toy store|subway station|art gallery|skate park|movie studio".split("|")),
        tuple(str(number) for number in range(1901, 2000)),
        "When was the {} opened?", "The {} was opened in the year ",
    ),
    "city": Kind(
        tuple("engineer|novelist|sculptor|dancer|economist|goalkeeper|chemist|photographer".split("|")),
        tuple("Lisbon Toronto Nairobi Oslo Sydney Chicago Budapest Helsinki Havana Dublin Seattle Manila".split()),
        "Where was the {} born?", "The {} was born in the city of ",
    ),
}  # fmt: skip


def generate(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int, facts: int = FACTS) -> list[Sample]:
    """Questions about contexts of Moby-Dick that begin at sentences drawn by the seed.

    Facts stand at equal steps, the first half a step from the start. All samples of a context have the same text, so
    that it is read once; the last context has all its facts and may be asked for fewer.

    Args:
      tokenizer: counts.
      n_tokens: of context, question and answer; at most the shipped text, about 12 000.
      n_cases: questions, over all contexts.
      seed: of beginnings, facts and their order.
      facts: in a context, at most as many as there are kinds.

    Raises:
      ValueError: numbers out of range.
    """
    check_numbers(n_tokens, n_cases)
    if not 1 <= facts <= len(KINDS):
        raise ValueError(f"facts: expected 1 to {len(KINDS)} in a context, one of a kind, got {facts}.")
    sentences = _sentences()

    def build(i: int, size: int) -> list[Sample]:
        draw = random.Random(draw_of("facts", seed, i))
        start = draw.randrange(len(sentences))
        prose = [sentences[(start + j) % len(sentences)] for j in range(size)]
        told = _draw_facts(draw, facts)
        places = [round(size * (2 * j + 1) / (2 * facts)) for j in range(facts)]
        for place, (kind, subject, answer) in reversed(list(zip(places, told, strict=True))):
            prose.insert(place, kind.statement(subject, answer))
        context = f"{INSTRUCTION}\n{' '.join(prose)}"
        return [
            Sample(context, kind.asked(subject), (answer,), "whole_word", N_NEW, place / size)
            for place, (kind, subject, answer) in zip(places, told, strict=True)
        ]

    n_contexts = -(-n_cases // facts)
    return fill(tokenizer, n_tokens, n_contexts, build, least=facts, most=len(sentences))[:n_cases]


def _draw_facts(draw: random.Random, count: int) -> list[tuple[Kind, str, str]]:
    """Facts of different kinds in any order."""
    kinds = draw.sample(list(KINDS.values()), count)
    return [(kind, draw.choice(kind.subjects), draw.choice(kind.answers)) for kind in kinds]


@functools.cache
def _sentences() -> tuple[str, ...]:
    return tuple(split_sentences(shipped_text()))


TASKS = (
    Task("facts", "short facts in prose, six a context", "the needles of this project", generate),
)  # fmt: skip
