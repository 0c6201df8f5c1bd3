"""What a method keeps of dense attention while decoding, on a model's own queries and keys, and what it reads."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax import Dense, Params, Policy, attend, extend, init_attention
from quest_jax.attention import AttentionState, init_carry
from quest_jax.evals.capture import Captured, capture, listed
from quest_jax.evals.contexts import groups
from quest_jax.evals.mass import FIRST_LAYER
from quest_jax.pallas_kernels.pages import gather_pages, pool_dtype, pool_shape
from quest_jax.policies.exact import logits
from quest_jax.reads import init_reads

TOP = 10  # tokens whose recall is measured, as in the paper of Quest
_CHUNK = 256


class Fidelity(NamedTuple):
    """What one method keeps, by layer (from the third on) and head, ``[layers, H]``, means over the queries.

    Attributes:
      mass: share of the attention on what was read.
      recall: share of the 10 most attended tokens that was read.
      error: of the head's output, relative, in the 2-norm over the queries.
      share: bytes of keys, values and metadata read over those of dense attention.
      union: the same where the heads of a group read together what any of them lists; equal but for lists per head.
      needle: in the tenth of all heads that look at the needle most, the share of its tokens that the last query
        reads; None without a needle.
    """

    mass: np.ndarray
    recall: np.ndarray
    error: np.ndarray
    share: float
    union: float
    needle: float | None = None


def run(
    params: Params,
    ids: Sequence[int],
    policies: Mapping[str, Policy],
    *,
    queries: int = 64,
    page_size: int = 16,
    needle: tuple[int, int] | None = None,
    found: Captured | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Fidelity]:
    """Decodes the last tokens of a text with every policy, layer by layer: no layer suffers from what another lost.

    What comes before them is read densely, as a prompt is. A policy's ``dense_layers`` are left out: none of the layers
    that are measured is dense by them. What a layer hands on, every query to itself, is handed on here too: layers that
    choose for others count as they are, whole, and the others by the list that they were handed.

    Args:
      params: of :func:`quest_jax.load`.
      ids: the text.
      policies: by name.
      queries: how many of the last tokens.
      page_size: tokens of a page.
      needle: positions from and to, of tokens that the last query asks for.
      found: what :func:`~quest_jax.evals.capture.capture` found of this text and page size; None: it is done here.
      progress: called with (layers done, layers in all), all policies together.

    Raises:
      ValueError: no policies, no text before the last tokens, or a needle outside it.
      NotImplementedError: a model with windows or sinks.
    """
    if not policies or not 0 < queries < len(ids):
        raise ValueError(
            f"fidelity: expected policies and 1 to {len(ids) - 1} queries at the end of the text, got {len(policies)} "
            f"and {queries}."
        )
    first = len(ids) - queries
    start, end = (0, 0) if needle is None else needle
    if needle is not None and not 0 <= start < end <= first:
        raise ValueError(f"fidelity: expected a needle before the last {queries} tokens, within {first}, got {needle}.")
    for policy in policies.values():
        policy.check(page_size)
    found = capture(params, ids, page_size) if found is None else found
    layers = range(min(FIRST_LAYER, params.config.n_layers - 1), params.config.n_layers)
    everywhere = {name: _everywhere(policy).fitted(params.config) for name, policy in policies.items()}
    results, handed, done = {name: [] for name in policies}, dict.fromkeys(policies), 0
    for layer in range(params.config.n_layers):
        # What goes from layer to layer goes through the first ones too, which are not measured.
        used = {
            name: policy
            for name, policy in everywhere.items()
            if layer in layers or (policy.carries and not policy.carries_by_layer)
        }
        q = found.queries[layer]
        kv = _by_position(found.state.cache.kv[layer], params.config.head_dim)
        for names in groups(used):
            keeper = _keeper(used[names[0]])
            state = _read(keeper, page_size, params.config.n_layers, jnp.int32(layer), q, *kv, jnp.int32(first))
            for name in names:
                role = used[name].at(layer, params.config.n_layers)
                measured, handed[name] = _measure(
                    role, queries, q, *kv, state, jnp.int32(first), jnp.array([start, end]), handed[name]
                )
                if layer in layers:
                    results[name].append(jax.tree.map(np.asarray, measured))
                    done += 1
                    if progress is not None:
                        progress(done, len(policies) * len(layers))
    return {name: _joined(values, needle is not None) for name, values in results.items()}


def _everywhere(policy: Policy) -> Policy:
    """The same without dense layers."""
    names = {field.name for field in dataclasses.fields(policy)}
    return dataclasses.replace(policy, **{"dense_layers": 0} if "dense_layers" in names else {})


def _keeper(policy: Policy) -> Policy:
    """Who reads the prompt: the policy where it keeps something of it, else one for all."""
    return policy if policy.keeps_more else Dense()


def _by_position(kv: Any, width: int) -> tuple[Array, Array]:
    """Keys and values ``[1, L, K, D]`` of a pool of one row."""
    shape = pool_shape(kv)
    heads = jnp.arange(shape.kv_heads)[:, None]
    both = gather_pages(kv, *jnp.broadcast_arrays(heads, jnp.arange(shape.pages)))
    keys, values = (x.reshape(shape.kv_heads, -1, shape.head_dim)[..., :width].swapaxes(0, 1)[None] for x in both)
    return keys, values


def _step(q, k, v, state, at, tokens, new):
    own = [lax.dynamic_slice_in_dim(x, at, tokens, axis=1) for x in (q, k, v)]
    return attend(0, own[0], own[1], own[2], extend(state, new[None]))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    keeper: Policy,
    page_size: int,
    layers: int,
    layer: Int[Array, ""],
    q: Float[Array, "1 T H D"],
    k: Float[Array, "1 T K D"],
    v: Float[Array, "1 T K D"],
    first: Int[Array, ""],
) -> AttentionState:
    """One layer after a dense prompt of ``first`` tokens, with what ``keeper`` keeps of it."""
    _, room, heads, width = q.shape
    state = _only(layer, init_attention(
        layers, k.shape[2], width, batch=1, capacity=room, page_size=page_size, policy=keeper, dtype=k.dtype,
        n_heads=heads,
    ))  # fmt: skip

    def read(i, state):
        return _step(q, k, v, state, i * _CHUNK, _CHUNK, jnp.clip(first - i * _CHUNK, 0, _CHUNK))[1]

    return lax.fori_loop(0, -(-first // _CHUNK), read, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
    policy: Policy,
    queries: int,
    q: Float[Array, "1 T H D"],
    k: Float[Array, "1 T K D"],
    v: Float[Array, "1 T K D"],
    state: AttentionState,
    first: Int[Array, ""],
    needle: Int[Array, "2"],
    handed: Any,
):
    """Of one layer: mass, recall, error, of the last query the needle's attention and share, and the bytes.

    And what it hands to the next layer, for every query; ``handed`` is what it was handed, None in the first layer.
    """
    _, room, heads, _ = q.shape
    kv_heads, page_size = k.shape[2], state.cache.page_size
    unit = policy.unit(page_size)
    state = state.replace(policy=policy, carry=init_carry(policy, state.cache))
    asked = (jnp.arange(room) >= needle[0]) & (jnp.arange(room) < needle[1])

    def decode(state, each):
        at, carry = each
        state = state if carry is None else state.replace(carry=carry)
        out, after = _step(q, k, v, state, at, 1, jnp.int32(1))
        memory = None if state.cache.memory is None else _memory_of(policy, k, v, at, state, after)
        view = after.view(0)._replace(memory=memory, carry=state.view(0).carry)
        query = lax.dynamic_slice_in_dim(q, at, 1, axis=1)
        weights = jax.nn.softmax(logits(query, at[None, None], view)[0, :, :, 0], axis=-1).reshape(heads, -1)
        marks = jnp.ones((kv_heads, room))
        if not policy.is_dense(0, view):
            marks = listed(policy.choose(query, view, None), unit, room)
            if (covered := policy.covers(view)) is not None:
                marks = jnp.where(covered[0], 1.0, marks)
        marks = jnp.repeat(marks, heads // len(marks), axis=0)
        values = jnp.repeat(v[0].swapaxes(0, 1), heads // v.shape[2], axis=0).astype(jnp.float32)
        exact = jnp.einsum("hl,hld->hd", weights, values, precision=lax.Precision.HIGHEST)
        best = lax.top_k(weights, min(TOP, room))[1]
        kept = jnp.take_along_axis(marks, best, axis=-1).mean(axis=-1)
        away = ((out[0, 0].astype(jnp.float32) - exact) ** 2).sum(axis=-1)
        counts = [getattr(after.reads, name)[0, 0].astype(jnp.float32) for name in ("read", "scored", "live")]
        live = jnp.arange(room) < -(-(at + 1) // unit) * unit
        once = (marks.reshape(kv_heads, -1, room).max(axis=1) * live).sum() / unit  # what any head of a group lists
        found = (weights * asked).sum(axis=-1), (marks * asked).sum(axis=-1) / jnp.maximum(asked.sum(), 1)
        sums = (weights * marks).sum(axis=-1), kept, away, (exact**2).sum(axis=-1)
        return after, ((*sums, *found, (*counts, once)), None if policy.carries_by_layer else after.carry)

    _, (found, carry) = lax.scan(decode, state, (first + jnp.arange(queries), handed))
    mass, recall, away, size, looked, read, counts = found
    shape, itemsize = pool_shape(state.cache.kv[0]), pool_dtype(state.cache.kv[0]).itemsize
    piece = unit * 2 * shape.head_dim * itemsize
    n_read, n_scored, n_live, n_union = (count.sum() for count in counts)
    choosing = n_scored * policy.scored_nbytes(shape.head_dim, itemsize, state.cache.metadata)
    nbytes = tuple(count * piece for count in (n_read, n_union, n_live))
    error = jnp.sqrt(away.sum(axis=0) / size.sum(axis=0))
    return (mass.mean(axis=0), recall.mean(axis=0), error, looked[-1], read[-1], choosing, *nbytes), carry


def _only(layer: Int[Array, ""], state: AttentionState) -> AttentionState:
    """The state of one layer; what a policy keeps may be another in every layer, all else is empty in all."""
    cache = state.cache
    first = {
        name: None if (every := getattr(cache, name)) is None else every[:1]
        for name in ("kv", "meta", "norms", "blocks")
    }
    if cache.memory is not None:
        first["memory"] = (jax.tree.map(lambda *every: jnp.stack(every)[layer], *cache.memory),)
    return state.replace(cache=cache.replace(**first), reads=init_reads(1, 1))


def _memory_of(policy, k, v, at, before, after):
    """The memory with which the policy chose: that of before the step, with the new token remembered."""
    view = after.view(0)._replace(memory=before.cache.memory[0])
    own = (lax.dynamic_slice_in_dim(x, at, 1, axis=1) for x in (k, v))
    return policy.remember(*own, view)


def _joined(values: list[Any], has_needle: bool) -> Fidelity:
    mass, recall, error, looked, found, choosing, read, union, dense = (
        np.stack(every) for every in zip(*values, strict=True)
    )
    share, union_share = (float((choosing + one).sum() / dense.sum()) for one in (read, union))
    needle = None
    if has_needle:
        most = np.argsort(-looked.ravel(), kind="stable")[: max(1, looked.size // 10)]
        needle = float(found.ravel()[most].mean())
    return Fidelity(mass, recall, error, share, union_share, needle)


def as_json(found: Mapping[str, Fidelity]) -> dict[str, Any]:
    """The same for a file: by method, means and the numbers of every layer and head."""
    return {
        name: {"share": one.share, "union": one.union, "needle": one.needle}
        | {key: float(getattr(one, key).mean()) for key in ("mass", "recall", "error")}
        | {f"{key}_by_layer_and_head": getattr(one, key).round(5).tolist() for key in ("mass", "recall", "error")}
        for name, one in found.items()
    }
