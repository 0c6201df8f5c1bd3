"""RULER's variable tracking: which variables hold a value that is handed on from one to the next.

Worded as RULER words it (arXiv 2404.06654, ``variable_tracking``, Apache-2.0), with its one solved example in front.
The beginning of the answer stops before its last space: byte-level vocabularies join a space with the word after it.
"""

import random
import string

from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.passkey import FILLER
from quest_jax.evals.tasks.sizes import fill
from quest_jax.evals.tasks.task import Task, draw_of

N_NEW = 30
HOPS = 4
EXAMPLE_LINES = 10
"""Of noise, in the solved example."""
NAME = "vt"


def generate(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
    """One chain of four hops in noise, in order, at random places; see :meth:`Task.make`."""

    def build(i: int, size: int) -> list[Sample]:
        draw = random.Random(draw_of(NAME, seed, i))
        names = _names(draw, 2 * (HOPS + 1))
        shown, asked = names[: HOPS + 1], names[HOPS + 1 :]
        first, second = (str(value) for value in draw.sample(range(10_000, 100_000), 2))
        example = f"{_text(draw, shown, first, EXAMPLE_LINES)}{_question(first)} {' '.join(shown)}\n\n"
        context = example + _text(draw, asked, second, size)
        return [Sample(context, _question(second), tuple(asked), "all_of", N_NEW)]

    return fill(tokenizer, n_tokens, n_cases, build, least=HOPS + 1)


def _names(draw: random.Random, count: int) -> list[str]:
    """Different names of five capitals."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(names)


def _text(draw: random.Random, names: list[str], value: str, size: int) -> str:
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {to} = VAR {origin}" for origin, to in zip(names, names[1:], strict=False)]
    lines = [FILLER] * size
    places = sorted(draw.sample(range(size), len(chain)))
    for place, line in zip(reversed(places), reversed(chain), strict=True):
        lines.insert(place, line)
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text."
    return f"{head}\n\n{'\n'.join(lines)}"


def _question(value: str) -> str:
    return (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {HOPS + 1} variables are assigned the value {value}, "
        "they are:"
    )


TASKS = (
    Task(NAME, "variables of one chain of four hops in noise", "RULER, arXiv 2404.06654, vt", generate),
)  # fmt: skip
