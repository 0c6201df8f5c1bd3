"""The tokens that hold most of the attention, found by computing all of it: what no method can beat in mass."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.policies.base import LayerView
from quest_jax.policies.exact import logits
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class Oracle(ListPolicy):
    r"""Top tokens, or pages, by the attention they get: :math:`\sum_h \mathrm{softmax}_j(q_h \cdot k_j / \sqrt D)`.

    The sum runs over the query heads of a KV head, and over the tokens of a page. Reads every key to choose: half of
    what dense attention reads, and ``budget / L`` to attend. It is for comparing with, not for speed.

    Attributes:
      budget, granularity, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`.
    """

    copies_keys: ClassVar[bool] = True

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Every key."""
        del starts, pages, page_size
        return lengths

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A key."""
        del metadata
        return head_dim * itemsize

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """The mass of every token, or page."""
        at = (view.lengths - 1)[:, None]
        mass = jax.nn.softmax(logits(q[:, None], at, view), axis=-1)[:, :, :, 0].sum(axis=2)
        mass = jnp.where((jnp.arange(view.capacity) < view.lengths[:, None])[:, None], mass, 0)
        return mass.reshape(*mass.shape[:2], -1, self.unit(view.page_size)).sum(axis=-1)


METHODS = (
    Method("oracle", Oracle, ("decode",), "1 / 2 + B / L", "the ceiling in mass: the true attention, by tokens"),
    Method(
        "oracle_pages", lambda budget: Oracle(budget, granularity="page"), ("decode",), "1 / 2 + B / L",
        "the ceiling in mass, by pages",
    ),
)  # fmt: skip
