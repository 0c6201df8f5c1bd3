"""Freeing the memory of tokens that a policy has dropped for good."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from quest_jax.cache import Cache
from quest_jax.decode import DecodeState
from quest_jax.inputs import as_params, as_size, as_state, check_model, is_traced
from quest_jax.pallas_kernels.metadata import empty_metadata, metadata_kind
from quest_jax.pallas_kernels.pages import as_tokens, pool_shape
from quest_jax.params import Params
from quest_jax.policies.base import LayerView
from quest_jax.policies.lists import ListPolicy

_INT32 = 2**31 - 1


def compact(params: Params, state: DecodeState, *, capacity: int | None = None) -> DecodeState:
    """Copies what is alive into pools of ``budget + 1`` tokens a row; decoding goes on with the same tokens.

    For policies that drop tokens for good: ``h2o``, ``tova``, ``keydiff``, ``streaming_llm``, ``sink_window`` of
    tokens, and ``snapkv``. From here on a new token takes the slot of one that has died, and a row takes
    ``budget + 1`` tokens, rounded up to pages, of a layer that selects. ``snapkv`` drops only of the prompt: its pools
    have room for what it kept of that and for all that is still to come, up to ``capacity``, of the row that needs
    most. Layers that always read everything, those below ``dense_layers`` and those with a window, keep their whole
    cache: of n layers with d such ones and a capacity of C tokens, ``d / n + (1 - d / n) (budget + 1) / C`` of the
    bytes remain. The min and max of pages are kept no more in the others. The prompt is read before that, and needs the
    whole cache.

    Where attention chooses what dies, nothing has before the first decode step: take it, then call this, outside
    ``jit``. A row that ended without one is cut here, by what its tokens rank now.

    Args:
      params: of the model that made the state.
      state: after at least one step of :func:`~quest_jax.decode.decode_step` or
        :func:`~quest_jax.decode.feed_tokens`. It stays usable, and its memory in use as long as it is referred to; it
        shares with the result what is not copied, so donate only one of them.
      capacity: tokens that a row may come to, prompt included: RoPE goes on counting. None: what it was. Where no layer
        keeps everything it may be more, since memory no longer grows with it.

    Returns:
      a state for ``decode_step`` and ``feed_tokens``, of smaller ``attention.cache.nbytes``. Another policy or budget
      can no longer replace its own.

    Raises:
      TypeError, ValueError: no state, of another model, a policy that drops nothing, more alive than the budget,
        nothing to free, or a capacity that some layer has no room for.
      NotImplementedError: a page table, a memory that cannot be moved, RoPE that ``streaming_llm`` cannot turn at such
        a capacity, or inside ``jit``.

    Example:
      >>> import quest_jax
      >>> params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 2, 4, 2, 8, 512), seed=0)
      >>> from quest_jax.policies.tova import TOVA
      >>> policy = TOVA(15, dense_layers=0)
      >>> state = quest_jax.prefill(params, [[1, 2, 3] * 20], policy=policy, capacity=128)
      >>> state, token = quest_jax.decode_step(params, state)
      >>> small = quest_jax.compact(params, state, capacity=100_000)
      >>> small.attention.cache.nbytes / state.attention.cache.nbytes < 1 / 6
      True
    """
    config = as_params(params).config
    as_state(state)
    if is_traced(state):
        raise NotImplementedError("compact: looks at which tokens are alive, and cannot inside jit; call it outside.")
    attention, cache = state.attention, state.attention.cache
    check_model(config, cache)
    policy = attention.policy.fitted(config)
    if not isinstance(policy, ListPolicy) or not policy.drops:
        raise ValueError(f"compact: expected a policy that drops tokens for good, such as h2o, got {policy!r}.")
    if cache.limit is not None:
        raise ValueError("compact: this state is compact already.")
    if cache.page_table is not None:
        raise NotImplementedError("compact: expected rows that own their pages, got a page table; decode without.")
    layers = range(config.n_layers)
    kept = [policy.is_dense(i, attention.view(i)) or config.window(i) is not None for i in layers]
    selecting = [attention.view(i) for i in layers if not kept[i]]
    limit = cache.capacity if capacity is None else as_size("capacity", capacity)
    least, most = int(cache.lengths.max()), cache.capacity if any(kept) else None
    if limit > _INT32:
        raise ValueError(f"capacity: expected at most {_INT32} tokens, positions being int32, got {limit}.")
    if limit < least or (most is not None and limit > most):
        upper = (
            "" if most is None else f" and at most {most}, which {sum(kept)} layers that keep everything have room for"
        )
        raise ValueError(f"capacity: expected at least the {least} tokens there are{upper}, got {limit}.")
    policy.check_room(limit)
    unsettled = sum((~policy.settled(view) for view in selecting), start=jnp.zeros_like(state.done)) & ~state.done
    if unsettled.any():
        row = int(unsettled.argmax())
        alive = max(int(policy.real(view).sum(axis=-1).max(axis=-1)[row]) for view in selecting)
        raise ValueError(
            f"compact: expected at most {policy.budget} tokens alive in a row, the budget, got {alive} in row {row}: "
            "of a prompt none has died before the first decode step; take it, then compact."
        )
    own = {name for view in selecting for name in _entries(view.memory)} - {"alive", "watched", *policy.forgets}
    if own:
        raise NotImplementedError(
            f"compact: {type(policy).__name__} keeps {', '.join(sorted(own))} beside alive and watched, which cannot "
            "be moved; decode without compact."
        )
    slots = policy.budget + 1
    if selecting and policy.grows:
        slots = max(int((_alive(policy, view) + limit - cache.lengths).max()) for view in selecting)
    pages = -(-slots // cache.page_size)
    if not selecting or pages >= cache.pages_per_row:
        raise ValueError(
            f"compact: expected a layer that selects and a budget below the capacity of {cache.capacity} tokens, got "
            f"{len(selecting)} such layers and a budget of {policy.budget}, for which a row needs {slots} slots: "
            "nothing would be freed."
        )
    small = [None if kept[i] else _shrink(pages, policy, attention.view(i)) for i in layers]
    return state.replace(attention=attention.replace(cache=_with_layers(cache, small, limit)))


def _with_layers(cache: Cache, small: list[Any], limit: int) -> Cache:
    old = zip(cache.kv, cache.meta, cache.memory or (None,) * len(small), strict=True)
    kv, meta, memory = zip(*(new or before for new, before in zip(small, old, strict=True)), strict=True)
    return cache.replace(kv=kv, meta=meta, memory=memory, norms=None, limit=limit)


def _entries(memory: Any) -> Iterable[str]:
    return () if memory is None else memory if isinstance(memory, dict) else ("a memory of its own",)


def _alive(policy: ListPolicy, view: LayerView):
    """int32 ``[B]``: tokens that every row keeps, of the KV head that has most."""
    return policy.kept(view).sum(axis=-1).max(axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _shrink(pages: int, policy: ListPolicy, view: LayerView):
    """Pool, metadata and memory of one layer with what is alive, by position, in the first slots of every row."""
    rows, kv_heads, room = len(view.lengths), pool_shape(view.kv).kv_heads, view.capacity
    alive = jnp.broadcast_to(policy.kept(view), (rows, kv_heads, room))
    slots = pages * view.page_size
    taken = jnp.sort(jnp.where(alive, jnp.arange(room), room), axis=-1)[..., :slots]  # [B, K, slots]
    real, taken = taken < room, jnp.minimum(taken, room - 1)
    heads, place = jnp.arange(kv_heads)[:, None, None], (jnp.arange(rows)[:, None, None] * room + taken).swapaxes(0, 1)
    tokens, _ = as_tokens(view.kv, None)

    def copy(pool, token_pool):
        return token_pool[heads, place].reshape(kv_heads, rows * pages, *pool.shape[2:])

    memory = {"alive": real, "position": jnp.where(real, taken, -1)}
    if isinstance(view.memory, dict) and "watched" in view.memory:
        memory["watched"] = jnp.where(real, jnp.take_along_axis(view.memory["watched"], taken, axis=-1), 0)
    meta = empty_metadata(rows, kv_heads, pages, pool_shape(view.kv).head_dim, metadata_kind(view.meta))
    return jax.tree.map(copy, view.kv, tokens), meta, memory
