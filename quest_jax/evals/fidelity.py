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
from rich.table import Table

from quest_jax import Params, Policy, attend, extend, init_attention
from quest_jax.evals.capture import capture, listed
from quest_jax.evals.mass import FIRST_LAYER
from quest_jax.pallas_kernels.pages import gather_pages, pool_dtype, pool_shape
from quest_jax.policies.exact import logits

TOP = 10  # tokens whose recall is measured, as in the paper of Quest
_CHUNK = 256


class Fidelity(NamedTuple):
    """What one method keeps, by layer (from the third on) and head, ``[layers, H]``, means over the queries.

    Attributes:
      mass: share of the attention on what was read.
      recall: share of the 10 most attended tokens that was read.
      error: of the head's output, relative, in the 2-norm over the queries.
      share: bytes of keys, values and metadata read over those of dense attention.
    """

    mass: np.ndarray
    recall: np.ndarray
    error: np.ndarray
    share: float


def run(
    params: Params,
    ids: Sequence[int],
    policies: Mapping[str, Policy],
    *,
    queries: int = 64,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Fidelity]:
    """Decodes the last tokens of a text with every policy, layer by layer: no layer suffers from what another lost.

    What comes before them is read densely, as a prompt is. A policy's ``dense_layers`` are left out: none of the layers
    that are measured is dense.

    Args:
      params: of :func:`quest_jax.load`.
      ids: the text.
      policies: by name.
      queries: how many of the last tokens.
      page_size: tokens of a page.
      progress: called with (layers done, layers in all), all policies together.

    Raises:
      ValueError: no policies, or no text before the last tokens.
      NotImplementedError: a model with windows or sinks.
    """
    if not policies or not 0 < queries < len(ids):
        raise ValueError(
            f"fidelity: expected policies and 1 to {len(ids) - 1} queries at the end of the text, got {len(policies)} "
            f"and {queries}."
        )
    for policy in policies.values():
        policy.check(page_size)
    found = capture(params, ids, page_size)
    layers = range(min(FIRST_LAYER, params.config.n_layers - 1), params.config.n_layers)
    first, results = len(ids) - queries, {name: [] for name in policies}
    for done, (name, policy) in enumerate(policies.items()):
        everywhere = _everywhere(policy)
        for i, layer in enumerate(layers):
            kv = _by_position(found.state.cache.kv[layer], params.config.head_dim)
            measured = _measure(everywhere, page_size, queries, found.queries[layer], *kv, jnp.int32(first))
            results[name].append(jax.tree.map(np.asarray, measured))
            if progress is not None:
                progress(done * len(layers) + i + 1, len(policies) * len(layers))
    return {name: _joined(values) for name, values in results.items()}


def _everywhere(policy: Policy) -> Policy:
    """The same without dense layers."""
    names = {field.name for field in dataclasses.fields(policy)}
    return dataclasses.replace(policy, **{"dense_layers": 0} if "dense_layers" in names else {})


