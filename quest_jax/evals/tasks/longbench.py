"""LongBench's question answering and summaries, from its files, split as Quest splits them.

LongBench (arXiv 2308.14508) asks about one long text a line. Its prompt has the order kept here, instruction, text,
instruction again, question; the instructions are in our words. A prompt that is too long loses its middle, because
both ends have instructions. Quest (arXiv 2406.10774, ``evaluation/LongBench``) reads the text densely and decodes the
question: what follows the last mark of the task, at most 100 characters.

The files are ``data/*.jsonl`` of https://huggingface.co/datasets/THUDM/LongBench, with ``context``, ``input``,
``answers`` and ``length`` on each line.
"""

import dataclasses
import os
import pathlib
import random

from quest_jax.evals.samples import Decoder, Sample
from quest_jax.evals.tasks.jsonl import read_lines, text, texts
from quest_jax.evals.tasks.sizes import check_numbers, n_tokens_of
from quest_jax.evals.tasks.task import Task, draw_of
from quest_jax.weights.fields import Fields

QUESTION_CHARACTERS = 100


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a file.

    Attributes:
      context: the long text.
      question: what is asked about it; empty where a summary is wanted.
      answers: what is right, each on its own.
    """

    context: str
    question: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Data:
    """One of the files.

    Attributes:
      name: of the file, without ``.jsonl``.
      before: what stands in front of the text.
      after: what follows it, ``{}`` being the question.
      mark: where the question begins that Quest decodes.
      n_new: tokens of the answer.
      metric: that judges it.
    """

    name: str
    before: str
    after: str
    mark: str
    n_new: int
    metric: str = "f1"

    def __call__(
        self, tokenizer: Decoder, n_tokens: int, n_cases: int, seed: int, path: str | os.PathLike[str]
    ) -> list[Sample]:
        """Samples of lines that the seed draws, in the order of the file; see :meth:`Task.make`."""
        check_numbers(n_tokens, n_cases)
        if not pathlib.Path(path).is_dir():
            raise ValueError(f"{path}: expected a directory with {self.name}.jsonl in it, got none.")
        records = read_lines(pathlib.Path(path) / f"{self.name}.jsonl", _record)
        chosen = draw_records(records, n_cases, draw_of(self.name, seed, 0))
        return [self.sample(tokenizer, record, n_tokens) for record in chosen]

    def sample(self, tokenizer: Decoder, record: Record, n_tokens: int) -> Sample:
        """One sample of at most ``n_tokens``, its middle left out where it would have more.

        Raises:
          ValueError: ``n_tokens`` leaves nothing in front of the question.
        """
        # Not by `format` of the whole: a question may have braces of its own.
        prompt = f"{self.before}{record.context}{self.after.replace('{}', record.question)}"
        sample = self._split(prompt, record.answers)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        kept, excess = min(n_tokens - self.n_new, len(ids)), n_tokens_of(tokenizer, [sample]) - n_tokens
        while excess > 0:
            half = max(kept // 2, 1)
            # A character may be cut in the middle of its bytes.
            first, last = tokenizer.decode(ids[:half]).rstrip("\ufffd"), tokenizer.decode(ids[-half:]).lstrip("\ufffd")
            sample = self._split(first + last, record.answers)
            if kept < 2 or not sample.context:
                raise ValueError(
                    f"n_tokens: got {n_tokens}, which leaves nothing beside the question and {self.n_new} tokens of an "
                    "answer; ask for longer prompts."
                )
            # Where the ends meet, and where context and question part, tokens are others than before.
            excess = n_tokens_of(tokenizer, [sample]) - n_tokens
            kept -= max(excess, 0)
        return sample

    def _split(self, prompt: str, answers: tuple[str, ...]) -> Sample:
        begin = max(prompt.rfind(self.mark), len(prompt) - QUESTION_CHARACTERS, 0)
        return Sample(prompt[:begin], prompt[begin:], answers, self.metric, self.n_new)


def draw_records[T](records: list[T], n_cases: int, seed: str) -> list[T]:
    """``n_cases`` of the records, or all if there are no more, in their order."""
    return [records[i] for i in sorted(random.Random(seed).sample(range(len(records)), min(n_cases, len(records))))]


def _record(fields: Fields) -> Record:
    fields.integer("length", 0)  # in words; a file in which it is no number is another file
    return Record(text(fields, "context"), text(fields, "input"), texts(fields, "answers"))


_SHORT = "as shortly as you can, in one phrase if possible"
_UNANSWERABLE = (
    'If the article does not say it, write "unanswerable". If it is a yes/no question, answer "yes", "no" or '
    '"unanswerable". Do not explain your answer.'
)
_ONLY = "Give only the answer and write nothing else."
DATA = (
    Data(
        "qasper",
        f"Here are a scientific article and a question. Answer the question {_SHORT}. {_UNANSWERABLE}\n\nArticle: ",
        f"\n\nAnswer the question from the article above, {_SHORT}. {_UNANSWERABLE}\n\nQuestion: {{}}\n\nAnswer:",
        "Question:", 128,
    ),
    Data(
        "narrativeqa",
        "Here are a story, a novel or the script of a film, and a question. "
        f"Answer the question {_SHORT}. Do not provide reasons.\n\nStory: ",
        f"\n\nNow answer the question from the story, {_SHORT}. Do not provide reasons.\n\nQuestion: {{}}\n\nAnswer:",
        "Do not provide", 128,
    ),
    Data(
        "hotpotqa",
        f"Answer the question from the passages. {_ONLY}\n\nThese are the passages.\n",
        f"\n\nAnswer the question from the passages. {_ONLY}\n\nQuestion: {{}}\nAnswer:",
        "Question:", 32,
    ),
    Data(
        "multifieldqa_en",
        "Read this text, then answer in a few words.\n\n",
        f"\n\nNow, answer this question from the text above. {_ONLY}\n\nQuestion: {{}}\nAnswer:",
        "Now,", 64,
    ),
    Data(
        "gov_report",
        "Here is a report of a government agency. Summarize it on one page.\n\nReport:\n",
        "\n\nNow, summarize the report on one page.\n\nSummary:",
        "Now,", 512, "rouge_l",
    ),
    Data(
        "triviaqa",
        f"Answer the question from the passage. {_ONLY} Some examples come first.\n\n",
        "\n\n{}",  # the passage, its question and "Answer:" are in the file's `input`
        "Answer the question", 32, "f1_first_line",
    ),
)  # fmt: skip
TASKS = tuple(
    Task(f"longbench_{data.name}", f"LongBench's {data.name}", "LongBench, arXiv 2308.14508; split as Quest", data,
         reads=f"a directory with {data.name}.jsonl")
    for data in DATA
)  # fmt: skip
