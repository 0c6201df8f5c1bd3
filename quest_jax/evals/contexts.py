"""Contexts that many questions and methods share: each is read once, for all that can start from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax import DecodeState, Dense, Params, Policy
from quest_jax.cache import rebuild_norms
from quest_jax.decode import prefill_chunk, read_prompts
from quest_jax.evals.samples import Encoder, Sample
from quest_jax.inputs import as_batch
from quest_jax.stats import ReadStats, prompt_stats

# Questions that are read densely are padded to a multiple of this, so that a few lengths share a program.
_WIDTH = 32


class Asked(NamedTuple):
    """A question as the model takes it: the sample, and the tokens of its question."""

    sample: Sample
    ids: tuple[int, ...]


class Context(NamedTuple):
    """What is read densely, and what is then decoded by every method.

    Attributes:
      ids: tokens of the context.
      asked: its questions.
      following: tokens of the text that goes on after it; may be empty.
    """

    ids: tuple[int, ...]
    asked: tuple[Asked, ...]
    following: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Most tokens that are fed or made after it."""
        return max([len(self.following), *(len(one.ids) + one.sample.n_new for one in self.asked)])


def gather(tokenizer: Encoder, samples: Sequence[Sample]) -> list[Context]:
    """Joins samples with the same context, in the order in which the contexts come first.

    Raises:
      ValueError: a context or a question without tokens.
    """
    by_text: dict[str, list[Asked]] = {}
    for sample in samples:
        ids = tuple(tokenizer.encode(sample.question, add_special_tokens=False))
        by_text.setdefault(sample.context, []).append(Asked(sample, ids))
    found = [Context(tuple(tokenizer.encode(text)), tuple(asked)) for text, asked in by_text.items()]
    if any(not one.ids or not all(asked.ids for asked in one.asked) for one in found):
        raise ValueError("samples: expected contexts and questions of at least one token, got an empty one.")
    return found


def pieces(tokenizer: Encoder, text: str, tokens: int, count: int = 1, start: int = 1) -> list[Context]:
    """Cuts the beginning of a text into contexts of ``start`` tokens with ``tokens - start`` to follow.

    Raises:
      ValueError: numbers out of range, or a text that is too short for them.
    """
    ids = tokenizer.encode(text)
    if count < 1 or not 1 <= start <= tokens - 2:
        raise ValueError(
            f"text: expected at least 1 piece (--texts), and a start of at least 1 (--start) with 2 tokens after it "
            f"in pieces of {tokens} (--tokens), got {count} and {start}."
        )
    if count * tokens > len(ids):
        raise ValueError(
            f"text: expected {count * tokens} tokens, {tokens} in each of {count} pieces, got {len(ids)}; take a "
            "longer text or shorter pieces."
        )
    parts = [ids[i * tokens : (i + 1) * tokens] for i in range(count)]
    return [Context(tuple(part[:start]), (), tuple(part[start:])) for part in parts]


def groups(policies: Mapping[str, Policy]) -> list[list[str]]:
    """Names of policies that can start from one prefilled state: all that keep nothing beside the pages, first.

    Those that do start together where they differ in their budget only: what a prompt leaves in a memory does not
    depend on it (:meth:`quest_jax.Policy.new_memory`).
    """
    found: dict[Any, list[str]] = {None: []}
    for name, policy in policies.items():
        key = None
        if policy.keeps_more:
            fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
            key = type(policy), tuple(value for field, value in fields.items() if field != "budget")
        found.setdefault(key, []).append(name)
    return [names for names in found.values() if names]


def prefilled(
    params: Params,
    contexts: Sequence[Context],
    policy: Policy,
    *,
    capacity: int,
    page_size: int,
    prefills: bool = False,
) -> tuple[DecodeState, ReadStats]:
    """Reads contexts, one a row: densely, with what ``policy`` keeps beside the pages; or by ``policy``.

    Returns:
      the state, and what every chunk read.
    """
    state, reads = read_prompts(
        params, [list(one.ids) for one in contexts], capacity=capacity, page_size=page_size, eos_token_ids=(),
        policy=policy if policy.keeps_more and not prefills else Dense(),
        prefill_policy=policy if prefills else Dense(),
    )  # fmt: skip
    assert isinstance(reads, list)  # outside jit
    return state, prompt_stats(state, jax.tree.map(lambda *chunks: jax.device_put(np.stack(chunks)), *reads))


def read_on(params: Params, state: DecodeState, texts: Sequence[Sequence[int]]) -> DecodeState:
    """Reads a text a row as its prompt was read, after what the row holds already; the state given stays usable."""
    tokens, lengths = as_batch([list(text) for text in texts], None, params.config.vocab_size)
    tokens = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, -tokens.shape[1] % _WIDTH)))
    return _read(params, state, tokens, jnp.asarray(lengths))


@jax.jit
def _read(params, state, tokens, n_new):
    cache = state.attention.cache
    if state.attention.prefill_policy.needs_norms and cache.norms is None:  # dropped at the end of the prompt
        with_norms = cache.replace(norms=rebuild_norms(cache))
        state = state.replace(attention=state.attention.replace(cache=with_norms))
    state = prefill_chunk(params, state, tokens, state.lengths, state.lengths + n_new)
    kept = state.attention.cache.replace(norms=None if cache.norms is None else state.attention.cache.norms)
    return state.replace(attention=state.attention.replace(cache=kept))
