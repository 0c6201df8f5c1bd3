"""Quest's passkey test: a number hidden in a loop of filler, asked for through the sparse decode path.

The protocol is the one behind the accuracy figures of Quest (arXiv 2406.10774, ``evaluation/passkey``), with the prompt
of landmark attention (arXiv 2305.16300): a key between 1 and 50000, stated twice, at depths in equal steps; everything
but the last 400 characters is prefilled densely, those 400 are fed token by token through the policy under test, then
ten tokens are decoded greedily and the first integer among them must be the key. A question that is prefilled
densely would make any policy look better than it is, because the answer is then half found before the policy runs.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from quest_jax import Params, Policy, prefill, replace_policy
from quest_jax.evals.ask import ask
from quest_jax.evals.metrics import first_integer
from quest_jax.evals.samples import Decoder, Encoder

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
KEY_RANGE = (1, 50_000)
SPARSE_CHARACTERS = 400
ANSWER_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One passkey question.

    Attributes:
      key: the number to find.
      depth: where the key stands, as a fraction of the filler before it (0 start, 1 end).
      context: the text that is prefilled densely.
      tail: the last 400 characters, question included, which go through the decode path.
      context_ids, tail_ids: the two, tokenised apart as they are fed.
    """

    key: int
    depth: float
    context: str
    tail: str
    context_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.context_ids) + len(self.tail_ids)


