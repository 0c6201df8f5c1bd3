"""The first tokens and the last ones: StreamingLLM (Xiao et al., arXiv 2309.17453) without its re-rotation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView
from quest_jax.policies.chunk_lists import ChunkListPolicy
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class SinkWindow(ListPolicy):
    """Reads the ``sink`` first tokens and the last ``budget - sink``, whatever the query.

    Keys keep the rotation of their own positions; StreamingLLM rotates them anew by their place in its cache, which is
    another model. Reads ``budget / L`` of the cache, and nothing to choose.

    Attributes:
      budget, granularity, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`.
      sink: tokens at the start; where pages are listed, the pages that hold them.
    """

    sink: int = 4

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.sink, bool) or not isinstance(self.sink, int | np.integer):
            raise TypeError(f"{name}: expected sink to be an integer, got {self.sink!r}.")
        if not 0 <= self.sink < self.budget:
            raise ValueError(
                f"{name}: expected a budget above the sink of {self.sink} tokens, and a sink of at least 0, got a "
                f"budget of {self.budget}; raise it, or pass a smaller sink=."
            )

    def score(self, q: Float[Array, "B *T H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """The position; of a sink infinity."""
        unit = self.unit(view.page_size)
        place = jnp.arange(view.capacity // unit)
        scores = jnp.where(place < -(-self.sink // unit), jnp.inf, place.astype(jnp.float32))
        return jnp.broadcast_to(scores, (len(q), pool_shape(view.kv).kv_heads, len(place)))


@dataclasses.dataclass(frozen=True)
class SinkWindowChunk(ChunkListPolicy, SinkWindow):
    """Reads the ``sink`` first tokens and the last ``budget - sink`` before a chunk, for the chunks of a prompt.

    A window that moves with the chunk, not with its queries: the last of them sees ``T - 1`` tokens more.

    Attributes:
      budget, granularity, dense_layers, chunk: see :class:`~quest_jax.policies.chunk_lists.ChunkListPolicy`.
      sink: see :class:`SinkWindow`.
    """


METHODS = (
    Method(
        "sink_window", SinkWindow, ("decode",), "B / L",
        "[StreamingLLM](https://arxiv.org/abs/2309.17453) without its re-rotation: the first 4 tokens and the last",
    ),
    Method("sink_window_chunk", SinkWindowChunk, ("prefill",), "(B + T) / L", "the same of the past, for a chunk"),
)  # fmt: skip
