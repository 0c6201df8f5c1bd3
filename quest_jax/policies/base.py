"""What a method of page selection is."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Selection(NamedTuple):
    """Pages to read.

    Attributes:
      pages: int32 ``[B, lists, N]``, logical pages in ascending order; past ``counts`` in range but not to be read.
        ``lists`` is K when the group of a KV head shares its list, H when every query head has its own.
      counts: int32 ``[B, lists]``, how many of the N are live.
    """

    pages: Int[Array, "B lists N"]
    counts: Int[Array, "B lists"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Chooses the pages that a query reads. Frozen and hashable: a static argument under ``jit``.

    A method is a subclass in a file of its own with :meth:`score` and :meth:`select`, and with :meth:`is_dense` where
    some layers or caches are read whole.
    """

    def is_dense(self, layer: int, pages: int, page_size: int) -> bool:
        """Says, before tracing, whether ``layer`` reads all of a cache of ``pages`` pages, unscored."""
        del layer, pages, page_size
        return False

    def check(self, page_size: int) -> None:
        """Raises ValueError when the method cannot work with pages of this size."""
        del page_size

    def score(
        self,
        q: Float[Array, "B H D"],
        meta: Float[Array, "B K P D2"],
        lengths: Int[Array, "B"],
        page_size: int,
        implementation: str | None,
    ) -> Float[Array, "B lists P"]:
        """Ranks pages for one query token per row; float32, ``-inf`` past the length."""
        raise NotImplementedError(f"{type(self).__name__} does not score pages; a policy defines score and select.")

    def select(self, scores: Float[Array, "B lists P"], lengths: Int[Array, "B"], page_size: int) -> Selection:
        """Picks pages by their scores."""
        raise NotImplementedError(f"{type(self).__name__} does not select pages; a policy defines score and select.")


@dataclasses.dataclass(frozen=True)
class Dense(Policy):
    """Reads the whole cache: ordinary attention, the baseline of everything."""

    def is_dense(self, layer: int, pages: int, page_size: int) -> bool:
        """Always."""
        del layer, pages, page_size
        return True
