"""Generation: read the prompts, then decode in one compiled loop."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from quest_jax.decode import DecodeState, decode_step, prefill, read_prompts
from quest_jax.inputs import as_batch, as_params, as_size, inside_jit, is_traced
from quest_jax.params import Params
from quest_jax.reads import PageReads, room_for
from quest_jax.sampling import NO_TOKEN
from quest_jax.stats import DecodeStats, make_stats
from quest_jax.tokenizer import Detokenizer, StopStrings, Tokenizer

# Steps of one compiled loop. The host looks at the tokens in between, so that neither max_new_tokens nor streaming
# nor stop strings need a program of their own.
_BLOCK = 32


class Generation(struct.PyTreeNode):
    """What :func:`generate` returns.

    Attributes:
      tokens: int32 ``[B, max_new_tokens]``, the new tokens only, the eos included; -1 past ``lengths``.
      lengths: int32 ``[B]``, new tokens of each row.
      stats: pages and bytes that every decode step and layer read; ``stats.prefill``: every chunk of the prompt.
    """

    tokens: Int[Array, "B n"]
    lengths: Int[Array, "B"]
    stats: DecodeStats


class Chunk(NamedTuple):
    """A piece of a streamed generation: the token, and the text that it completed (may be empty)."""

    token: int
    text: str


def generate(
    params: Params,
    tokens: Any,
    *,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Generation:
    """Generates text for a batch of prompts, read by chunks, then decoding that reads ``budget`` tokens a step.

    Args:
      params: of :func:`quest_jax.load`.
      tokens: prompts, ``[B, T]`` ids or a list of lists of different lengths.
      max_new_tokens: most tokens per row.
      stop: strings at which a row ends; the token that completes one is the row's last. Needs ``tokenizer``.
      tokenizer: of :func:`quest_jax.load_tokenizer`.
      **options: ``budget``, ``policy``, ``prefill_budget``, ``prefill_policy``, ``lengths``, ``temperature``,
        ``top_k``, ``top_p``, ``seed``, ``eos_token_ids``, ``page_size``, ``chunk``, ``capacity``, ``metadata``,
        ``implementation``, ``progress`` as in :func:`prefill`.

    Returns:
      the new tokens, their number, and what was read.

    Raises:
      TypeError, ValueError: input out of range, before anything is compiled.
      MemoryError: it does not fit, as :func:`quest_jax.prefill` says.
      NotImplementedError: an ``implementation`` asked for by name that does not serve, with the reason.
      FloatingPointError: the model's logits are NaN (inside ``jit`` the row just ends).

    Works inside ``jax.jit`` too (without ``stop``), as one program. Recompiles as :func:`prefill` does, and inside
    ``jit`` for another ``max_new_tokens``.

    Example:
      >>> import quest_jax
      >>> params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 2, 4, 2, 8, 512), seed=0)
      >>> out = quest_jax.generate(params, [[1, 2, 3], [4, 5]], budget=64, max_new_tokens=5)
      >>> out.tokens.shape, out.lengths.tolist()
      ((2, 5), [5, 5])
    """
    max_new_tokens, stop = _check(params, max_new_tokens, stop, tokenizer, options)
    if inside_jit() or is_traced(params, tokens, options):
        if stop:
            raise ValueError("stop: strings are matched on the host, got them inside jit; call generate outside it.")
        state, read = _start(params, tokens, max_new_tokens, options)
        state, new, reads = _decode_block(params, state, max_new_tokens, max_new_tokens)
        return Generation(new, (new != NO_TOKEN).sum(axis=1), make_stats(state, reads, read))
    state, prompt_reads = _start(params, tokens, max_new_tokens, options)
    matchers = [_Matcher(tokenizer, stop) for _ in range(len(state.done))] if stop and tokenizer else None
    blocks, reads, made = [], [], 0
    while made < max_new_tokens and not np.asarray(state.done).all():
        limit = min(_BLOCK, max_new_tokens - made)
        state, new, read = _decode_block_jit(params, state, np.int32(limit), _BLOCK)
        new = np.array(new)[:, :limit]
        if matchers:
            state = state.replace(done=state.done | jnp.asarray(_cut(matchers, new)))
        _check_finite(state)
        blocks.append(new)
        reads.append(read)
        made += limit
    new = np.concatenate(blocks, axis=1)
    new = np.pad(new, ((0, 0), (0, max_new_tokens - new.shape[1])), constant_values=NO_TOKEN)
    steps = _on_host(reads, lambda parts: np.concatenate(parts)[:made])
    lengths = jax.device_put((new != NO_TOKEN).sum(axis=1).astype(np.int32))
    return Generation(jax.device_put(new), lengths, make_stats(state, steps, prompt_reads))


def stream(
    params: Params,
    tokens: Any,
    *,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Iterator[Chunk]:
    """Generates for one prompt, yielding each token as it is made.

    Args:
      params, tokens, max_new_tokens, stop, tokenizer, options: as for :func:`generate`; one prompt. With a tokenizer
        the chunks carry text, cut only between whole characters, without eos, without the stop string and what
        follows it; without one their text is empty.

    Yields:
      the chunks; their texts joined are the answer. The last may have a token of -1: text that was held back.

    Raises:
      as :func:`generate`, when called, not when first iterated.
    """
    max_new_tokens, stop = _check(params, max_new_tokens, stop, tokenizer, options)
    if inside_jit() or is_traced(params, tokens, options):
        raise ValueError("stream: works on the host, got traced arguments; use generate inside jit.")
    batch, _ = as_batch(tokens, options.get("lengths"), params.config.vocab_size)
    if len(batch) != 1:
        raise ValueError(f"stream: expected one prompt, got {len(batch)}; use generate for a batch.")
    state, _ = _start(params, tokens, max_new_tokens, options)
    return _stream(params, state, max_new_tokens, tokenizer, stop)


def _stream(params, state, max_new_tokens, tokenizer, stop):
    matcher = _Matcher(tokenizer, stop) if tokenizer else None
    eos = set(state.eos.tolist())
    for _ in range(max_new_tokens):
        state, new, _ = _decode_block_jit(params, state, np.int32(1), _BLOCK)
        _check_finite(state)
        token = int(np.asarray(new)[0, 0])
        text = matcher.push(token) if matcher and token not in eos else ""
        yield Chunk(token, text)
        if np.asarray(state.done)[0] or (matcher and matcher.stopped):
            break
    if matcher and (rest := matcher.flush()):
        yield Chunk(NO_TOKEN, rest)


def _start(params, tokens, max_new_tokens, options) -> tuple[DecodeState, PageReads]:
    lengths = options.get("lengths")
    if is_traced(tokens, lengths):  # then the width of the array is all that is known
        longest = jnp.shape(tokens)[1] if jnp.ndim(tokens) == 2 else 0
    else:
        tokens, lengths = as_batch(tokens, lengths, params.config.vocab_size)
        longest = int(lengths.max())
    needed, capacity = longest + max_new_tokens, options.get("capacity")
    if capacity is not None and as_size("capacity", capacity) < needed:
        raise ValueError(
            f"capacity: expected at least {needed} (prompt {longest} + max_new_tokens {max_new_tokens}), "
            f"got {capacity}."
        )
    state, reads = read_prompts(params, tokens, **options | {"lengths": lengths, "capacity": capacity or needed})
    return state, reads if isinstance(reads, PageReads) else _on_host(reads, np.stack)


def _on_host(reads: list[PageReads], join: Callable[[Sequence[np.ndarray]], np.ndarray]) -> PageReads:
    """Joins counts without a program for every number of them."""
    return jax.tree.map(lambda *parts: jax.device_put(join([np.asarray(part) for part in parts])), *reads)


def _decode_block(params: Params, state: DecodeState, limit: Any, block: int):
    """Up to ``limit`` decode steps, fewer when all rows have ended.

    Returns:
      the state, int32 tokens ``[B, block]``, and what each step read, ``[block, layers, B]``.
    """

    def more(carry):
        i, state, _, _ = carry
        return (i < limit) & ~state.done.all()

    def step(carry):
        i, state, tokens, reads = carry
        state, token = decode_step(params, state)
        reads = jax.tree.map(lambda all_steps, now: all_steps.at[i].set(now), reads, state.attention.reads)
        return i + 1, state, tokens.at[:, i].set(token), reads

    tokens = jnp.full((len(state.done), block), NO_TOKEN, jnp.int32)
    carry = (jnp.int32(0), state, tokens, room_for(block, state.attention.reads))
    _, state, tokens, reads = lax.while_loop(more, step, carry)
    return state, tokens, reads


_decode_block_jit = jax.jit(_decode_block, static_argnums=3, donate_argnums=1)


def _check_finite(state: DecodeState) -> None:
    rows = np.flatnonzero(np.isnan(state.logits).any(axis=1))
    if rows.size:
        raise FloatingPointError(
            f"expected numbers for logits, got NaN in row {rows[0]}; are the weights finite? float16 activations "
            "overflow in some models: load bfloat16 or float32."
        )


class _Matcher:
    """Text of one row, and whether it met a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(stop)
        self.stopped = False

    def push(self, token: int) -> str:
        text, self.stopped = self._stop.push(self._detokenizer.push(token))
        return text

    def flush(self) -> str:
        if self.stopped:
            return ""
        text, _ = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush()


