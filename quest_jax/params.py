"""Weights and the static description of the model they belong to, as one pytree."""

from typing import Any

from flax import struct

from quest_jax.models.config import LlamaConfig


@struct.dataclass
class Params:
    """What :func:`quest_jax.load` returns and every function of generation takes.

    Attributes:
      weights: plain nested dict of arrays; names and shapes in :mod:`quest_jax.models.llama`.
      config: frozen, part of the tree structure, so passing ``Params`` through ``jax.jit`` keeps it static.
    """

    weights: dict[str, Any]
    config: LlamaConfig = struct.field(pytree_node=False)
