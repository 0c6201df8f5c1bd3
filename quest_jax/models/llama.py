"""The decoder of the Llama families: pure functions over a plain dict of weights.

It knows nothing of caches; attention is handed in. What sets a family apart is a field of
:class:`~quest_jax.models.config.LlamaConfig`.

The weight tree (``Params.weights``), all of one dtype, that of ``norm``, matrices ``[in, out]``:

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

and by the field of the config that asks for it:

    layer_<i>/qkv_bias   [(H + 2 K) D]       qkv_bias
    layer_<i>/out_bias   [E]                 out_bias
    layer_<i>/q_norm     [D]                 qk_norm; and k_norm
    layer_<i>/sinks      [H]                 sinks
    layer_<i>/attn_out_norm  [E]             output_norms; and mlp_out_norm
    layer_<i>/router         [E, X]          experts, which stand in for gate_up and down; and router_bias [X],
    layer_<i>/experts_gate_up  [X, E, 2 F]   experts_gate_up_bias [X, 2 F], experts_down_bias [X, E] where biased
    layer_<i>/experts_down     [X, F, E]

Embedding and matrices, but not the router, may each be a :class:`~quest_jax.models.quant.QuantArray` of that shape.

Letters: B batch, T tokens, E hidden, F MLP, V vocabulary, H query heads, K key/value heads, D head dim.
Query head h reads key/value head ``h // (H / K)``.

Numbers: float32 weights compute in float32 throughout. bfloat16 weights keep the residual stream and the products in
bfloat16; norms, rotary embedding, the MLP's gate and the logits are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from quest_jax.models.config import LlamaConfig
from quest_jax.models.mlp import gated, mix_experts
from quest_jax.models.numbers import matmul, rms_norm, take_rows
from quest_jax.models.quant import QuantArray
from quest_jax.models.rope import apply_rope, rope_rotation

Attend = Callable[..., tuple[Array, Any]]
"""``attend(layer, q [B,T,H,D], k [B,T,K,D], v [B,T,K,D], state) -> (out [B,T,H,D], state)``; q and k are rotated.