def _cut(matchers: list[_Matcher], new: np.ndarray) -> np.ndarray:
    """Ends rows at their stop string, in place; returns bool ``[B]``, which rows are stopped."""
    for matcher, row in zip(matchers, new, strict=True):
        for i, token in enumerate(row):
            if matcher.stopped or token == NO_TOKEN:
                row[i:] = NO_TOKEN
                break
            matcher.push(int(token))
    return np.array([matcher.stopped for matcher in matchers])


def _check(params, max_new_tokens, stop, tokenizer, options) -> tuple[int, tuple[str, ...]]:
    """Returns ``max_new_tokens`` and the stop strings; raises for what no later step would name well."""
    as_params(params)
    unknown = options.keys() - inspect.signature(prefill).parameters.keys()
    if unknown:
        raise TypeError(f"generate: expected the options of quest_jax.prefill, got {sorted(unknown)[0]!r}.")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer: expected quest_jax.load_tokenizer(...), got {type(tokenizer).__name__}.")
    return as_size("max_new_tokens", max_new_tokens), _as_stop(stop, tokenizer)


def _as_stop(stop, tokenizer) -> tuple[str, ...]:
    if not isinstance(stop, str | Iterable | None):
        raise TypeError(f"stop: expected strings, got {stop!r}.")
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(text, str) or not text for text in stop):
        raise ValueError(f"stop: expected non-empty strings, got {stop!r}.")
    if stop and tokenizer is None:
        raise ValueError("stop: strings need the model's tokenizer; pass tokenizer=quest_jax.load_tokenizer(...).")
    return stop
