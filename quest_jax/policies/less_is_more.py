"""LessIsMore: one list for all heads and for the layers after it (Yang et al., arXiv 2508.07101)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from quest_jax.policies.base import LayerView
from quest_jax.policies.carried import CarriedPolicy
from quest_jax.policies.exact import logits
from quest_jax.policies.method import Method
from quest_jax.policies.ranking import largest


@dataclasses.dataclass(frozen=True)
class LessIsMore(CarriedPolicy):
    """Lets all query heads choose in turn, in a few layers; every head of the layers after those reads that one list.

    Of a budget of B tokens ``int(B (1 - recent))`` go by rank: every head's best token, then every head's second, and
    so on, until there are so many different ones. The others are the ``sink`` first tokens and the last of the row,
    among which no head chooses. What it reads: see :class:`~quest_jax.policies.carried.CarriedPolicy`.

    Attributes:
      budget, dense_layers, selecting, role: see there.
      recent: share of the budget that goes by position.
      sink: tokens at the start, part of that share; 0 is the default of the authors' program.
    """

    recent: float = 0.25
    sink: int = 4

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.recent, bool) or not isinstance(self.recent, int | float | np.number):
            raise TypeError(f"LessIsMore: expected recent to be a number, got {self.recent!r}.")
        if not 0 <= self.recent <= 1:
            raise ValueError(f"LessIsMore: expected recent in [0, 1], a share of the budget, got {self.recent}.")
        if isinstance(self.sink, bool) or not isinstance(self.sink, int | np.integer):
            raise TypeError(f"LessIsMore: expected sink to be an integer, got {self.sink!r}.")
        if not 0 <= self.sink < max(1, self.budget - self._ranked):
            raise ValueError(
                f"LessIsMore: expected a sink of at least 0 and below the {self.budget - self._ranked} tokens that go "
                f"by position, got {self.sink}; raise the budget or recent, or pass a smaller sink=."
            )

    @property
    def _ranked(self) -> int:
        """Tokens that are taken by rank."""
        return int(self.budget * (1 - self.recent))

    def lists(self, kv_heads: int) -> int:
        """One for all."""
        del kv_heads
        return 1

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B 1 L"]:
        """Minus the turn at which a token is taken; of those that go by position infinity."""
        rows, heads, _ = q.shape
        products = logits(q[:, None], (view.lengths - 1)[:, None], view).reshape(rows, heads, -1)
        place, length = jnp.arange(view.capacity), view.lengths[:, None]
        recent = self.budget - self._ranked - self.sink
        always = (place < self.sink) | (place >= length - recent)
        # A row that has no more than this many others gives them all a turn.
        best = largest(jnp.where(always[:, None], -jnp.inf, products), min(self._ranked, view.capacity))
        turns = jnp.arange(best.shape[-1]) * heads + jnp.arange(heads)[:, None]
        at = jnp.arange(rows)[:, None, None], best
        taken = jnp.full((rows, view.capacity), -jnp.inf).at[at].max(-turns.astype(jnp.float32))
        return jnp.where(always, jnp.inf, taken)[:, None]


METHODS = (
    Method(
        "less_is_more", LessIsMore, ("decode",), "B / L, but 3 / 2 in the two layers that choose",
        "[LessIsMore](https://arxiv.org/abs/2508.07101): heads choose in turn, one list for the layers after",
    ),
)  # fmt: skip
