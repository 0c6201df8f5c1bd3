"""Lists of the best tokens, or pages, for the chunks of a prompt: what the baselines of prefill share."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from quest_jax.policies.base import LayerView, Selection
from quest_jax.policies.lists import ListPolicy, best, chunk_of


@dataclasses.dataclass(frozen=True)
class ChunkListPolicy(ListPolicy):
    """A :class:`~quest_jax.policies.lists.ListPolicy` for reading prompts: one list for all queries of a chunk.

    The ``budget`` is for the past, and the chunk itself is attended besides, causally, as in
    :class:`~quest_jax.policies.quoka.QuoKA`. A row whose past is within the budget is read whole. A subclass has
    ``score`` for the queries ``[B, T, H, D]`` of a chunk; what is not past may have any score. Where pages are listed,
    those that hold a token of the chunk are read with it.

    Attributes:
      budget: past tokens to attend to per list.
      granularity: see :class:`~quest_jax.policies.lists.ListPolicy`.
      dense_layers: the first layers attend to everything.
      chunk: tokens of a prefill step.
    """

    dense_layers: int = 0
    chunk: int = 128

    prefills: ClassVar[bool] = True
    decodes: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("chunk", 1)

    def covers(self, view: LayerView) -> Bool[Array, "B"]:
        """The rows whose past is within the budget."""
        return view.starts <= self.budget

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Scores and selects for a chunk."""
        del implementation
        unit = self.unit(view.page_size)
        scores, candidates = self.score(q, view), (view.starts // unit)[:, None]
        past = jnp.arange(scores.shape[-1]) < candidates
        width = min(self.budget // unit, scores.shape[-1])
        scores = jnp.where(past[:, None], scores, -jnp.inf)
        return best(scores, jnp.minimum(candidates, width), width, chunk_of(q.shape[1], view, unit))
