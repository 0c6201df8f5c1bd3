"""Quest's passkey test: a number hidden in a loop of filler, asked for through the sparse decode path.

The protocol is the one behind the accuracy figures of Quest (arXiv 2406.10774, ``evaluation/passkey``), with the prompt
of landmark attention (arXiv 2305.16300): a key between 1 and 50000, stated twice, at depths in equal steps; everything
but the last 400 characters is prefilled densely, those 400 are fed token by token through the policy under test, then
ten tokens are decoded greedily and the first integer among them must be the key. A question that is prefilled
densely would make any policy look better than it is, because the answer is then half found before the policy runs.
"""

import random

from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.sizes import check_numbers, fill
from quest_jax.evals.tasks.task import Task

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
KEY_RANGE = (1, 50_000)
SPARSE_CHARACTERS = 400
ANSWER_TOKENS = 10


def generate(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
    """Case i of n hides its key after the fraction (i + 1) / n of the filler: the last one at its end.

    The question is the last 400 characters, filler included. Keys are drawn from ``seed``.
    """
    check_numbers(n_tokens, n_cases)
    draw = random.Random(seed)
    keys = [draw.randint(*KEY_RANGE) for _ in range(n_cases)]

    def build(i: int, n_filler: int) -> list[Sample]:
        depth = (i + 1) / n_cases
        context, tail = write(keys[i], depth, n_filler)
        return [Sample(context, tail, (str(keys[i]),), "first_integer", ANSWER_TOKENS, depth)]

    return fill(tokenizer, n_tokens, n_cases, build, least=SPARSE_CHARACTERS)


def write(key: int, depth: float, n_filler: int) -> tuple[str, str]:
    """The text of a case in two parts, the second of 400 characters; the key after ``depth`` of ``n_filler`` others."""
    filler = f"{FILLER} " * (n_filler // len(FILLER) + 1)
    before = int(n_filler * depth)
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    text = "\n".join((TASK, filler[:before], fact, filler[: n_filler - before], QUESTION))
    return text[:-SPARSE_CHARACTERS], text[-SPARSE_CHARACTERS:]


TASKS = (
    Task("passkey", "a number in a loop of filler", "Quest, arXiv 2406.10774, evaluation/passkey", generate),
)  # fmt: skip