def make_cases(tokenizer: Encoder, n_tokens: int, n_cases: int, seed: int = 0) -> list[Case]:
    """Builds ``n_cases`` questions of about ``n_tokens`` tokens, keys drawn from ``seed``.

    Case i of n hides its key after the fraction (i + 1) / n of the filler. All cases hold the same number of filler
    characters, chosen so that the case in the middle has at most ``n_tokens`` tokens; the others differ by a few.

    Args:
      tokenizer: anything with ``encode(text, add_special_tokens=...) -> list[int]``.
      n_tokens: length of the whole prompt.
      n_cases: how many depths.
      seed: of the keys.

    Raises:
      ValueError: ``n_cases`` below 1, or ``n_tokens`` too few to leave anything before the last 400 characters.
    """
    if n_cases < 1:
        raise ValueError(f"n_cases: expected at least 1, got {n_cases}.")
    n_filler = _filler_characters(tokenizer, n_tokens)
    draw = random.Random(seed)
    return [
        _case(tokenizer, draw.randint(*KEY_RANGE), depth=(i + 1) / n_cases, n_filler=n_filler) for i in range(n_cases)
    ]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one policy answered, in the order of the cases.

    Attributes:
      answers: the decoded text.
      correct: whether the first integer in it is the key.
      share_read: bytes of keys, values and metadata read over those of dense attention, questions and answers.
    """

    answers: tuple[str, ...]
    correct: tuple[bool, ...]
    share_read: float

    @property
    def accuracy(self) -> float:
        """Share of the cases answered right."""
        return sum(self.correct) / len(self.correct)

    def retention(self, dense: "Outcome") -> float | None:
        """Of the cases that ``dense`` answers, the share answered here too; None if it answers none."""
        kept = [mine for mine, theirs in zip(self.correct, dense.correct, strict=True) if theirs]
        return sum(kept) / len(kept) if kept else None


def run(
    params: Params,
    tokenizer: Decoder,
    cases: Sequence[Case],
    policies: Mapping[str, Policy | None],
    *,
    batch: int = 10,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Outcome]:
    """Asks every policy every case. A batch of contexts is prefilled once, densely, and all policies start from it.

    Those that keep more of a prompt than its pages (a memory, norms, blocks) read it for themselves, densely too.

    Args:
      params: of :func:`quest_jax.load`.
      tokenizer: of :func:`quest_jax.load_tokenizer`.
      cases: of :func:`make_cases`.
      policies: by name; None is dense attention.
      batch: cases in memory at a time; their cache exists twice while a policy answers.
      page_size: tokens of a page.
      progress: called with (answers given, answers in all) after each batch of each policy.

    Returns:
      for every policy what it answered.

    Raises:
      ValueError: no cases, no policies, or a batch below 1.
    """
    if not cases or not policies or batch < 1:
        raise ValueError(
            f"passkey: expected cases, policies and a batch of at least 1, got {len(cases)}, {len(policies)}, {batch}."
        )
    room = max(case.n_tokens for case in cases) + ANSWER_TOKENS
    rows = min(batch, len(cases))
    answers: dict[str, list[str]] = {name: [] for name in policies}
    read, dense = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)
    for start in range(0, len(cases), rows):
        part = cases[start : start + rows]
        # Cases repeated to fill the last batch cost less than compiling for another size.
        filled = [*part, *[part[-1]] * (rows - len(part))]
        tails = [case.tail_ids for case in filled]
        contexts = [list(case.context_ids) for case in filled]
        options: dict[str, Any] = dict(capacity=room, page_size=page_size, eos_token_ids=())
        state = prefill(params, contexts, **options)
        for name, policy in policies.items():
            apart = policy is not None and policy.keeps_more
            own = prefill(params, contexts, policy=policy, **options) if apart else replace_policy(state, policy=policy)
            found = ask(params, own, tails, ANSWER_TOKENS)
            answers[name] += [tokenizer.decode(ids.tolist()) for ids in found.tokens[: len(part)]]
            read[name] += int(found.stats.bytes_read()[..., : len(part)].sum())
            dense[name] += int(found.stats.bytes_dense()[..., : len(part)].sum())
            if progress is not None:
                progress(sum(map(len, answers.values())), len(cases) * len(policies))
        del state  # before the next one: a cache of several long prompts is large
    return {name: _judge(cases, answers[name], read[name] / dense[name]) for name in policies}


def table(outcomes: Mapping[str, Outcome], n_tokens: int) -> Table:
    """Lays outcomes out, each with what it kept of the answers of the first, which is dense."""
    dense = next(iter(outcomes.values()))
    shown = Table(title=f"passkey, {len(dense.correct)} prompts of {n_tokens} tokens", title_justify="left")
    shown.add_column("attention")
    for heading in ("right", "accuracy", "of dense's", "bytes of dense"):
        shown.add_column(heading, justify="right")
    for name, outcome in outcomes.items():
        kept = outcome.retention(dense)
        shown.add_row(
            name,
            f"{sum(outcome.correct)} of {len(outcome.correct)}",
            f"{outcome.accuracy:.0%}",
            "-" if kept is None else f"{kept:.0%}",
            f"{outcome.share_read:.0%}",
        )
    return shown


def _judge(cases: Sequence[Case], answers: Sequence[str], share_read: float) -> Outcome:
    right = tuple(first_integer(answer) == case.key for case, answer in zip(cases, answers, strict=True))
    return Outcome(tuple(answers), right, share_read)


def write(key: int, depth: float, n_filler: int) -> tuple[str, str]:
    """The text of a case in two parts, the second of 400 characters; the key after ``depth`` of ``n_filler`` others."""
    filler = f"{FILLER} " * (n_filler // len(FILLER) + 1)
    before = int(n_filler * depth)
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    text = "\n".join((TASK, filler[:before], fact, filler[: n_filler - before], QUESTION))
    return text[:-SPARSE_CHARACTERS], text[-SPARSE_CHARACTERS:]


def _case(tokenizer: Encoder, key: int, depth: float, n_filler: int) -> Case:
    context, tail = write(key, depth, n_filler)
    tail_ids = tokenizer.encode(tail, add_special_tokens=False)
    return Case(key, depth, context, tail, tuple(tokenizer.encode(context)), tuple(tail_ids))


def _filler_characters(tokenizer: Encoder, n_tokens: int) -> int:
    """The most filler characters with which a case has at most ``n_tokens`` tokens."""

    def length(n_filler: int) -> int:
        return _case(tokenizer, KEY_RANGE[1], 0.5, n_filler).n_tokens

    low = SPARSE_CHARACTERS
    if length(low) > n_tokens:
        raise ValueError(
            f"n_tokens: expected at least {length(low)} so that something precedes the last {SPARSE_CHARACTERS} "
            f"characters, got {n_tokens}; ask for longer prompts."
        )
    high = 2 * low
    while length(high) <= n_tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= n_tokens else (low, middle)
    return low
