"""Weights and the static description of the model they belong to, as one pytree."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from quest_jax.models import llama
from quest_jax.models.config import LlamaConfig
from quest_jax.models.quant import QuantArray, QuantKind


class Params(struct.PyTreeNode):
    """What :func:`quest_jax.load` returns and every function of generation takes.

    Attributes:
      weights: plain nested dict of arrays, matrices perhaps quantised; names and shapes in
        :mod:`quest_jax.models.llama`.
      config: frozen, part of the tree structure, so passing ``Params`` through ``jax.jit`` keeps it static.
    """

    weights: dict[str, Any]
    config: LlamaConfig = struct.field(pytree_node=False)

    @property
    def dtype(self) -> Any:
        """What the model computes in, and keeps in its cache: the dtype of all weights that are not quantised."""
        return self.weights["norm"].dtype

    @property
    def quantized(self) -> QuantKind | None:
        """The kind of the quantised matrices; None in full precision."""
        embed = self.weights["embed"]
        return embed.kind if isinstance(embed, QuantArray) else None


def random_params(config: LlamaConfig, *, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Params:
    """Makes a model with random weights: for tests, benchmarks and shapes, not for text.

    Args:
      config: shape of the model.
      seed: the same seed gives the same weights.
      dtype: float32 or bfloat16.

    Raises:
      TypeError: ``config`` is no config.
    """
    if not isinstance(config, LlamaConfig):
        raise TypeError(f"config: expected a quest_jax.LlamaConfig, got {type(config).__name__}.")
    return Params(llama.init_weights(config, jax.random.key(seed), dtype), config)
