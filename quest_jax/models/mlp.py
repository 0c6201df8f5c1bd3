"""The gated MLP, and a mixture of them."""

import functools
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

# A block's product must cost more than the copy of its expert's matrices that XLA makes.
_BLOCK_ROWS = 128


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
    blocked, ragged = (functools.partial(form, activation=activation) for form in (_blocked, _ragged))
    if isinstance(matrices["gate_up"], QuantArray):  # a ragged product would need every expert in full precision
        mixed = blocked(rows, chosen, matrices)
    else:
        # XLA's CPU backend multiplies every row with every expert to give a ragged product.
        mixed = jax.lax.platform_dependent(rows, chosen, dict(matrices), cpu=blocked, default=ragged)
    return (mixed * weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)


def block_rows(pairs: int, count: int) -> int:
    """Rows of a block, where so many pairs of token and expert go to ``count`` experts on a CPU."""
    return min(_BLOCK_ROWS, 1 << (-(-pairs // count) - 1).bit_length())


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


def _expert(rows, expert, matrices, activation):
    """Rows ``[n, E]`` through one expert."""
    inner = matmul(rows, _of(matrices["gate_up"], expert))
    inner = inner + matrices["gate_up_bias"][expert] if "gate_up_bias" in matrices else inner
    out = matmul(gated(inner, activation).astype(rows.dtype), _of(matrices["down"], expert))
    return out + matrices["down_bias"][expert] if "down_bias" in matrices else out


def _of(stack: Matrix, expert: Array) -> Matrix:
    return stack.at_first(expert) if isinstance(stack, QuantArray) else stack[expert]


def _blocked(rows, chosen, matrices, activation):
    """Tokens sorted by expert, in blocks that have one each; an expert's last block is filled up: ``[N, k, E]``.

    Experts that no token goes to are not read.
    """
    count, pairs = matrices["gate_up"].shape[0], chosen.size
    size = block_rows(pairs, count)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=count)
    ends = jnp.cumsum(-(-sizes // size))  # in blocks
    rank = jnp.arange(pairs) - (jnp.cumsum(sizes) - sizes)[expert[order]]
    place = (ends - -(-sizes // size))[expert[order]] * size + rank  # of every sorted pair
    blocks = pairs // size + count
    source = jnp.full(blocks * size, len(rows)).at[place].set(order // chosen.shape[1])
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), count - 1)

    def one(block):
        held, expert = block
        return _expert(rows.at[held].get(mode="fill", fill_value=0), expert, matrices, activation)

    # The blocks past the last one that is needed are not computed.
    made = jax.lax.fori_loop(
        0,
        ends[-1],
        lambda i, made: made.at[i].set(one((source.reshape(blocks, size)[i], owner[i]))),
        jnp.zeros((blocks, size, rows.shape[1]), rows.dtype),
    )
    return made.reshape(-1, rows.shape[1])[place[jnp.argsort(order)]].reshape(*chosen.shape, -1)


def _ragged(rows, chosen, matrices, activation):
    """Tokens sorted by expert, all products of a kind in one, by ``jax.lax.ragged_dot``: ``[N, k, E]``."""
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=matrices["gate_up"].shape[0])
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None

    def product(x, name):
        made = jax.lax.ragged_dot(x, matrices[name], sizes, precision=precision)
        bias = matrices.get(f"{name}_bias")
        return made if bias is None else made + bias[expert[order]]

    inner = gated(product(rows[order // chosen.shape[1]], "gate_up"), activation).astype(rows.dtype)
    return product(inner, "down")[jnp.argsort(order)].reshape(*chosen.shape, -1)
