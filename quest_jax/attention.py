"""Attention that owns the cache: append, score, select, attend.

:func:`attend` is what a decoder is given: it hands over a layer's ``q, k, v`` and a state, and gets the output and the
new state. It knows nothing of the model around it.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax.cache import Cache, init_cache
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.blocks import append_blocks
from quest_jax.pallas_kernels.append.norms import append_norms
from quest_jax.pallas_kernels.append.op import IMPLEMENTATIONS as APPENDS
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.pages import Layout, as_tokens, pool_shape
from quest_jax.policies.base import Dense, LayerView, Missed, Policy, Sizes, by_row, checked
from quest_jax.policies.compact import as_slots, is_compact, place_token
from quest_jax.policies.lists import marked
from quest_jax.reads import PageReads, init_reads


class AttentionState(struct.PyTreeNode):
    """What the layers' attention threads through the decoder.

    Attributes:
      cache: keys, values, metadata, and lengths that already count the tokens announced by :func:`extend`.
      starts: int32 ``[B]``, position of the first announced token of each row.
      reads: what the last call of each layer read; zeros for a row that brought no token.
      policy: what a decoding query reads; static.
      prefill_policy: what the queries of several new tokens read; static.
      implementation: of every op that has one of this name, None for the best that serves; static.
      carry: what the decoding policy hands on, one entry for all layers or one a layer; None where it hands on nothing.
    """

    cache: Cache
    starts: Int[Array, "B"]
    reads: PageReads
    policy: Policy = struct.field(pytree_node=False)
    prefill_policy: Policy = struct.field(pytree_node=False, default=Dense())
    implementation: str | None = struct.field(pytree_node=False, default=None)
    carry: tuple[Any, ...] | None = None

    def view(self, layer: int) -> LayerView:
        """Returns the cache of a layer as a policy sees it."""
        cache = self.cache
        norms = None if cache.norms is None else cache.norms[layer]
        blocks = None if cache.blocks is None else cache.blocks[layer]
        memory = None if cache.memory is None else cache.memory[layer]
        carry = None if self.carry is None else self.carry[self.carry_slot(layer)]
        return LayerView(
            cache.kv[layer], cache.meta[layer], norms, self.starts, cache.lengths, cache.page_table, blocks,
            memory, carry,
        )  # fmt: skip

    def carry_slot(self, layer: int) -> int:
        """Which entry of ``carry`` is that of a layer."""
        return layer if self.policy.carries_by_layer else 0


def init_attention(
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    batch: int,
    capacity: int,
    policy: Policy | None = None,
    prefill_policy: Policy | None = None,
    page_size: int = 16,
    dtype=jnp.float32,
    layout: Layout | Literal["auto"] = "auto",
    implementation: str | None = None,
    metadata: Kind = "float32",
    n_heads: int | None = None,
) -> AttentionState:
    """Makes the state of an empty cache.

    Args:
      n_layers, n_kv_heads, head_dim, batch, capacity, page_size, dtype, layout, metadata: see
        :func:`~quest_jax.cache.init_cache`.
      policy: for decoding; None is dense.
      prefill_policy: for several new tokens at once; None is dense.
      implementation: of every op that has one of this name; None takes the best that serves the call.
      n_heads: query heads, for a policy that keeps queries, such as SnapKV.

    Raises:
      ValueError: a size out of range, or a policy that cannot work with this page size or does not serve prefill.
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
    policy, prefill_policy = checked(policy, page_size), checked(prefill_policy, page_size, prefills=True)
    cache = init_cache(
        n_layers, n_kv_heads, head_dim,
        batch=batch, capacity=capacity, page_size=page_size, dtype=dtype, layout=layout,
        norms=policy.needs_norms or prefill_policy.needs_norms, metadata=metadata, block_pages=policy.needs_blocks,
    )  # fmt: skip
    sizes = Sizes(batch, n_kv_heads, head_dim, cache.pages_per_row, page_size, n_heads, n_layers)
    memory = tuple(policy.new_memory(layer, sizes) for layer in range(n_layers)) if policy.remembers else None
    return AttentionState(
        cache=cache.replace(memory=memory),
        # Not the lengths again: one buffer under two names could not be donated.
        starts=jnp.zeros(batch, jnp.int32),
        reads=init_reads(n_layers, batch, diagnosed=policy.diagnoses),
        policy=policy,
        prefill_policy=prefill_policy,
        implementation=implementation,
        carry=init_carry(policy, cache),
    )


