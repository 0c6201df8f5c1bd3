"""Attention that owns the cache: append, score, select, attend.

:func:`attend` is what a decoder is given: it hands over a layer's ``q, k, v`` and a state, and gets the output and the
new state. It knows nothing of the model around it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from quest_jax.cache import Cache, init_cache
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.pages import Layout
from quest_jax.policies.base import Dense, Policy


class PageReads(struct.PyTreeNode):
    """What attention read, counted from what was attended; ``[layers, B]`` is the last call of each layer.

    Attributes:
      read: int32, pages of keys and values, summed over the lists (per KV head, or per query head).
      live: int32, pages that hold tokens, summed over the KV heads: what dense attention reads.
      scored: int32, pages that were scored by their min and max, summed over the KV heads; 0 without selection.
      whole: bool, no page was left out.
    """

    read: Int[Array, "*steps B"]
    live: Int[Array, "*steps B"]
    scored: Int[Array, "*steps B"]
    whole: Bool[Array, "*steps B"]


class AttentionState(struct.PyTreeNode):
    """What the layers' attention threads through the decoder.

    Attributes:
      cache: keys, values, metadata, and lengths that already count the tokens announced by :func:`extend`.
      starts: int32 ``[B]``, position of the first announced token of each row.
      reads: what the last call of each layer read; zeros for a row that brought no token.
      policy: which pages a decoding query reads; static.
      implementation: of every op, None for the best that serves; static.
    """

    cache: Cache
    starts: Int[Array, "B"]
    reads: PageReads
    policy: Policy = struct.field(pytree_node=False)
    implementation: str | None = struct.field(pytree_node=False, default=None)


def init_attention(
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    batch: int,
    capacity: int,
    policy: Policy | None = None,
    page_size: int = 16,
    dtype=jnp.float32,
    layout: Layout | Literal["auto"] = "auto",
    implementation: str | None = None,
) -> AttentionState:
    """Makes the state of an empty cache.

    Args:
      n_layers, n_kv_heads, head_dim, batch, capacity, page_size, dtype, layout: see
        :func:`~quest_jax.cache.init_cache`.
      policy: for decoding; None is dense.
      implementation: of every op; None takes the best that serves the call.

    Raises:
      ValueError: a size out of range, or a policy that cannot work with this page size.
      TypeError: a policy that is none.

    Example:
      >>> import jax.numpy as jnp, quest_jax
      >>> state = quest_jax.init_attention(
      ...     1, 2, 8, batch=1, capacity=64, policy=quest_jax.Quest(budget=32, dense_layers=0))
      >>> state = quest_jax.extend(state, jnp.array([1]))  # one real token in this row
      >>> q, k, v = jnp.ones((1, 1, 4, 8)), jnp.ones((1, 1, 2, 8)), jnp.ones((1, 1, 2, 8))
      >>> out, state = quest_jax.attend(0, q, k, v, state)
      >>> out.shape, int(state.cache.lengths[0])
      ((1, 1, 4, 8), 1)
    """
    policy = Dense() if policy is None else policy
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: expected a quest_jax policy such as Quest(budget=1024) or None, got {policy!r}.")
    policy.check(page_size)
    cache = init_cache(
        n_layers, n_kv_heads, head_dim,
        batch=batch, capacity=capacity, page_size=page_size, dtype=dtype, layout=layout,
    )  # fmt: skip
    return AttentionState(
        cache=cache,
        # Not the lengths again: one buffer under two names could not be donated.
        starts=jnp.zeros(batch, jnp.int32),
        reads=init_reads(n_layers, batch),
        policy=policy,
        implementation=implementation,
    )


def init_reads(*shape: int) -> PageReads:
    """Makes counts of nothing read, e.g. of shape ``(layers, batch)``."""
    # Four arrays, not one under four names: that could not be donated.
    counts = [jnp.zeros(shape, jnp.int32) for _ in range(3)]
    return PageReads(*counts, whole=jnp.zeros(shape, bool))


def extend(state: AttentionState, n_new: Int[Array, "B"]) -> AttentionState:
    """Announces ``n_new`` tokens per row, which the following calls of :func:`attend` bring, once per layer.

    A row takes no more than it has room for; rows may take none. Call it once before the model: without it, ``attend``
    is told of no tokens and writes none.

    Raises:
      ValueError: not an integer per row.
    """
    lengths, n_new = state.cache.lengths, jnp.asarray(n_new)
    if n_new.shape != lengths.shape or not jnp.issubdtype(n_new.dtype, jnp.integer):
        raise ValueError(f"extend: expected {len(lengths)} integers, one a row, got {n_new.shape} of {n_new.dtype}.")
    taken = jnp.clip(n_new, 0, state.cache.capacity - lengths)
    return state.replace(starts=lengths, cache=state.cache.replace(lengths=(lengths + taken).astype(jnp.int32)))


def attend(
    layer: int,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    state: AttentionState,
) -> tuple[Float[Array, "B T H D"], AttentionState]:
    """Writes a layer's new tokens and attends: one token a row decodes by the policy, several are dense prefill.

    Tokens past what :func:`extend` announced for a row are padding: not written, and their output is zero.

    Args:
      layer: which layer's cache; a Python integer.
      q, k, v: rotated queries and keys, and values, in the cache's dtype.
      state: after :func:`extend`.

    Returns:
      the attention output, and the state to hand to the next layer.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    if q.shape[1] == 1:
        return decode_attention(layer, q, k, v, state)
    return prefill_attention(layer, q, k, v, state)


