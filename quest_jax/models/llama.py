"""The Llama decoder: pure functions over a plain dict of weights. It knows nothing of caches; attention is handed in.

The weight tree (``Params.weights``), all of one dtype, matrices ``[in, out]``:

    embed                [V, E]              rows by token id; also the output projection when tied
    layer_<i>/attn_norm  [E]
    layer_<i>/qkv        [E, (H + 2 K) D]    columns: the H query heads, the K key heads, the K value heads;
                                             within a head the rotate-half layout (as in Hugging Face checkpoints)
    layer_<i>/out        [H D, E]            rows: head after head
    layer_<i>/mlp_norm   [E]
    layer_<i>/gate_up    [E, 2 F]            columns: gate, then up
    layer_<i>/down       [F, E]
    norm                 [E]
    lm_head              [E, V]              absent when ``config.tie_word_embeddings``

Letters: B batch, T tokens, E hidden, F MLP, V vocabulary, H query heads, K key/value heads, D head dim.
Query head h reads key/value head ``h // (H / K)``.

Numbers: float32 weights compute in float32 throughout. bfloat16 weights keep the residual stream and the products in
bfloat16; norms, rotary embedding, the MLP's gate and the logits are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from quest_jax.models.config import LlamaConfig
from quest_jax.models.rope import apply_rope, rope_rotation

Attend = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]
"""``attend(layer, q [B,T,H,D], k [B,T,K,D], v [B,T,K,D], state) -> (out [B,T,H,D], state)``; q and k are rotated."""


def abstract_weights(config: LlamaConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Names, shapes and dtype of the weight tree, as ``jax.ShapeDtypeStruct``: what every loader fills in."""
    return jax.eval_shape(lambda: init_weights(config, jax.random.key(0), dtype))


