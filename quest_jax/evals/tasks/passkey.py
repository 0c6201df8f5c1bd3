"""Quest's passkey (:mod:`quest_jax.evals.passkey`) as samples."""

import random

from quest_jax.evals import passkey
from quest_jax.evals.samples import Sample
from quest_jax.evals.tasks.sizes import check_numbers, fill
from quest_jax.evals.tasks.task import Task


def generate(tokenizer: passkey.Encoder, n_tokens: int, n_cases: int, seed: int) -> list[Sample]:
    """A key of 1 to 50000 in a loop of filler, stated once more; depths in equal steps, the last one the end.

    The question is the last 400 characters, filler included. Keys are those of :func:`passkey.make_cases`.
    """
    check_numbers(n_tokens, n_cases)
    draw = random.Random(seed)
    keys = [draw.randint(*passkey.KEY_RANGE) for _ in range(n_cases)]

    def build(i: int, n_filler: int) -> list[Sample]:
        depth = (i + 1) / n_cases
        context, tail = passkey.write(keys[i], depth, n_filler)
        return [Sample(context, tail, (str(keys[i]),), "first_integer", passkey.ANSWER_TOKENS, depth)]

    return fill(tokenizer, n_tokens, n_cases, build, least=passkey.SPARSE_CHARACTERS)


TASKS = (
    Task("passkey", "a number in a loop of filler", "Quest, arXiv 2406.10774, evaluation/passkey", generate),
)  # fmt: skip
