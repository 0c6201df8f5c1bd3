"""The first tokens and the last ones: StreamingLLM (Xiao et al., arXiv 2309.17453) without its re-rotation."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Selection
from quest_jax.policies.chunk_lists import ChunkListPolicy
from quest_jax.policies.compact import is_compact, positions
from quest_jax.policies.lists import ListPolicy, everything
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

    @property
    def drops(self) -> bool:
        """For good, where it lists tokens: neither the sinks nor the window ever come back to them."""
        return self.granularity == "token"

    def real(self, view: LayerView) -> Bool[Array, "B #K L"]:
        """The sinks, and the window that ends with the last token."""
        at, lengths = positions(view), view.lengths[:, None, None]
        return (at >= 0) & (at < lengths) & ((at < self.sink) | (at >= lengths - (self.budget - self.sink)))

    def observe(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Any:
        """Frees, in a compact layer, the slot of what has left the window."""
        del q, seen, lse
        return view.memory | {"alive": self.real(view)} if is_compact(view.memory) else view.memory

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """The sinks and the window."""
        if not is_compact(view.memory):
            return super().choose(q, view, implementation)
        return everything(self.real(view), self.budget)

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
        kind="evict",
    ),
    Method("sink_window_chunk", SinkWindowChunk, ("prefill",), "(B + T) / L", "the same of the past, for a chunk"),
)  # fmt: skip