def init_weights(config: LlamaConfig, key: Key[Array, ""], dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random weights: norms one, matrices normal with standard deviation 0.02. The same key gives the same weights."""
    return _init(config, jnp.dtype(dtype), key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(config: LlamaConfig, dtype: Any, key: Key[Array, ""]) -> dict[str, Any]:
    # Linen finds parameters by running the module; since only they leave this function, jit drops the rest.
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = _Llama(config, dtype).init(key, tokens, tokens, lambda layer, q, k, v, state: (q, state), None)
    return dict(variables["params"])


def apply(
    weights: dict[str, Any],
    config: LlamaConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any,
    *,
    rope_lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T E"], Any]:
    """Run the decoder on new tokens.

    Args:
      weights: the tree of the module docstring.
      config: static; a new one recompiles.
      tokens: ids. An id outside ``[0, V)`` gives a row of NaN, not a neighbour's embedding.
      positions: position of each token in its own sequence.
      attend: attention over whatever it keeps in ``state``; called once a layer, in order.
      state: handed to the first ``attend`` and threaded through all of them.
      rope_lengths: sequence length per row for dynamic NTK RoPE (ignored otherwise); None means max(positions) + 1.

    Returns:
      Hidden states after the final norm, in the dtype of the weights, and the state of the last ``attend``.

    Raises:
      ValueError: while tracing, when ``attend`` returns another shape than that of its queries.
      flax.errors.ScopeParamShapeError: while tracing, when ``weights`` are not those of ``config``.

    Example:
      >>> config = LlamaConfig(
      ...     vocab_size=16, hidden_size=8, intermediate_size=8, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=4,
      ...     max_positions=32,
      ... )
      >>> weights = init_weights(config, jax.random.key(0))
      >>> tokens, positions = jnp.array([[3, 1, 2]]), jnp.array([[0, 1, 2]])
      >>> def attend(layer, q, k, v, state):  # every token reads itself only; the state counts the layers
      ...     return v, state + 1
      >>> hidden, layers = apply(weights, config, tokens, positions, attend, 0)
      >>> hidden.shape, layers, project_logits(weights, config, hidden).shape
      ((1, 3, 8), 2, (1, 3, 16))
    """
    module = _Llama(config, weights["embed"].dtype)
    hidden, state = module.apply({"params": weights}, tokens, positions, attend, state, rope_lengths)
    return hidden, state


def project_logits(
    weights: dict[str, Any], config: LlamaConfig, hidden: Float[Array, "*batch E"]
) -> Float[Array, "*batch V"]:
    """Logits of hidden states ``[..., E]``, float32 ``[..., V]`` whatever the dtype of the weights."""
    with jax.named_scope("logits"):
        if config.tie_word_embeddings:
            return _matmul(hidden, weights["embed"], jnp.float32, contract=1)
        return _matmul(hidden, weights["lm_head"], jnp.float32)


class _Block(nn.Module):
    """One decoder block."""

    config: LlamaConfig
    dtype: Any
    layer: int

    @nn.compact
    def __call__(self, x, cos, sin, attend: Attend, state):
        config = self.config
        heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
        normal, hidden, inner = nn.initializers.normal(0.02), config.hidden_size, config.intermediate_size
        attn_norm = self.param("attn_norm", nn.initializers.ones, (hidden,), self.dtype)
        qkv = self.param("qkv", normal, (hidden, (heads + 2 * kv_heads) * width), self.dtype)
        out = self.param("out", normal, (heads * width, hidden), self.dtype)
        mlp_norm = self.param("mlp_norm", nn.initializers.ones, (hidden,), self.dtype)
        gate_up = self.param("gate_up", normal, (hidden, 2 * inner), self.dtype)
        down = self.param("down", normal, (inner, hidden), self.dtype)

        with jax.named_scope("qkv"):
            normed = _rms_norm(x, attn_norm, config.rms_norm_eps)
            projected = _matmul(normed, qkv).reshape(*x.shape[:2], heads + 2 * kv_heads, width)
            q, k, v = jnp.split(projected, [heads, heads + kv_heads], axis=2)
        with jax.named_scope("rope"):
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        with jax.named_scope("attend"):
            attended, state = attend(self.layer, q, k, v, state)
            # [B, H, T, D] would reshape without complaint, into nonsense.
            if attended.shape != q.shape:
                raise ValueError(
                    f"attend: expected an output of the queries' shape [B, T, H, D] = {q.shape}, got {attended.shape}."
                )
        with jax.named_scope("out"):
            x = x + _matmul(attended.astype(x.dtype).reshape(*x.shape[:2], heads * width), out)
        with jax.named_scope("mlp"):
            gate, up = jnp.split(_matmul(_rms_norm(x, mlp_norm, config.rms_norm_eps), gate_up), 2, axis=-1)
            gated = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
            x = x + _matmul(gated.astype(x.dtype), down)
        return x, state


class _Llama(nn.Module):
    """All parameters and the forward pass up to the final norm."""

    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens, positions, attend: Attend, state, rope_lengths=None):
        config = self.config
        vocab, hidden = config.vocab_size, config.hidden_size
        normal = nn.initializers.normal(0.02)
        embed = self.param("embed", normal, (vocab, hidden), self.dtype)
        norm = self.param("norm", nn.initializers.ones, (hidden,), self.dtype)
        if not config.tie_word_embeddings:
            self.param("lm_head", normal, (hidden, vocab), self.dtype)  # read by project_logits

        with jax.named_scope("embed"):
            x = embed.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        with jax.named_scope("rope"):
            cos, sin = rope_rotation(config.rope, config.head_dim, positions, rope_lengths)
        for layer in range(config.n_layers):
            block = _Block(config, self.dtype, layer, name=f"layer_{layer}")
            x, state = block(x, cos, sin, attend, state)
        with jax.named_scope("norm"):
            return _rms_norm(x, norm, config.rms_norm_eps), state


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32; keeps the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def _matmul(x: Array, weight: Array, dtype: Any = None, *, contract: int = 0) -> Array:
    """``x [..., n]`` times axis ``contract`` of ``weight``; the result in ``dtype``, or that of ``x``.

    A float32 product is asked for at full precision: by default a TPU rounds both sides to bfloat16 and a GPU to
    TF32, which loses 4 of the 7 digits and with them every promise about equal logits. Who wants speed takes bfloat16.
    """

    def product(x: Array, weight: Array) -> Array:
        return jax.lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (contract,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
            preferred_element_type=dtype or x.dtype,
        )

    def two_rows(x: Array, weight: Array) -> Array:
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return product(rows, weight)[:1].reshape(*x.shape[:-1], -1)

    def same_row_twice(x: Array, weight: Array) -> Array:
        rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return product(rows, weight)[:1].reshape(*x.shape[:-1], -1)

    # A single row is no matrix to XLA. Its CPU backend then writes a float32 copy of a bfloat16 weight at every decode
    # step; its CUDA backend, for some sizes, writes the elementwise product of row and weight before it sums it (in
    # bfloat16 rounded, too). A second row avoids both: of zeros on a CPU, the same one on a GPU, where the product then
    # reads it without a launch to make it. TPUs need no help.
    if x.size == x.shape[-1]:
        on_cpu = two_rows if weight.dtype == jnp.bfloat16 else product
        return jax.lax.platform_dependent(x, weight, cpu=on_cpu, cuda=same_row_twice, default=product)
    return product(x, weight)