def init_carry(policy: Policy, cache: Cache) -> tuple[Any, ...] | None:
    """Makes what ``policy`` hands on in a cache of this size, before its first step; None where it hands on nothing."""
    if not policy.carries:
        return None
    sizes = len(cache.lengths), pool_shape(cache.kv[0]).kv_heads, cache.pages_per_row, cache.page_size
    return tuple(policy.new_carry(*sizes) for _ in range(len(cache.kv) if policy.carries_by_layer else 1))


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
    *,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "B T H D"], AttentionState]:
    """Writes a layer's new tokens and attends: one a row by ``state.policy``, several by ``state.prefill_policy``.

    Tokens past what :func:`extend` announced for a row are padding: not written, and their output is zero.

    Args:
      layer: which layer's cache; a Python integer.
      q, k, v: rotated queries and keys, and values, in the cache's dtype.
      state: after :func:`extend`.
      window: how many tokens a query sees, itself included; static. Such a layer reads the pages of its window, by no
        policy. None is all.
      sinks: a logit a query head that takes part in the softmax and brings no value; of what is selected, too.

    Returns:
      the attention output, and the state to hand to the next layer.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    if q.shape[1] == 1:
        return decode_attention(layer, q, k, v, state, window=window, sinks=sinks)
    return prefill_attention(layer, q, k, v, state, window=window, sinks=sinks)


def prefill_attention(layer, q, k, v, state, *, window=None, sinks=None):
    """As :func:`attend`: new tokens attend to what the prefill policy selects for all of them, and to themselves."""
    return _attend_by(state.prefill_policy, layer, q, k, v, state, window, sinks)


def decode_attention(layer, q, k, v, state, *, window=None, sinks=None):
    """As :func:`attend`: one new token a row attends to what the policy selects for it."""
    if q.shape[1] != 1:
        raise ValueError(f"decode_attention: expected one token per row, got {q.shape[1]}; use attend for several.")
    return _attend_by(state.policy, layer, q, k, v, state, window, sinks)


def _attend_by(policy, layer, q, k, v, state, window, sinks):
    cache = state.cache
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < len(cache.kv):
        raise ValueError(f"attend: expected a layer in [0, {len(cache.kv)}), got {layer!r}.")
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(f"attend: expected q and k of the same rows and tokens, got {q.shape} and {k.shape}.")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"attend: expected a window of at least 1 token, a static integer, or None, got {window!r}.")
    window = None if window is None else int(window)
    sinks = None if sinks is None else jnp.asarray(sinks)
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ValueError(f"attend: expected sinks [{q.shape[2]}], one a query head, got {sinks.shape}.")
    layer = int(layer)
    its_own = policy is state.policy
    policy = policy.at(layer, len(cache.kv))
    if policy.carries and state.carry is None:
        raise ValueError(
            f"attend: {type(policy).__name__} hands on what it chooses, and this state has no room for it; make the "
            "state with this policy (init_attention, prefill), or replace another by it (replace_policy)."
        )
    if window is not None and policy.chooses_for_others:
        raise ValueError(
            f"attend: expected a layer that sees everything where {type(policy).__name__} chooses for those after it, "
            f"got layer {layer}, which has a window of {window}; name others, selecting=."
        )
    if window is not None and window >= state.cache.capacity:
        window, policy, its_own = None, Dense(), False  # sees everything, and is not sparsified
    if is_compact(state.view(layer).memory) and (q.shape[1] != 1 or not its_own or window):
        raise NotImplementedError(
            f"attend: a compact layer takes one token at a time, by {type(state.policy).__name__}, without a window; "
            "feed_tokens does so, and a state that is not compact takes several."
        )
    dense = window is None and policy.is_dense(layer, state.view(layer))
    slot = state.carry_slot(layer)
    alone = state.replace(
        cache=_map_layers(lambda layers: (layers[layer],), cache), reads=init_reads(1, len(q)),
        carry=None if state.carry is None else (state.carry[slot],),
    )  # fmt: skip
    out, alone = _attend_alone(policy, dense, window, dispatch.current_target(), q, k, v, alone, sinks)
    cache = _map_layers(lambda old, new: (*old[:layer], new[0], *old[layer + 1 :]), cache, alone.cache)
    reads = jax.tree.map(lambda old, new: old.at[layer].set(new[0]), state.reads, alone.reads)
    carry = state.carry
    if carry is not None:
        carry = (*carry[:slot], *alone.carry, *carry[slot + 1 :])
    return out, state.replace(cache=cache, reads=reads, carry=carry)


def _map_layers(function, cache, *others):
    """Applies ``function`` to every field of the cache that has an entry a layer."""
    fields = [name for name in ("kv", "meta", "norms", "blocks", "memory") if getattr(cache, name) is not None]
    return cache.replace(**{name: function(*(getattr(one, name) for one in (cache, *others))) for name in fields})


# Traced once for all layers that are alike, which is most of the time that tracing a model took; the compiler puts it
# into every layer. The target chooses implementations while tracing, so it is part of the key.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attend_alone(policy, dense, window, target, q, k, v, state, sinks):
    """Appends and attends by ``policy``; the state's cache has one layer."""
    del target
    state = _append(q, k, v, state)
    view = state.view(0)
    unit = policy.unit(view.page_size)

    def whole(lengths):
        live = -(-lengths // unit) * k.shape[2]
        attended = page_attention(
            q, view.kv, view.starts, lengths, view.page_table, implementation=state.implementation
        )
        nothing = init_reads(len(live), diagnosed=policy.diagnoses)
        scored = _scored(policy, view) * k.shape[2] if policy.chooses_for_others else nothing.scored
        return attended, nothing.replace(read=live, live=live, scored=scored, whole=jnp.ones_like(live, bool))

    def selected():
        return _attend_selected(policy, q, k, v, view, state.implementation)

    selection, carry = None, view.carry
    if window is not None:
        attended, counts = _attend_window(window, unit, q, view, state.implementation)
    elif dense:
        attended, counts = whole(view.lengths)
        carry = policy.carry_on(q, view, None)
    elif (covered := policy.covers(view)) is None:
        attended, counts, selection = selected()
        carry = policy.carry_on(q, view, selection)
    else:
        # Each row by its own length: what is read for it does not depend on the rows beside it.
        none_read = init_reads(len(view.lengths), diagnosed=policy.diagnoses)
        nothing = (jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)), none_read
        every = lax.cond(covered.any(), lambda: whole(jnp.where(covered, view.lengths, 0)), lambda: nothing)

        def some():
            attended, counts, selection = selected()
            return attended, counts, policy.carry_on(q, view, selection)

        others = lax.cond(covered.all(), lambda: (*nothing, carry), some)
        attended, counts, carry = by_row(covered, (*every, carry), others)
    if carry is not view.carry:
        active = view.lengths > view.starts
        state = state.replace(carry=(by_row(active, carry, view.carry),))
    out, lse = attended
    if sinks is not None:
        # One more logit in the softmax takes its share of the weight; it brings no value.
        sinks = sinks.astype(jnp.float32)
        out = (out.astype(jnp.float32) * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype)
        lse = jnp.logaddexp(lse, sinks)
    if view.memory is not None and window is None:
        seen = None if selection is None else _tokens_in(selection, unit, k.shape[2], view.capacity)
        state = _keep(state, state.policy.observe(q, view, seen, lse))
    return out, _record(state, counts)