def prefill_attention(layer, q, k, v, state):
    """As :func:`attend`: every new token attends to all tokens before it, whatever the policy."""
    cache, kv = _append(layer, q, k, v, state)
    out, _ = page_attention(q, kv, state.starts, cache.lengths, cache.page_table, implementation=state.implementation)
    live = -(-cache.lengths // cache.page_size) * k.shape[2]
    nothing = jnp.zeros_like(live)
    return out, _record(state.replace(cache=cache), layer, live, live, nothing, nothing == 0)


def decode_attention(layer, q, k, v, state):
    """As :func:`attend`: one new token a row attends to the pages that the policy selects for it."""
    if q.shape[1] != 1:
        raise ValueError(f"decode_attention: expected one token per row, got {q.shape[1]}; use attend for several.")
    policy = state.policy
    if policy.is_dense(layer, state.cache.pages_per_row, state.cache.page_size):
        return prefill_attention(layer, q, k, v, state)
    cache, kv = _append(layer, q, k, v, state)
    scores = policy.score(q[:, 0], cache.meta[layer], cache.lengths, cache.page_size, state.implementation)
    selection = policy.select(scores, cache.lengths, cache.page_size)
    out, _ = page_attention(
        q, kv, state.starts, cache.lengths, cache.page_table,
        pages=selection.pages, counts=selection.counts, implementation=state.implementation,
    )  # fmt: skip
    used = -(-cache.lengths // cache.page_size)
    live = used * k.shape[2]
    whole = (selection.counts == used[:, None]).all(axis=-1)
    state = state.replace(cache=cache)
    return out, _record(state, layer, selection.counts.sum(axis=-1), live, live, whole)


def _append(layer, q, k, v, state):
    cache = state.cache
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < len(cache.kv):
        raise ValueError(f"attend: expected a layer in [0, {len(cache.kv)}), got {layer!r}.")
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(f"attend: expected q and k of the same rows and tokens, got {q.shape} and {k.shape}.")
    kv, meta = append(
        cache.kv[layer], cache.meta[layer], k, v, state.starts, cache.lengths, cache.page_table,
        implementation=state.implementation,
    )  # fmt: skip
    replaced = cache.replace(
        kv=(*cache.kv[:layer], kv, *cache.kv[layer + 1 :]),
        meta=(*cache.meta[:layer], meta, *cache.meta[layer + 1 :]),
    )
    return replaced, kv


def _record(state, layer, *counts):
    active = state.cache.lengths > state.starts
    new = PageReads(*(jnp.where(active, count, jnp.zeros_like(count)) for count in counts))
    return state.replace(reads=jax.tree.map(lambda old, row: old.at[layer].set(row), state.reads, new))
