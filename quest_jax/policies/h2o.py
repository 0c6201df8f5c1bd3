"""H2O: the tokens that got most attention so far, and the last ones (Zhang et al., arXiv 2306.14048)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from quest_jax.policies.base import LayerView
from quest_jax.policies.compact import positions
from quest_jax.policies.evicting import EvictingPolicy
from quest_jax.policies.exact import column_mass
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class H2O(EvictingPolicy):
    r"""Keeps the last half of the budget, and of the others those of the largest sum of attention weights so far.

    A token's sum runs over all queries since it came, those of the prompt too, and over the query heads of a KV head:
    :math:`\sum_t \sum_h a_{h,t,j}`. Early tokens have been looked at by more queries, which the method leaves as it is.
    A step reads ``budget / L`` of the cache, and the keys it attended to once more, to have their weights.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.evicting.EvictingPolicy`.
    """

    watches: ClassVar[bool] = True
    copies_keys: ClassVar[bool] = True

    def rank(self, view: LayerView) -> Float[Array, "B K L"]:
        """The sum; of recent tokens infinity."""
        recent = positions(view) >= (view.lengths - self.budget // 2)[:, None, None]
        return jnp.where(recent, jnp.inf, view.memory["watched"])

    def watch(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Float[Array, "B K L"]:
        """Adds the weights of these queries."""
        return view.memory["watched"] + column_mass(q, view, seen, lse)


METHODS = (
    Method(
        "h2o", H2O, ("decode",), "3 B / (2 L)",
        "[H2O](https://arxiv.org/abs/2306.14048): largest sums, the last tokens", kind="evict",
    ),
)  # fmt: skip