Scores are ``q . k / sqrt(D)``: another scale is in q already. Layers that have them pass ``window=``, how many tokens a
query sees, itself included, and ``sinks=[H]``, logits that take part in every softmax and bring no value.
"""


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
    variables = _Llama(config, dtype).init(key, tokens, tokens, lambda layer, q, *_, **limits: (q, None), None)
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
      Hidden states after the final norm, in the dtype of the norms, and the state of the last ``attend``.

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
    module = _Llama(config, weights["norm"].dtype)
    hidden, state = module.apply({"params": weights}, tokens, positions, attend, state, rope_lengths)
    return hidden, state


def project_logits(
    weights: dict[str, Any], config: LlamaConfig, hidden: Float[Array, "*batch E"]
) -> Float[Array, "*batch V"]:
    """Logits of hidden states ``[..., E]``, float32 ``[..., V]`` whatever the dtype of the weights."""
    with jax.named_scope("logits"):
        if config.tie_word_embeddings:
            return matmul(hidden, weights["embed"], jnp.float32, contract=1)
        return matmul(hidden, weights["lm_head"], jnp.float32)


def _matrix(module: Any, name: str, *shape: int) -> Array | QuantArray:
    """A matrix of ``module``; Linen would compare the shapes of the parts of a quantised one."""
    stored = module.get_variable("params", name)
    if not isinstance(stored, QuantArray):
        return module.param(name, nn.initializers.normal(0.02), shape, module.dtype)
    if stored.shape != shape:
        raise flax.errors.ScopeParamShapeError(name, "/".join(module.path), stored.shape, shape)
    return stored


class _Block(nn.Module):
    """One decoder block; ``cos`` and ``sin`` are those of its layer."""

    config: LlamaConfig
    dtype: Any
    layer: int

    @nn.compact
    def __call__(self, x, cos, sin, attend: Attend, state):
        config = self.config
        heads, width, hidden = config.n_heads, config.head_dim, config.hidden_size
        with jax.named_scope("qkv"):
            q, k, v = self._project(self._norm("attn_norm", x))
        out = self._matrix("out", heads * width, hidden)  # here: what a seed gives follows the order
        with jax.named_scope("rope"):
            if self.layer not in config.unrotated_layers:
                q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            if config.query_scale is not None:
                q = (q.astype(jnp.float32) * (config.query_scale * width**0.5)).astype(q.dtype)
        with jax.named_scope("attend"):
            limits: dict[str, Any] = {"sinks": self._bias("sinks", heads)} if config.sinks else {}
            if (window := config.window(self.layer)) is not None:
                limits["window"] = window
            attended, state = attend(self.layer, q, k, v, state, **limits)
            # [B, H, T, D] would reshape without complaint, into nonsense.
            if attended.shape != q.shape:
                raise ValueError(
                    f"attend: expected an output of the queries' shape [B, T, H, D] = {q.shape}, got {attended.shape}."
                )
        with jax.named_scope("out"):
            added = matmul(attended.astype(x.dtype).reshape(*x.shape[:2], heads * width), out)
            added = added + self._bias("out_bias", hidden) if config.out_bias else added
            x = x + (self._norm("attn_out_norm", added) if config.output_norms else added)
        with jax.named_scope("mlp"):
            added = self._mlp(self._norm("mlp_norm", x))
            x = x + (self._norm("mlp_out_norm", added) if config.output_norms else added)
        return x, state

    def _project(self, normed):
        """q ``[B, T, H, D]``, k and v ``[B, T, K, D]``, not rotated yet."""
        config = self.config
        heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
        columns = (heads + 2 * kv_heads) * width
        projected = matmul(normed, self._matrix("qkv", config.hidden_size, columns))
        if config.qkv_bias:
            projected = projected + self._bias("qkv_bias", columns)
        projected = projected.reshape(*normed.shape[:2], heads + 2 * kv_heads, width)
        q, k, v = jnp.split(projected, [heads, heads + kv_heads], axis=2)
        return (self._norm("q_norm", q), self._norm("k_norm", k), v) if config.qk_norm else (q, k, v)

    def _mlp(self, normed):
        config = self.config
        hidden, experts = config.hidden_size, config.experts
        if experts is None:
            gate_up = self._matrix("gate_up", hidden, 2 * config.intermediate_size)
            inner = gated(matmul(normed, gate_up), config.activation).astype(normed.dtype)
            return matmul(inner, self._matrix("down", config.intermediate_size, hidden))
        matrices = {
            "router": self._matrix("router", hidden, experts.count),
            "gate_up": self._matrix("experts_gate_up", experts.count, hidden, 2 * experts.size),
            "down": self._matrix("experts_down", experts.count, experts.size, hidden),
        }
        if experts.biased:
            matrices |= {
                "router_bias": self._bias("router_bias", experts.count),
                "gate_up_bias": self._bias("experts_gate_up_bias", experts.count, 2 * experts.size),
                "down_bias": self._bias("experts_down_bias", experts.count, hidden),
            }
        return mix_experts(normed, matrices, experts, config.activation)

    def _matrix(self, name, *shape):
        return _matrix(self, name, *shape)

    def _bias(self, name, *shape):
        return self.param(name, nn.initializers.zeros, shape, self.dtype)

    def _norm(self, name, x):
        offset = self.config.norm_offset
        weight = self.param(name, nn.initializers.constant(1 - offset), x.shape[-1:], self.dtype)
        return rms_norm(x, weight, self.config.rms_norm_eps, offset)


class _Llama(nn.Module):
    """All parameters and the forward pass up to the final norm."""

    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens, positions, attend: Attend, state, rope_lengths=None):
        config = self.config
        vocab, hidden = config.vocab_size, config.hidden_size
        embed = _matrix(self, "embed", vocab, hidden)
        norm = self.param("norm", nn.initializers.constant(1 - config.norm_offset), (hidden,), self.dtype)
        if not config.tie_word_embeddings:
            _matrix(self, "lm_head", hidden, vocab)  # read by project_logits

        with jax.named_scope("embed"):
            x = take_rows(embed, tokens, self.dtype)
            if config.embed_scale != 1:
                x = x * jnp.asarray(config.embed_scale, x.dtype)
        with jax.named_scope("rope"):
            rotation = rope_rotation(config.rope, config.head_dim, positions, rope_lengths)
            local = rotation
            if config.window_rope is not None:
                local = rope_rotation(config.window_rope, config.head_dim, positions, rope_lengths)
        for layer in range(config.n_layers):
            block = _Block(config, self.dtype, layer, name=f"layer_{layer}")
            cos, sin = rotation if config.window(layer) is None else local
            x, state = block(x, cos, sin, attend, state)
        with jax.named_scope("norm"):
            return rms_norm(x, norm, config.rms_norm_eps, config.norm_offset), state
