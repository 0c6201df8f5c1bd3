"""The tokens that hold most of the attention, found by computing all of it: what no method can beat in mass."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.policies.base import LayerView
from quest_jax.policies.chunk_lists import ChunkListPolicy
from quest_jax.policies.exact import mass
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

    def score(self, q: Float[Array, "B *T H D"], view: LayerView) -> Float[Array, "B K N"]:
        """The mass of every token, or page, for one query or those of a chunk."""
        found = mass(q.reshape(len(q), -1, *q.shape[-2:]), view)
        return found.reshape(*found.shape[:2], -1, self.unit(view.page_size)).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class OracleChunk(ChunkListPolicy, Oracle):
    r"""Top past tokens, or pages, by :math:`\sum_{h,t} \mathrm{softmax}_j(q_{h,t} \cdot k_j / \sqrt D)`, for a chunk.

    The sum runs over the queries of the chunk, too. No list of ``budget`` tokens for a whole chunk and group keeps more
    attention: what is lost beside it, the text loses. Reads every key to choose, with every query.

    Attributes:
      budget, granularity, dense_layers, chunk: see :class:`~quest_jax.policies.chunk_lists.ChunkListPolicy`.
    """

    @property
    def n_queries(self) -> int:
        """How many queries choose: all."""
        return self.chunk


METHODS = (
    Method("oracle", Oracle, ("decode",), "1 / 2 + B / L", "the ceiling in mass: the true attention, by tokens"),
    Method(
        "oracle_pages", lambda budget: Oracle(budget, granularity="page"), ("decode",), "1 / 2 + B / L",
        "the ceiling in mass, by pages",
    ),
    Method(
        "oracle_chunk", OracleChunk, ("prefill",), "1 / 2 + (B + T) / L",
        "the ceiling in mass of one list for a chunk: the true attention of all its queries",
    ),
)  # fmt: skip