def _scored(policy, view):
    """int32 ``[B]``: what choosing scores per KV head."""
    scored = policy.scored_in(view)
    return scored if (reused := policy.reuses(view)) is None else jnp.where(reused, 0, scored)


def _keep(state, memory):
    return state.replace(cache=state.cache.replace(memory=(memory,)))


def _tokens_in(selection, unit, kv_heads, capacity):
    """bool ``[B, K, L]``: the tokens of the lists, of any list of a KV head."""
    listed = marked(selection, capacity // unit)
    listed = listed.reshape(len(listed), kv_heads, -1, listed.shape[-1]).any(axis=2)
    return jnp.repeat(listed, unit, axis=-1)


def _attend_window(window, unit, q, view, implementation):
    """Attends to the pages that hold what the queries' windows reach, of each the tokens within the window."""
    page_size, tokens = view.page_size, q.shape[1]
    width = min(-(-(window + tokens - 1) // page_size) + 1, view.pages_per_row)
    live = -(-view.lengths // page_size)
    first = jnp.clip((view.starts - window + 1) // page_size, 0, view.pages_per_row - width)
    kv_heads = pool_shape(view.kv).kv_heads
    lists = (len(live), kv_heads)
    pages = jnp.broadcast_to((first[:, None] + jnp.arange(width))[:, None], (*lists, width))
    counts = jnp.clip(live - first, 0, width)
    attended = page_attention(
        q, view.kv, view.starts, view.lengths, view.page_table,
        pages=pages, counts=jnp.broadcast_to(counts[:, None], lists), window=window, implementation=implementation,
    )  # fmt: skip
    # Counted in what the policy of the other layers lists, pages or tokens. Dense attention would read no more here.
    listed = jnp.minimum(counts * (page_size // unit), -(-view.lengths // unit)) * kv_heads
    return attended, PageReads(listed, listed, jnp.zeros_like(listed), jnp.ones_like(listed, bool))


def _attend_selected(policy, q, k, v, view, implementation):
    unit = policy.unit(view.page_size)
    selection = policy.choose(q, view, implementation)
    in_place = policy.in_place(selection, view)
    kv, table = (view.kv, view.page_table) if unit == view.page_size else as_tokens(view.kv, view.page_table)
    slots = as_slots(view)
    out, lse = page_attention(
        q, kv, slots.starts, slots.lengths, table,
        pages=in_place.pages, counts=in_place.counts, implementation=implementation,
    )  # fmt: skip
    missed = policy.diagnose(q, view, selection, lse) if policy.diagnoses else None
    if policy.adds_own:
        token = view.starts[:, None] + jnp.arange(q.shape[1])  # [B, T]
        listed = jnp.arange(selection.pages.shape[-1]) < selection.counts[..., None]
        listed = (listed[:, None] & (selection.pages[:, None] == token[:, :, None, None] // unit)).any(
            axis=-1
        )  # [B, T, lists]
        out, lse = _add_own(out, lse, q, k, v, listed | (token >= view.lengths[:, None])[..., None])
    if (part := policy.beside(q, view, selection, lse)) is not None:
        out, lse = _merge(out, lse, *part)
    live = -(-view.lengths // unit)
    return (
        (out, lse),
        PageReads(
            read=selection.counts.sum(axis=-1),
            live=live * k.shape[2],
            scored=_scored(policy, view) * k.shape[2],
            whole=(selection.counts == live[:, None]).all(axis=-1),
            missed=missed,
        ),
        selection,
    )


def _add_own(out, lse, q, k, v, listed):
    """Merges every query's own token into its result where that is not in its list (``listed`` ``[B, T, lists]``)."""
    heads = q.shape[2]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    logit = (q.astype(jnp.float32) * k).sum(axis=-1) * q.shape[-1] ** -0.5
    logit = jnp.where(jnp.repeat(listed, heads // listed.shape[2], axis=2), -jnp.inf, logit)
    return _merge(out, lse, v, logit)


def _merge(out, lse, other, other_lse):
    """Averages two parts of a softmax by the sums of their exponentials."""
    top = jnp.maximum(lse, other_lse)
    top = jnp.where(jnp.isneginf(top), 0, top)
    one, two = jnp.exp(lse - top), jnp.exp(other_lse - top)
    total = jnp.where(one + two != 0, one + two, 1)
    merged = (out.astype(jnp.float32) * one[..., None] + other * two[..., None]) / total[..., None]
    return merged.astype(out.dtype), jnp.where(one + two != 0, top + jnp.log(total), -jnp.inf)


def _append(q, k, v, state):
    cache = state.cache
    if is_compact(state.view(0).memory):
        kv, memory = place_token(k, v, state.view(0))
        return state.replace(cache=cache.replace(kv=(kv,), memory=(memory,)))
    kv, meta = append(
        cache.kv[0], cache.meta[0], k, v, state.starts, cache.lengths, cache.page_table,
        implementation=dispatch.if_offered(APPENDS, state.implementation),
    )  # fmt: skip
    cache = cache.replace(kv=(kv,), meta=(meta,))
    if cache.norms is not None:
        cache = cache.replace(norms=(append_norms(cache.norms[0], k, state.starts, cache.lengths),))
    if cache.blocks is not None:
        blocks = append_blocks(
            cache.blocks[0], meta, state.starts, cache.lengths, tokens=k.shape[1], page_size=cache.page_size
        )
        cache = cache.replace(blocks=(blocks,))
    state = state.replace(cache=cache)
    return state if cache.memory is None else _keep(state, state.policy.remember(k, v, state.view(0)))


def _record(state, counts):
    active = state.cache.lengths > state.starts
    if state.policy.diagnoses and counts.missed is None:
        unknown = jnp.where(counts.whole, 0.0, jnp.nan)
        counts = counts.replace(missed=Missed(unknown, unknown))
    counts = jax.tree.map(lambda count: jnp.where(active, count, jnp.zeros_like(count)), counts)
    return state.replace(reads=jax.tree.map(lambda row: row[None], counts))