def _by_position(kv: Any, width: int) -> tuple[Array, Array]:
    """Keys and values ``[1, L, K, D]`` of a pool of one row."""
    shape = pool_shape(kv)
    heads = jnp.arange(shape.kv_heads)[:, None]
    both = gather_pages(kv, *jnp.broadcast_arrays(heads, jnp.arange(shape.pages)))
    keys, values = (x.reshape(shape.kv_heads, -1, shape.head_dim)[..., :width].swapaxes(0, 1)[None] for x in both)
    return keys, values


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    policy: Policy,
    page_size: int,
    queries: int,
    q: Float[Array, "1 T H D"],
    k: Float[Array, "1 T K D"],
    v: Float[Array, "1 T K D"],
    first: Int[Array, ""],
):
    """Of one layer: mass, recall and squared errors and outputs, summed over the queries, and the bytes."""
    _, room, heads, width = q.shape
    state = init_attention(
        1, k.shape[2], width, batch=1, capacity=room, page_size=page_size, policy=policy, dtype=k.dtype
    )

    def step(state, at, tokens, new):
        own = [lax.dynamic_slice_in_dim(x, at, tokens, axis=1) for x in (q, k, v)]
        return attend(0, own[0], own[1], own[2], extend(state, new[None]))

    def read(i, state):
        return step(state, i * _CHUNK, _CHUNK, jnp.clip(first - i * _CHUNK, 0, _CHUNK))[1]

    def decode(state, at):
        out, after = step(state, at, 1, jnp.int32(1))
        memory = None if state.cache.memory is None else _memory_of(policy, k, v, at, state, after)
        view = after.view(0)._replace(memory=memory)
        query = lax.dynamic_slice_in_dim(q, at, 1, axis=1)
        weights = jax.nn.softmax(logits(query, at[None, None], view)[0, :, :, 0], axis=-1).reshape(heads, -1)
        marks = jnp.ones((k.shape[2], room))
        if not policy.is_dense(0, view):
            marks = listed(policy.choose(query, view, None), policy.unit(page_size), room)
            if (covered := policy.covers(view)) is not None:
                marks = jnp.where(covered[0], 1.0, marks)
        marks = jnp.repeat(marks, heads // len(marks), axis=0)
        values = jnp.repeat(v[0].swapaxes(0, 1), heads // v.shape[2], axis=0).astype(jnp.float32)
        exact = jnp.einsum("hl,hld->hd", weights, values, precision=lax.Precision.HIGHEST)
        best = lax.top_k(weights, min(TOP, room))[1]
        kept = jnp.take_along_axis(marks, best, axis=-1).mean(axis=-1)
        away = ((out[0, 0].astype(jnp.float32) - exact) ** 2).sum(axis=-1)
        counts = tuple(getattr(after.reads, name)[0, 0].astype(jnp.float32) for name in ("read", "scored", "live"))
        return after, ((weights * marks).sum(axis=-1), kept, away, (exact**2).sum(axis=-1), counts)

    state = lax.fori_loop(0, -(-first // _CHUNK), read, state)
    _, (mass, recall, away, size, counts) = lax.scan(decode, state, first + jnp.arange(queries))
    shape, itemsize = pool_shape(state.cache.kv[0]), pool_dtype(state.cache.kv[0]).itemsize
    page = policy.unit(page_size) * 2 * shape.head_dim * itemsize
    scored = policy.scored_nbytes(shape.head_dim, itemsize, state.cache.metadata)
    n_read, n_scored, n_live = (count.sum() for count in counts)
    error = jnp.sqrt(away.sum(axis=0) / size.sum(axis=0))
    return mass.mean(axis=0), recall.mean(axis=0), error, n_read * page + n_scored * scored, n_live * page


def _memory_of(policy, k, v, at, before, after):
    """The memory with which the policy chose: that of before the step, with the new token remembered."""
    view = after.view(0)._replace(memory=before.cache.memory[0])
    own = (lax.dynamic_slice_in_dim(x, at, 1, axis=1) for x in (k, v))
    return policy.remember(*own, view)


def _joined(values: list[Any]) -> Fidelity:
    mass, recall, error, read, dense = (np.stack(every) for every in zip(*values, strict=True))
    return Fidelity(mass, recall, error, float(read.sum() / dense.sum()))


def table(found: Mapping[str, Fidelity], n_tokens: int, queries: int) -> Table:
    """Lays methods out, by bytes read."""
    shown = Table(title=f"decoding the last {queries} of {n_tokens} tokens", title_justify="left")
    shown.add_column("method, budget")
    for heading in ("bytes of dense", "mass", f"recall of {TOP}", "output error"):
        shown.add_column(heading, justify="right")
    for name, one in found.items():
        numbers = (f"{x.mean():.3f}" for x in (one.mass, one.recall, one.error))
        shown.add_row(name, f"{one.share:.0%}", *numbers)
    return shown


def as_json(found: Mapping[str, Fidelity]) -> dict[str, Any]:
    """The same for a file: by method, means and the numbers of every layer and head."""
    return {
        name: {"share": one.share}
        | {key: float(getattr(one, key).mean()) for key in ("mass", "recall", "error")}
        | {f"{key}_by_layer_and_head": getattr(one, key).round(5).tolist() for key in ("mass", "recall", "error")}
        for name, one in found.items()
    }
