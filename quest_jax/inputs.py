"""What callers hand in, checked before anything is compiled or allocated."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from quest_jax.cache import Cache
from quest_jax.models.config import LlamaConfig
from quest_jax.params import Params
from quest_jax.policies.base import Policy, checked
from quest_jax.policies.quest import Quest
from quest_jax.policies.quoka import QuoKA

_WRAP = "wrap a single prompt in a list: [tokens]"


def inside_jit() -> bool:
    """Says whether a ``jit`` around this call is tracing: then nothing that is computed has a value yet."""
    return is_traced(jax.device_put(np.zeros(())))  # compiles nothing where it is not


def is_traced(*trees: Any) -> bool:
    """Says whether any leaf has no value yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def as_batch(tokens: Any, lengths: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as int32 ``[B, T]``, padded with 0, and their lengths ``[B]``.

    Args:
      tokens: ``[B, T]`` integer array, or a sequence of B non-empty sequences of ids.
      lengths: real tokens of each row of an array (the rest is padding), or None.
      vocab_size: ids must be below it.

    Raises:
      TypeError: not integers, or text.
      ValueError: wrong rank, nothing in it, lengths out of range, ids out of range.
    """
    if isinstance(tokens, str | bytes) or (isinstance(tokens, Sequence) and any(isinstance(t, str) for t in tokens)):
        raise TypeError("tokens: expected integer ids [B, T], got text; encode it first, see quest_jax.load_tokenizer.")
    if isinstance(tokens, Sequence):
        if tokens and all(isinstance(token, int | np.integer) for token in tokens):
            raise ValueError(f"tokens: expected prompts [B, T], got one flat sequence of {len(tokens)}; {_WRAP}.")
        if lengths is not None:
            raise ValueError("lengths: a list of prompts has its own lengths; pass lengths only with a padded array.")
        rows = [_as_ids(row, f"tokens[{i}]", 1) for i, row in enumerate(tokens)]
        if not rows:
            raise ValueError("tokens: expected at least one prompt, got an empty list.")
        lengths = np.array([row.size for row in rows], np.int32)
        batch = np.zeros((len(rows), lengths.max()), np.int64)
        for i, row in enumerate(rows):
            batch[i, : row.size] = row
    else:
        batch = _as_ids(tokens, "tokens", 2)
        lengths = _as_lengths(lengths, *batch.shape)
    empty = np.flatnonzero(lengths == 0)
    if batch.size == 0 or empty.size:
        where = f"row {empty[0]}" if empty.size else f"shape {batch.shape}"
        raise ValueError(f"tokens: expected at least one token in every prompt, got none in {where}.")
    real = np.arange(batch.shape[1]) < lengths[:, None]
    wrong = np.argwhere(real & ((batch < 0) | (batch >= vocab_size)))
    if wrong.size:
        row, position = wrong[0]
        raise ValueError(
            f"tokens: expected ids in [0, {vocab_size}), got {batch[row, position]} in row {row} at position "
            f"{position}; is this the tokenizer of this model?"
        )
    return np.where(real, batch, 0).astype(np.int32), lengths.astype(np.int32)


def _as_ids(ids: Any, name: str, rank: int) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ValueError(f"{name}: expected integer ids, got nested sequences of different lengths.") from error
    if array.ndim != rank:
        wanted = "[B, T]" if rank == 2 else "[T]"
        raise ValueError(
            f"{name}: expected ids of shape {wanted}, got {array.shape}{f'; {_WRAP}' if rank == 2 else ''}."
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: expected integer ids, got {array.dtype}; convert them with .astype('int32').")
    return array.astype(np.int64)


def _as_lengths(lengths: Any, rows: int, width: int) -> np.ndarray:
    if lengths is None:
        return np.full(rows, width, np.int32)
    array = np.asarray(lengths)
    if array.shape != (rows,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"lengths: expected {rows} integers, one a row, got shape {array.shape} of {array.dtype}.")
    if array.size and (array.min() < 0 or array.max() > width):
        raise ValueError(f"lengths: expected values in [1, {width}], the width of tokens, got {array.tolist()}.")
    return array


def as_params(params: Any) -> Params:
    """Returns ``params``, or raises TypeError."""
    if not isinstance(params, Params):
        raise TypeError(f"params: expected what quest_jax.load returns, got {type(params).__name__}.")
    return params


def as_state(state: Any) -> None:
    """Raises TypeError where ``state`` is not what prefill returns; that it is traced is fine."""
    if not all(hasattr(state, name) for name in ("attention", "logits", "done", "sampler")):
        raise TypeError(f"state: expected what quest_jax.prefill returns, got {type(state).__name__}.")


def check_model(config: LlamaConfig, cache: Cache) -> None:
    """Raises ValueError where a state's cache is not of this model."""
    wanted, got = (config.n_layers, config.n_kv_heads, config.head_dim), cache.model_shape
    if wanted != got:
        raise ValueError(f"expected a state of a model with (layers, KV heads, head dim) {wanted}, got one of {got}.")


def as_policy(budget: Any, policy: Any, page_size: int) -> Policy:
    """Returns the policy for decoding that ``budget`` (by Quest) or ``policy`` asks for; neither is dense.

    Raises:
      TypeError: of the wrong type.
      ValueError: both given, or a budget below a page.
    """
    as_size("page_size", page_size)
    if policy is not None and budget is not None:
        raise ValueError(f"expected budget or policy, got both (budget={budget!r}); put the budget into the policy.")
    # A budget leaves the means to the library, a policy is what was asked for by name.
    policy = policy if budget is None else Quest(budget=as_size("budget", budget), dense_below="auto")
    return checked(policy, page_size)


def as_prefill_policy(budget: Any, policy: Any, page_size: int) -> Policy:
    """Returns the policy for prefill that ``budget`` (by QuoKA) or ``policy`` asks for; raises as :func:`as_policy`."""
    if policy is not None and budget is not None:
        raise ValueError(
            f"expected prefill_budget or prefill_policy, got both (prefill_budget={budget!r}); put the budget into the "
            "policy."
        )
    policy = policy if budget is None else QuoKA(as_size("prefill_budget", budget), group="each")
    return checked(policy, page_size, prefills=True)


def as_chunk(chunk: Any, policy: Policy) -> int:
    """Returns the tokens of a prefill step: what was asked for, or the policy's own, or 256.

    Raises:
      TypeError: no integer.
      ValueError: below 1, or another than the policy's.
    """
    own = getattr(policy, "chunk", None)
    if chunk is None:
        return own or 256
    if own not in (None, as_size("chunk", chunk)):
        raise ValueError(
            f"chunk: expected {own}, the chunk of the prefill policy, or None, got {chunk}; write "
            f"{type(policy).__name__}(..., chunk={chunk})."
        )
    return int(chunk)


def short_chunk(chunk: int, longest: int) -> int:
    """Cuts a chunk for prompts that all are shorter; to a power of two, so that few programs are compiled."""
    return min(chunk, max(16, 1 << (longest - 1).bit_length()))


def as_size(name: str, value: Any) -> int:
    """Returns ``value`` as a positive Python integer.

    Raises:
      TypeError: no integer.
      ValueError: below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}.")
    return int(value)


def as_eos(eos_token_ids: Any, default: tuple[int, ...], vocab_size: int) -> Any:
    """Returns the ids that end a row, int32, never empty; -1 stands for none.

    Args:
      eos_token_ids: an id, a sequence of ids, ``()`` for never, or None for the model's own.
      default: the model's own.
      vocab_size: ids must be below it.
    """
    if is_traced(eos_token_ids):
        return jnp.atleast_1d(jnp.asarray(eos_token_ids, jnp.int32))
    ids = default if eos_token_ids is None else eos_token_ids
    array = np.atleast_1d(np.asarray(ids if np.ndim(ids) == 0 or len(ids) else [-1]))
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"eos_token_ids: expected an id or a sequence of ids, got {eos_token_ids!r}.")
    if array.max() >= vocab_size or (array.min() < 0 and array.tolist() != [-1]):
        raise ValueError(f"eos_token_ids: expected ids in [0, {vocab_size}), got {array.tolist()}.")
    return array.astype(np.int32)


def bucket(tokens: int, multiple: int) -> int:
    """Rounds a length up to one of four sizes an octave, all multiples of ``multiple``: few sizes, little waste.

    Example:
      >>> [bucket(n, 128) for n in (1, 500, 1000, 1025, 5000)]
      [128, 512, 1024, 1280, 5120]
    """
    units = -(-tokens // multiple)
    step = 1 << max(0, (units - 1).bit_length() - 3)
    return -(-units // step) * step * multiple


def as_seeds(seed: Any, batch: int) -> Any:
    """Returns one seed, or ``batch`` of them, as uint32.

    Raises:
      TypeError: no integers.
      ValueError: another number of them, or outside ``[0, 2**32)``, where two seeds would be the same.
    """
    if is_traced(seed):
        return jnp.asarray(seed)
    seeds = np.asarray(seed)
    if seeds.dtype.kind not in "iu":
        raise TypeError(f"seed: expected an integer, or {batch} of them, got {seed!r}.")
    if seeds.shape not in ((), (batch,)):
        raise ValueError(f"seed: expected one integer, or {batch}, one a row, got {seeds.size}.")
    if seeds.min() < 0 or seeds.max() >= 2**32:
        raise ValueError(f"seed: expected integers in [0, 2**32), got {seed!r}.")
    return seeds.astype(np.uint32)
