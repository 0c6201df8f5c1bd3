"""As many pages as their estimated share of the attention asks for: an adaptive budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import Metadata, bounds_of
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.policies.base import LayerView, PagePolicy, Selection
from quest_jax.policies.lists import best
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class TopP(PagePolicy):
    r"""The fewest top pages whose estimated mass reaches ``p``, at most those of the budget.

    A page's mass is estimated as :math:`\mathrm{softmax}_p(s_p / \sqrt D)` of Quest's score of it by a shrunk box, per
    query head, averaged over the heads of a group. That is an estimate and no bound: on SmolLM2 the mass that is missed
    is 1 - p on average, and more than that in a third of all steps. The first page and the current one are always
    read. Reads ``1 / S`` of the cache to choose, and at most ``budget / L`` to attend.

    Attributes:
      budget: tokens to read at most per KV head.
      p: share of the mass, in (0, 1].
      beta: size of the shrunk box.
      dense_layers: the first layers attend to everything.

    Raises:
      ValueError, TypeError: a value outside these, or at first use a budget below two pages.

    Every field is static: changing one recompiles.
    """

    budget: int
    p: float = 0.9
    beta: float = 0.5
    dense_layers: int = 2

    def __post_init__(self):
        for name, least in (("budget", 1), ("dense_layers", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"TopP: expected {name} to be an integer, got {value!r}.")
            if value < least:
                raise ValueError(f"TopP: expected {name} to be at least {least}, got {value}.")
        for name in ("p", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"TopP: expected {name} to be a number, got {value!r}.")
        if not 0 < self.p <= 1:
            raise ValueError(f"TopP: expected p in (0, 1], a share of the attention, got {self.p}.")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"TopP: expected beta in [0, 1], got {self.beta}.")

    def check(self, page_size: int) -> None:
        """Raises ValueError when the budget does not hold the first page and the current one."""
        if self.budget < 2 * page_size:
            raise ValueError(
                f"TopP: expected a budget of at least two pages, {2 * page_size} tokens, got {self.budget}; "
                "raise the budget or take smaller pages (page_size=)."
            )

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers."""
        del view
        return layer < self.dense_layers

    def score(
        self,
        q: Float[Array, "B H D"],
        meta: Metadata,
        lengths: Int[Array, "B"],
        page_size: int,
        implementation: str | None,
    ) -> Float[Array, "B lists P"]:
        """The estimated mass of every page."""
        scores = page_scores(
            q, meta, lengths, page_size=page_size, reduce="none", beta=self.beta, implementation=implementation
        )
        live = (jnp.arange(scores.shape[-1]) * page_size < lengths[:, None])[:, None]
        mass = jnp.where(live, jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1), 0)
        return mass.reshape(len(q), bounds_of(meta).shape[-3], -1, mass.shape[-1]).mean(axis=2)

    def select(self, scores: Float[Array, "B lists P"], lengths: Int[Array, "B"], page_size: int) -> Selection:
        """Takes pages until their mass is enough."""
        page, used = jnp.arange(scores.shape[-1]), -(-lengths // page_size)
        live = (page < used[:, None])[:, None]
        forced = ((page == 0) | (page == (used - 1)[:, None]))[:, None] & live
        # A mass is at most 1: what is forced stands in front, and counts with its own.
        ranking = jnp.where(live, scores + 2.0 * forced, -jnp.inf)
        width = min(self.budget // page_size, scores.shape[-1])
        mass = lax.top_k(ranking, width)[0]
        mass = jnp.where(mass >= 2, mass - 2, jnp.maximum(mass, 0))
        reached = jnp.cumsum(mass, axis=-1) - mass  # by the pages before each
        counts = (reached < self.p).sum(axis=-1)
        counts = jnp.clip(jnp.maximum(counts, forced.sum(axis=-1)), 0, jnp.minimum(used, width)[:, None])
        return best(ranking, counts, width)


METHODS = (
    Method(
        "top_p", TopP, ("decode",), "1 / S + at most B / L",
        "as many of Quest's pages as hold an estimated 90 % of the attention", exact=False,
    ),
)  # fmt: skip
