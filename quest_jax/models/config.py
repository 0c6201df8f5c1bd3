"""Static description of a decoder: frozen, hashable, validated when it is made."""

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
RouterKind = Literal["softmax_all", "softmax_chosen"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched beyond the trained length.

    Field names follow the ``rope_scaling`` entry of a Hugging Face config.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: ``default`` (no scaling), ``linear`` (Chen et al., 2306.15595), ``dynamic`` (NTK, base grows with the
          sequence), ``yarn`` (Peng et al., 2309.00071), ``llama3`` (Llama 3.1 model card) or ``longrope`` (Ding et al.,
        2402.13753: one list of factors up to the trained length, another beyond).
      factor: how many times longer than ``original_max_positions`` the context may be.
      original_max_positions: trained length, in tokens; needed by ``dynamic``, ``yarn``, ``llama3`` and ``longrope``.
      rotary_dim: channels of a head that turn, the first ones; None is all of them.
      low_freq_factor, high_freq_factor: ``llama3`` only.
      beta_fast, beta_slow, truncate, mscale, mscale_all_dim: ``yarn`` only.
      attention_factor: of cosine and sine; ``yarn`` and ``longrope`` only.
      short_factors, long_factors: ``longrope`` only, one for every pair that turns.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    rotary_dim: int | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        kinds = RopeKind.__args__
        if self.kind not in kinds:
            raise NotImplementedError(f"RoPE type: expected one of {', '.join(kinds)}, got {self.kind!r:.80}.")
        if not 0 < self.theta < float("inf"):
            raise ValueError(f"RoPE theta: expected a positive finite number, got {self.theta}.")
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"RoPE factor: expected a positive finite number, got {self.factor}.")
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and not (self.original_max_positions or 0) > 0:
            raise ValueError(
                f"RoPE type {self.kind!r} needs original_max_positions > 0, got {self.original_max_positions}; "
                "in a Hugging Face config it is original_max_position_embeddings or max_position_embeddings."
            )
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"RoPE rotary_dim: expected an even number of channels or None, got {self.rotary_dim}.")
        if self.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if not getattr(self, name) or not all(0 < factor < float("inf") for factor in getattr(self, name)):
                    raise ValueError(f"RoPE type 'longrope': {name}: expected positive finite numbers, one a pair.")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of every layer.

    Attributes:
      count: [X] experts.
      per_token: how many of them each token goes through.
      size: [F] width of an expert.
      router: how the chosen are weighed: by the softmax over all experts (``softmax_all``, Qwen3-MoE) or over the
        chosen only (``softmax_chosen``, GPT-OSS).
      normalized: the weights of the chosen add up to one.
      biased: the router and the experts have biases.
    """

    count: int
    per_token: int
    size: int
    router: RouterKind = "softmax_all"
    normalized: bool = True
    biased: bool = False

    def __post_init__(self):
        if self.router not in RouterKind.__args__:
            raise NotImplementedError(
                f"experts: router: expected one of {', '.join(RouterKind.__args__)}, got {self.router!r:.80}."
            )
        if min(self.count, self.per_token, self.size) < 1 or self.per_token > self.count:
            raise ValueError(
                f"experts: expected 1 <= per_token <= count and a size of at least 1, got {self.per_token} of "
                f"{self.count} experts of size {self.size}."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama decoder, and in what a family differs from it. Letters of the shape comments in brackets.

    Attributes:
      vocab_size: [V] rows of the embedding.
      hidden_size: [E] width of the residual stream.
      intermediate_size: [F] width of the gated MLP.
      n_layers: number of decoder blocks.
      n_heads: [H] query heads.
      n_kv_heads: [K] key/value heads; H must be a multiple of K (K = H is MHA, K = 1 is MQA).
      head_dim: [D] width of a head; need not be E / H.
      max_positions: trained context length in tokens (informative; longer prompts extrapolate).
      rms_norm_eps: epsilon of every RMSNorm.
      rope: rotary embedding.
      tie_word_embeddings: the output projection is the embedding.
      eos_token_ids: ids that end a generation by default.
      bos_token_id: id of the begin-of-text token, or None. It is never prepended here; tokenizers do that.
      qkv_bias, out_bias: biases on q, k, v and on the attention's output.
      qk_norm: an RMSNorm over each head of q and k, before the rotation.
      windows: of every layer, how many tokens its queries see, themselves included, 0 for all; empty: all see all.
      unrotated_layers: layers without rotary embedding.
      window_rope: rotary embedding of the layers with a window, None for the same.
      sinks: a learned logit a query head that takes part in every softmax and brings no value.
      query_scale: factor of the scores, ``1 / sqrt(head_dim)`` if None.
      activation: of the MLP's gate.
      experts: a mixture of experts instead of the MLP.
      norm_offset: added to the weight of every RMSNorm.
      output_norms: an RMSNorm after attention and MLP too, before they are added.
      embed_scale: factor of the embeddings.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    sinks: bool = False
    query_scale: float | None = None
    activation: Activation = "silu"
    experts: Experts | None = None
    norm_offset: float = 0.0
    output_norms: bool = False
    embed_scale: float = 1.0

    def __post_init__(self):
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "n_layers",
            "n_heads", "n_kv_heads", "head_dim", "max_positions",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}.")
        if self.activation not in Activation.__args__:
            raise NotImplementedError(
                f"activation: expected one of {', '.join(Activation.__args__)}, got {self.activation!r:.80}."
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}; "
                "every group of query heads shares one KV head."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: rotary embedding turns pairs, so it must be even, got {self.head_dim}.")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps: expected a number in (0, 1), got {self.rms_norm_eps}.")
        if self.windows and (len(self.windows) != self.n_layers or min(self.windows) < 0):
            raise ValueError(
                f"windows: expected none or {self.n_layers} numbers of at least 0, one a layer, "
                f"got {str(self.windows):.80}."
            )
        if any(not 0 <= layer < self.n_layers for layer in self.unrotated_layers):
            raise ValueError(
                f"unrotated_layers: expected layers below {self.n_layers}, got {str(self.unrotated_layers):.80}."
            )
        for rope in (self.rope, self.window_rope or self.rope):
            width = self.head_dim if rope.rotary_dim is None else rope.rotary_dim
            if width > self.head_dim:
                raise ValueError(f"RoPE rotary_dim: expected at most head_dim {self.head_dim}, got {width}.")
            if rope.kind == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {width // 2}:
                raise ValueError(
                    f"RoPE type 'longrope': expected {width // 2} short_factors and long_factors, one a pair, got "
                    f"{len(rope.short_factors)} and {len(rope.long_factors)}."
                )

    @property
    def group_size(self) -> int:
        """[G] query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads

    def window(self, layer: int) -> int | None:
        """How many tokens the queries of a layer see, themselves included; None: all."""
        return (self.windows[layer] or None) if self.windows else None
