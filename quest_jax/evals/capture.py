"""Real queries, keys and values: one dense pass of a model over a text, and what a selection keeps of its attention."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax import LayerView, Params, Selection, extend, init_attention, prefill_attention
from quest_jax.attention import AttentionState
from quest_jax.models import llama
from quest_jax.pallas_kernels.pages import gather_pages, pool_shape
from quest_jax.policies.quoka import QuoKA

# Texts are padded to a multiple of this, so that a few lengths share their programs.
_WIDTH = 256


class Captured(NamedTuple):
    """A text as the layers saw it.

    Attributes:
      queries: per layer ``[1, T, H, D]``, rotated; past ``n_tokens`` padding.
      state: whose cache holds the keys, their metadata and norms.
      n_tokens: tokens of the text.
    """

    queries: tuple[Float[Array, "1 T H D"], ...]
    state: AttentionState
    n_tokens: int

    def chunk(self, layer: int, start: int, end: int) -> Float[Array, "1 C H D"]:
        """The queries of the tokens ``[start, end)``."""
        return jax.lax.dynamic_slice_in_dim(self.queries[layer], start, end - start, axis=1)

    def view(self, layer: int, start: int, end: int) -> LayerView:
        """The cache of ``layer`` as it stood when the tokens ``[start, end)`` had just been written."""
        cache = self.state.cache
        norms = None if cache.norms is None else cache.norms[layer]
        starts, lengths = jnp.array([start], jnp.int32), jnp.array([end], jnp.int32)
        return LayerView(cache.kv[layer], cache.meta[layer], norms, starts, lengths, None)

    def keys(self, layer: int) -> Float[Array, "K T D"]:
        """The rotated keys of the text."""
        return _rows_of(self.view(layer, 0, self.n_tokens), self.state.cache.head_dim)[0][:, : self.n_tokens]


def capture(params: Params, ids: Sequence[int], page_size: int = 16) -> Captured:
    """Runs ``params`` densely over ``ids`` and keeps the queries of every layer, about 4 T H D bytes each.

    Raises:
      NotImplementedError: a model with windows or sinks.
    """
    config, width = params.config, -(-len(ids) // _WIDTH) * _WIDTH
    if config.windows or config.sinks:
        raise NotImplementedError(
            "capture: expected a model in which every layer sees everything, got one with windows or sinks: what is "
            "measured here is the attention of such layers; take another model."
        )
    state = init_attention(
        config.n_layers, config.n_kv_heads, config.head_dim, batch=1, capacity=width, page_size=page_size,
        policy=QuoKA(budget=page_size), dtype=params.dtype,
    )  # fmt: skip
    tokens = jnp.zeros((1, width), jnp.int32).at[0, : len(ids)].set(jnp.asarray(list(ids)))
    queries, state = _run(params, tokens, jnp.array([len(ids)]), state)
    return Captured(queries, state, len(ids))


@functools.partial(jax.jit, donate_argnums=3)
def _run(params, tokens, lengths, state):
    def attend(layer, q, k, v, carry):
        queries, state = carry
        out, state = prefill_attention(layer, q, k, v, state)
        return out, ((*queries, q), state)

    positions = jnp.arange(tokens.shape[1])[None]
    _, carry = llama.apply(params.weights, params.config, tokens, positions, attend, ((), extend(state, lengths)))
    return carry


@jax.jit
def probabilities(q: Float[Array, "1 T H D"], view: LayerView) -> Float[Array, "H T L"]:
    """The causal attention of the queries from ``view.starts`` on, over all positions that the row has room for."""
    _, tokens, _, width = q.shape
    keys, _ = _rows_of(view, width)
    grouped = q[0].astype(jnp.float32).swapaxes(0, 1).reshape(len(keys), -1, tokens, width)
    scores = jnp.einsum("kgtd,kld->kgtl", grouped, keys) * width**-0.5
    seen = jnp.arange(keys.shape[1]) <= view.starts[0] + jnp.arange(q.shape[1])[:, None]
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).reshape(q.shape[2], q.shape[1], -1)


def listed(selection: Selection, unit: int, room: int) -> Float[Array, "lists L"]:
    """1 for the positions that the selection of one row lists, 0 for the others."""
    live = jnp.arange(selection.pages.shape[-1]) < selection.counts[0][:, None]
    lists = jnp.arange(len(live))[:, None]
    marks = jnp.zeros((len(live), room // unit)).at[lists, selection.pages[0]].max(live.astype(jnp.float32))
    return jnp.repeat(marks, unit, axis=-1)


def mass_kept(attention: Float[Array, "H T L"], marks: Float[Array, "lists L"]) -> Float[Array, "H T"]:
    """Share of every query's attention that falls on the marked positions of its list."""
    return jnp.einsum("htl,hl->ht", attention, jnp.repeat(marks, len(attention) // len(marks), axis=0))


def output_error(
    attention: Float[Array, "H T L"], marks: Float[Array, "lists L"], view: LayerView
) -> Float[Array, "H"]:
    """Relative error, in the 2-norm over the queries, of a head's output when only marked positions are attended."""
    _, values = _rows_of(view, None)
    kept = attention * jnp.repeat(marks, len(attention) // len(marks), axis=0)[:, None]
    kept = kept / kept.sum(axis=-1, keepdims=True)
    values = jnp.repeat(values, len(attention) // len(values), axis=0)
    exact, found = (jnp.einsum("htl,hld->htd", weights, values) for weights in (attention, kept))
    return jnp.linalg.norm(found - exact, axis=(1, 2)) / jnp.linalg.norm(exact, axis=(1, 2))


def _rows_of(view: LayerView, width: int | None) -> tuple[Array, Array]:
    """Keys and values of a view of one row, float32 ``[K, L, D]``, of the first ``width`` channels."""
    shape = pool_shape(view.kv)
    heads = jnp.arange(shape.kv_heads)[:, None]
    both = gather_pages(view.kv, *jnp.broadcast_arrays(heads, jnp.arange(shape.pages)))
    keys, values = (x.reshape(shape.kv_heads, -1, shape.head_dim)[..., :width].astype(jnp.float32) for x in both)
    return keys, values
