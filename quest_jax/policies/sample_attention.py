"""A few queries of a chunk attend to everything and choose for all: SampleAttention (Zhu et al., arXiv 2406.15486)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Policy, Selection
from quest_jax.policies.exact import logits
from quest_jax.policies.lists import best, chunk_of
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class SampleAttention(Policy):
    r"""Top past tokens by the columns that a strided sample of the chunk's queries attends to.

    With :math:`a_{h,t}` the true softmax of a sampled query over all it sees, a past token scores
    :math:`\sum_{h,t} a_{h,t,j}`, the sum running over the sample and the query heads of a KV head. The best of them,
    the ``recent`` last ones of the past, and the chunk itself are attended. With ``alpha`` the fewest of them whose
    sampled mass, with that of the chunk, reaches this share: the paper's stopping rule; without, ``budget`` of them, as
    in QuoKA's comparison. Reads every key to choose, keys and values of at most ``budget + T`` tokens to attend. A past
    within the budget, where ``alpha`` is None, is read whole.

    Attributes:
      budget: past tokens to attend to, at most, per KV head.
      n_queries: size of the sample; the paper's is 5 % of the queries.
      alpha: share of the sampled attention that is enough, in (0, 1], or None.
      recent: tokens at the end of the past that are always taken, within the budget.
      chunk: tokens of a prefill step.
      dense_layers: the first layers attend to everything.

    Raises:
      ValueError, TypeError: a value outside these.

    Every field is static: changing one recompiles.
    """

    budget: int
    n_queries: int = 16
    alpha: float | None = None
    recent: int = 0
    chunk: int = 128
    dense_layers: int = 0

    prefills: ClassVar[bool] = True
    decodes: ClassVar[bool] = False
    copies_keys: ClassVar[bool] = True

    def __post_init__(self):
        least = {"budget": 1, "n_queries": 1, "recent": 0, "chunk": 1, "dense_layers": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"SampleAttention: expected {name} to be an integer, got {value!r}.")
            if value < low:
                raise ValueError(f"SampleAttention: expected {name} to be at least {low}, got {value}.")
        if self.recent > self.budget:
            raise ValueError(
                f"SampleAttention: expected recent within the budget of {self.budget} tokens, got {self.recent}."
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float | np.number | None):
            raise TypeError(f"SampleAttention: expected alpha to be a number or None, got {self.alpha!r}.")
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ValueError(f"SampleAttention: expected alpha in (0, 1] or None, got {self.alpha}.")

    def unit(self, page_size: int) -> int:
        """Tokens are listed."""
        del page_size
        return 1

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers, and caches that can never hold more than the budget."""
        return layer < self.dense_layers or (self.alpha is None and view.capacity <= self.budget)

    def covers(self, view: LayerView) -> Bool[Array, "B"]:
        """The rows whose past is within the budget; with ``alpha`` those without a past."""
        return view.starts <= (self.budget if self.alpha is None else 0)

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Every key, the chunk's too."""
        del starts, pages, page_size
        return lengths

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A key."""
        del metadata
        return head_dim * itemsize

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Selects for a chunk; see the class."""
        del implementation
        rows, n_tokens = q.shape[:2]
        n_real, count = view.lengths - view.starts, min(self.n_queries, n_tokens)
        # Evenly spaced among the real ones, the last of them included; fewer than the sample: some of them again.
        at = jnp.maximum((jnp.arange(count) + 1) * n_real[:, None] // count - 1, 0)  # [B, R]
        sample = jnp.take_along_axis(q, at[..., None, None], axis=1)
        weights = jax.nn.softmax(logits(sample, view.starts[:, None] + at, view), axis=-1)
        mass = weights.sum(axis=(2, 3))  # [B, K, L]
        place = jnp.arange(view.capacity)
        past = (place < view.starts[:, None])[:, None]
        last = past & (place >= (view.starts - self.recent)[:, None])[:, None]
        ranking = jnp.where(past, jnp.where(last, jnp.inf, mass), -jnp.inf)
        width = min(self.budget, view.capacity)
        most = jnp.minimum(view.starts, width)[:, None]
        if self.alpha is not None:
            most = jnp.minimum(most, self._enough(mass, last, past, width))
        counts = jnp.broadcast_to(most, (rows, pool_shape(view.kv).kv_heads))
        return best(ranking, counts, width, chunk_of(n_tokens, view, 1))

    def _enough(self, mass, last, past, width):
        """How many of the best hold ``alpha`` of the mass with the chunk's own; ``[B, K]``."""
        forced = jnp.where(last, mass, 0).sum(axis=-1)
        beside = jnp.where(past, 0, mass).sum(axis=-1)
        rest = lax.top_k(jnp.where(past & ~last, mass, 0), width)[0]
        reached = (beside + forced)[..., None] + jnp.cumsum(rest, axis=-1) - rest  # before each of the rest
        more = (reached < self.alpha * mass.sum(axis=-1)[..., None]).sum(axis=-1)
        return last.sum(axis=-1) + more


METHODS = (
    Method(
        "sample_attention", SampleAttention, ("prefill",), "1 / 2 + (B + T) / L",
        "[SampleAttention](https://arxiv.org/abs/2406.15486)'s columns, 16 queries of a chunk, a fixed number of them",
    ),
    Method(
        "sample_attention_alpha", lambda budget: SampleAttention(budget, alpha=0.95), ("prefill",),
        "1 / 2 + at most (B + T) / L", "the same, as many as hold 95 % of the sampled attention", exact=False,
    ),
)  # fmt: skip
