"""Static description of a decoder: frozen, hashable, validated when it is made."""

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched beyond the trained length.

    Field names follow the ``rope_scaling`` entry of a Hugging Face config.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: ``default`` (no scaling), ``linear`` (Chen et al., 2306.15595), ``dynamic`` (NTK, base grows with the
        sequence), ``yarn`` (Peng et al., 2309.00071) or ``llama3`` (Llama 3.1 model card).
      factor: how many times longer than ``original_max_positions`` the context may be.
      original_max_positions: trained length, in tokens; needed by ``dynamic``, ``yarn`` and ``llama3``.
      low_freq_factor, high_freq_factor: ``llama3`` only.
      beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: ``yarn`` only.
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

    def __post_init__(self):
        kinds = RopeKind.__args__
        if self.kind not in kinds:
            raise NotImplementedError(f"RoPE type: expected one of {', '.join(kinds)}, got {self.kind!r}.")
        if not 0 < self.theta < float("inf"):
            raise ValueError(f"RoPE theta: expected a positive finite number, got {self.theta}.")
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"RoPE factor: expected a positive finite number, got {self.factor}.")
        if self.kind in ("dynamic", "yarn", "llama3") and not (self.original_max_positions or 0) > 0:
            raise ValueError(
                f"RoPE type {self.kind!r} needs original_max_positions > 0, got {self.original_max_positions}; "
                "in a Hugging Face config it is original_max_position_embeddings or max_position_embeddings."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama decoder. Letters of the shape comments in brackets.

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

    def __post_init__(self):
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "n_layers",
            "n_heads", "n_kv_heads", "head_dim", "max_positions",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}; "
                "every group of query heads shares one KV head."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: rotary embedding turns pairs, so it must be even, got {self.head_dim}.")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps: expected a number in (0, 1), got {self.rms_norm_eps}.")

    @property
    def group_size(self) -> int:
        """[G] query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads
