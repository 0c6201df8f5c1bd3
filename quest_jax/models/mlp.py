"""The gated MLP, and a mixture of them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.models.config import Activation, Experts
from quest_jax.models.numbers import matmul
from quest_jax.models.quant import QuantArray

Matrix = Array | QuantArray

# GPT-OSS: a SwiGLU with a steeper sigmoid, its inputs clamped, and one added to what is gated.
_STEEPNESS, _LIMIT = 1.702, 7.0

_TILE = 128  # rows that share an expert's matrix widened for them


def gated(gate_up: Float[Array, "*batch F2"], activation: Activation) -> Float[Array, "*batch F"]:
    """Gates the second half of the channels by the first; computes in float32 and returns it."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    if activation == "swiglu_clamped":
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
        return gate * jax.nn.sigmoid(_STEEPNESS * gate) * (up + 1)
    return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


def mix_experts(
    x: Float[Array, "B T E"], matrices: Mapping[str, Matrix], experts: Experts, activation: Activation
) -> Float[Array, "B T E"]:
    """Sends every token through its best experts, and adds up what they give by the router's weights.

    Args:
      x: normed hidden states.
      matrices: ``router [E, X]``, ``gate_up [X, E, 2F]``, ``down [X, F, E]``, and where biased ``router_bias [X]``,
        ``gate_up_bias [X, 2F]``, ``down_bias [X, E]``.
      experts: how many, and how they are weighed.
      activation: of an expert's gate.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = _route(rows, matrices, experts)  # [N, k]
    # Few tokens read their own experts' matrices only; many are sorted, so that every expert is read once.
    apply = _each if chosen.size <= experts.count else _grouped
    mixed = apply(rows, chosen, matrices, activation)  # [N, k, E]
    return (mixed * weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)


def _route(rows, matrices, experts):
    logits = matmul(rows, matrices["router"])
    if experts.biased:
        logits = logits + matrices["router_bias"]
    logits = logits.astype(jnp.float32)
    if experts.router == "softmax_all":
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), experts.per_token)
        if experts.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
    else:
        best, chosen = jax.lax.top_k(logits, experts.per_token)
        weights = jax.nn.softmax(best, axis=-1)
    return weights, chosen


def _each(rows, chosen, matrices, activation):
    """One small product after the other: ``[N, k, E]``."""

    def one(row, expert):
        inner = matmul(row[None], _of(matrices["gate_up"], expert))[0]
        inner = inner + matrices["gate_up_bias"][expert] if "gate_up_bias" in matrices else inner
        out = matmul(gated(inner, activation).astype(row.dtype)[None], _of(matrices["down"], expert))[0]
        return out + matrices["down_bias"][expert] if "down_bias" in matrices else out

    pairs = jnp.repeat(rows, chosen.shape[1], axis=0), chosen.reshape(-1)
    return jax.lax.map(lambda pair: one(*pair), pairs).reshape(*chosen.shape, -1)


def _grouped(rows, chosen, matrices, activation):
    """All tokens of an expert in one product: ``[N, k, E]``."""
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=matrices["gate_up"].shape[0])

    def product(x, name):
        made = _ragged(x, matrices[name], sizes)
        bias = matrices.get(f"{name}_bias")
        return made if bias is None else made + bias[expert[order]]

    inner = gated(product(rows[order // chosen.shape[1]], "gate_up"), activation).astype(rows.dtype)
    return product(inner, "down")[jnp.argsort(order)].reshape(*chosen.shape, -1)


def _of(stack: Matrix, expert: Array) -> Matrix:
    return stack.at_first(expert) if isinstance(stack, QuantArray) else stack[expert]


def _ragged(x: Array, stack: Matrix, sizes: Array) -> Array:
    """The first ``sizes[0]`` rows of ``x`` times the first matrix of the stack, the next times the second, and on."""
    if isinstance(stack, QuantArray):
        return _tiled(x, stack, sizes)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.ragged_dot(x, stack, sizes, precision=precision)


def _tiled(x: Array, stack: QuantArray, sizes: Array) -> Array:
    """As :func:`_ragged` for a quantised stack, of which ``ragged_dot`` would need all in full precision at once."""
    size = min(len(x), _TILE)
    ends, tiles = jnp.cumsum(sizes), -(-sizes // size)
    last = jnp.cumsum(tiles)

    def one(i, made):
        expert = jnp.searchsorted(last, i, side="right")
        first = ends[expert] - sizes[expert] + (i - last[expert] + tiles[expert]) * size
        begin = jnp.minimum(first, len(x) - size)  # rows before `first` are those of a tile before this one
        at = begin + jnp.arange(size)
        rows, old = (jax.lax.dynamic_slice_in_dim(array, begin, size) for array in (x, made))
        own = ((at >= first) & (at < ends[expert]))[:, None]
        new = jnp.where(own, matmul(rows, _of(stack, expert)), old)
        return jax.lax.dynamic_update_slice_in_dim(made, new, begin, axis=0)

    return jax.lax.fori_loop(0, last[-1], one, jnp.zeros((len(x), stack.shape[-1]), x.dtype))
