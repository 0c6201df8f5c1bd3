"""Prompts that RULER's own scripts have written, for comparison with what others publish.

A line of such a file (arXiv 2404.06654, ``prepare.py``) has ``input``, ``outputs`` and, in newer versions,
``answer_prefix``. Which task it is, the file does not say: that decides how many tokens are generated and how they are
judged.
"""

import dataclasses
import os

from quest_jax.evals.samples import Encoder, Sample
from quest_jax.evals.tasks.jsonl import read_lines, text, texts
from quest_jax.evals.tasks.longbench import draw_records
from quest_jax.evals.tasks.sizes import check_numbers, n_tokens_of
from quest_jax.evals.tasks.task import Task, draw_of
from quest_jax.weights.fields import Fields

QUESTION_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class Kind:
    """What RULER does with a task.

    Attributes:
      name: of the task here.
      n_new: tokens of the answer.
      metric: that judges it.
    """

    name: str
    n_new: int
    metric: str = "all_of"

    def __call__(
        self, tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int, path: str | os.PathLike[str]
    ) -> list[Sample]:
        """Samples of lines that the seed draws, in the order of the file; see :meth:`Task.make`.

        Raises:
          ValueError: a drawn prompt needs more than ``n_tokens``. RULER writes files for a length; nothing is cut.
        """
        check_numbers(n_tokens, n_cases)
        samples = draw_records(read_lines(path, self._sample), n_cases, draw_of(self.name, seed, 0))
        if (longest := max(n_tokens_of(tokenizer, [sample]) for sample in samples)) > n_tokens:
            raise ValueError(
                f"n_tokens: {path} has prompts of {longest} tokens with their answers, got {n_tokens}; ask for that "
                "many, or have RULER write shorter ones."
            )
        return samples

    def _sample(self, fields: Fields) -> Sample:
        prompt = text(fields, "input") + text(fields, "answer_prefix", "")
        answers = texts(fields, "outputs")
        if not all(map(str.strip, answers)):  # a blank one is part of any text
            raise fields.error("outputs", "strings that are not blank", list(answers))
        if len(prompt) <= QUESTION_CHARACTERS:
            raise fields.error("input", f"more than the question's {QUESTION_CHARACTERS} characters", prompt)
        return Sample(*split(prompt), answers, self.metric, self.n_new)


def split(prompt: str) -> tuple[str, str]:
    """Cuts a prompt of more than ``QUESTION_CHARACTERS`` into what is read and what is decoded.

    The second part begins at the first white space of the last ``QUESTION_CHARACTERS`` characters, so that no word is
    cut, or with these characters where they have no white space.
    """
    begin = len(prompt) - QUESTION_CHARACTERS
    skipped = next((i for i, character in enumerate(prompt[begin:]) if character.isspace()), 0)
    return prompt[: begin + skipped], prompt[begin + skipped :]


KINDS = (
    Kind("ruler_niah", 128), Kind("ruler_vt", 30), Kind("ruler_cwe", 120), Kind("ruler_fwe", 50),
    Kind("ruler_qa", 32, "any_of"),
)  # fmt: skip
TASKS = tuple(
    Task(kind.name, "prompts written by RULER", "RULER, arXiv 2404.06654", kind, reads="a .jsonl file of RULER")
    for kind in KINDS
)
