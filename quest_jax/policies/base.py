"""What a method of selection is: given queries and one layer's cache, the pages or tokens that attention reads."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from quest_jax.models.config import LlamaConfig
from quest_jax.pallas_kernels.metadata import BlockMetadata, Kind, Metadata, bounds_of, metadata_nbytes
from quest_jax.pallas_kernels.pages import KV, pool_shape


class LayerView(NamedTuple):
    """One layer's cache as a policy sees it, the new tokens already written.

    Attributes:
      kv: pool of pages, see :mod:`quest_jax.pallas_kernels.pages`.
      meta: ``[min | max]`` of each page's keys.
      norms: inverse key norms of every token, or None where no policy of the state asked for them.
      starts: int32 ``[B]``, position of the first query, and how many tokens are past.
      lengths: int32 ``[B]``, tokens in each row, the queries' own included.
      page_table: logical to pool page; None is the identity.
      blocks: the same as ``meta`` of each block of pages, or None where no policy of the state asked for it.
      memory: what the decoding policy keeps of this layer besides, see :meth:`Policy.new_memory`; None: nothing.
      carry: what the decoding policy was handed, see :meth:`Policy.new_carry`; None: nothing.
    """

    kv: KV
    meta: Metadata
    norms: Float[Array, "B K L"] | None
    starts: Int[Array, "B"]
    lengths: Int[Array, "B"]
    page_table: Int[Array, "B P"] | None
    blocks: BlockMetadata | None = None
    memory: Any = None
    carry: Any = None

    @property
    def page_size(self) -> int:
        """[S] tokens of a page."""
        return pool_shape(self.kv).page_size

    @property
    def pages_per_row(self) -> int:
        """[P] pages that a row can have."""
        return bounds_of(self.meta).shape[-2]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.pages_per_row * self.page_size


class Sizes(NamedTuple):
    """What a policy's memory of one layer is made for.

    Attributes:
      rows: [B] of the batch.
      kv_heads: [K].
      head_dim: [D] of the model.
      pages: [P] that a row can have.
      page_size: [S] tokens of a page.
      heads: [H] query heads; None where the maker of the state did not say.
      layers: of the model.
    """

    rows: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    heads: int | None = None
    layers: int = 1


class Selection(NamedTuple):
    """Pages to read, or tokens, where the policy lists those (:meth:`Policy.unit`): a token is a page of one.

    Attributes:
      pages: int32 ``[B, lists, N]``, logical pages in ascending order; past ``counts`` in range but not to be read.
        ``lists`` is K when the group of a KV head shares its list, H when every query head has its own.
      counts: int32 ``[B, lists]``, how many of the N are live.
    """

    pages: Int[Array, "B lists N"]
    counts: Int[Array, "B lists"]


class Missed(NamedTuple):
    """Upper bounds of what a step lost by not reading everything, of the query head that may have lost most.

    Attributes:
      mass: float32, of the share of dense attention's weight on tokens that were not read.
      output: float32, of the 2-norm of the difference between dense attention's output and the one of what was read.
    """

    mass: Float[Array, "*steps B"]
    output: Float[Array, "*steps B"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Chooses what the queries of a step read. Frozen and hashable: a static argument under ``jit``.

    A method is a subclass in a file of its own: of :class:`PagePolicy` where it ranks pages by their metadata, else of
    this with :meth:`choose`. It lists in ascending order, nothing twice, all that is to be read: the current page or
    the chunk's tokens too (attention sees to causality). :meth:`unit` says whether pages or tokens are listed. A field
    ``chunk`` is the size of its prefill steps.

    Attributes:
      prefills: True in a class whose :meth:`choose` serves the many queries of a chunk, so that it can read prompts.
      decodes: False in a class that serves nothing else.
      copies_keys: True in a class that computes with a copy of a row's keys, for which the plan then has room.
      watches: True in a class whose :meth:`observe` computes with the weights of all queries, likewise.
      grows: True in a class whose lists grow past ``budget`` with what is decoded, likewise.
      carries_by_layer: True in a class whose carry stays in a layer, from step to step; else one goes from layer to
        layer, see :meth:`new_carry`.
      diagnoses: True in a class that has :meth:`diagnose`, whose bounds are then kept with what is counted.
    """

    prefills: ClassVar[bool] = False
    decodes: ClassVar[bool] = True
    copies_keys: ClassVar[bool] = False
    watches: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    carries_by_layer: ClassVar[bool] = False
    diagnoses: ClassVar[bool] = False

    @property
    def needs_norms(self) -> bool:
        """Whether it reads the inverse key norms, which the cache then keeps."""
        return False

    @property
    def needs_blocks(self) -> int | None:
        """Pages of a block whose min and max it reads, which the cache then keeps; None: of no block."""
        return None

    @property
    def adds_own(self) -> bool:
        """Whether a query attends to its own token even where that is not selected."""
        return False

    @property
    def chooses_for_others(self) -> bool:
        """Whether later layers depend on what this one hands on: then it scores even where it reads everything."""
        return False

    def fitted(self, config: LlamaConfig) -> "Policy":
        """The same for one model: called where policies and weights meet. Itself, unless it depends on the model.

        Raises:
          ValueError, NotImplementedError: it cannot work with this model.
        """
        del config
        return self

    def at(self, layer: int, layers: int) -> "Policy":
        """What acts in ``layer`` of ``layers``: itself, unless its layers differ. Equal ones share one program."""
        del layer, layers
        return self

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """Says, while tracing, by shapes alone, whether ``layer`` always reads every row whole, unscored."""
        del layer, view
        return False

    def covers(self, view: LayerView) -> Bool[Array, "B"] | None:
        """Says, while running, which rows this step reads whole, unscored; None: none, and no branch."""
        del view
        return None

    def reuses(self, view: LayerView) -> Bool[Array, "B"] | None:
        """Says, while running, which rows :meth:`choose` lists by the carry, unscored; None: none."""
        del view
        return None

    def check(self, page_size: int) -> None:
        """Raises ValueError when the method cannot work with pages of this size."""
        del page_size

    def unit(self, page_size: int) -> int:
        """Tokens of what a selection lists: ``page_size``, or 1 where tokens are listed."""
        return page_size

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Counts what :meth:`choose` scores per KV head in a cache of ``pages``: pages, unless it says otherwise."""
        del starts, pages
        return -(-lengths // page_size)

    def scored_in(self, view: LayerView) -> Int[Array, "B"]:
        """The same of a layer's cache, where a method that scores things of several sizes can count bytes of them."""
        return self.scored(view.starts, view.lengths, view.pages_per_row, view.page_size)

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """Bytes that scoring one of these reads, of keys of ``itemsize`` bytes a channel: a page's min and max."""
        del itemsize
        return metadata_nbytes(head_dim, metadata)

    @property
    def remembers(self) -> bool:
        """Whether it keeps a memory."""
        return self.new_memory(0, Sizes(1, 1, 1, 1, 1, heads=1)) is not None

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps anything of a prompt beside pages and their metadata: others' states do not serve it."""
        return self.remembers or self.needs_norms or self.needs_blocks is not None

    @property
    def prompt_queries(self) -> int:
        """The last queries of a prompt that it chooses by at the prompt's end; the plan has room for their weights."""
        return 0

    def continues(self, other: "Policy") -> bool:
        """Whether it can go on with the memory that ``other`` kept: of the same class, unless the method says more."""
        return type(self) is type(other)

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """What a decoding policy keeps of a layer besides its cache, from the first token of the prompt on.

        Returns a pytree of arrays for rows without tokens, or None: nothing, which is the default. What reading a
        prompt makes of it must not depend on a budget: one prompt serves a method at all of them.
        """
        del layer, sizes

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """The memory after the tokens ``k, v`` were written, before anything is chosen. Unchanged by default."""
        del k, v
        return view.memory

    def observe(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Any:
        """The memory after ``q`` attended, in reading prompts too. Unchanged by default.

        Args:
          q: as for :meth:`choose`.
          view: the layer's cache and memory.
          seen: the tokens that were read; None: all. Where every query head has its own list, those of any head.
          lse: logarithm of the sum of the exponentials of what was attended; with ``exact.logits`` and ``seen`` it
            gives the weights again, at the cost of reading those keys once more.
        """
        del q, seen, lse
        return view.memory

    @property
    def carries(self) -> bool:
        """Whether it has a carry."""
        return self.new_carry(1, 1, 1, 1) is not None

    def new_carry(self, rows: int, kv_heads: int, pages: int, page_size: int) -> Any:
        """What a decoding policy hands from layer to layer, or keeps in a layer from step to step.

        Unlike a memory it needs nothing of the prompt: a policy that replaces another begins with a new one.

        Returns a pytree of arrays ``[B, ...]``, or None: nothing, which is the default.
        """
        del rows, kv_heads, pages, page_size

    def carry_on(self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection | None) -> Any:
        """The carry after ``q`` attended; unchanged by default. Rows without a token keep theirs.

        Args:
          q: as for :meth:`choose`.
          view: the layer's cache, and the carry as this layer was handed it.
          selection: what was chosen; None: all was read.
        """
        del q, selection
        return view.carry

    def in_place(self, selection: Selection, view: LayerView) -> Selection:
        """Of what is chosen, what ordinary attention reads: all, unless :meth:`beside` brings the rest."""
        del view
        return selection

    def beside(
        self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection, lse: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]] | None:
        """A second part of the softmax, for what is not read: its output, and its lse; None, the default: no such part.

        ``lse`` is that of what was read. The two parts are averaged by the exponentials of their lse.
        """
        del q, view, selection, lse

    def diagnose(
        self, q: Float[Array, "B 1 H D"], view: LayerView, selection: Selection, lse: Float[Array, "B 1 H"]
    ) -> Missed:
        """Bounds what a decode step lost that read ``selection``; ``lse`` is that of what was read.

        Asked only of a class that says ``diagnoses``.
        """
        raise NotImplementedError(f"{type(self).__name__} diagnoses nothing; see quest_jax.Diagnosed.")

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Selects what ``q``, the queries of the tokens from ``view.starts`` on, read.

        Args:
          q: rotated queries; those at or past ``view.lengths`` are padding.
          view: the layer's cache.
          implementation: of the ops.
        """
        raise NotImplementedError(f"{type(self).__name__} chooses nothing; a policy defines choose.")


@dataclasses.dataclass(frozen=True)
class PagePolicy(Policy):
    """A policy for decoding that ranks pages by their metadata: :meth:`score`, then :meth:`select`."""

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Scores and selects for one query token per row."""
        if q.shape[1] != 1:
            raise ValueError(f"{type(self).__name__}: expected one query token per row, got {q.shape[1]}.")
        scores = self.score(q[:, 0], view.meta, view.lengths, view.page_size, implementation)
        return self.select(scores, view.lengths, view.page_size)

    def score(
        self,
        q: Float[Array, "B H D"],
        meta: Metadata,
        lengths: Int[Array, "B"],
        page_size: int,
        implementation: str | None,
    ) -> Float[Array, "B lists P"]:
        """Ranks pages for one query token per row; float32, ``-inf`` past the length."""
        raise NotImplementedError(
            f"{type(self).__name__} does not score pages; a page policy defines score and select."
        )

    def select(self, scores: Float[Array, "B lists P"], lengths: Int[Array, "B"], page_size: int) -> Selection:
        """Picks pages by their scores."""
        raise NotImplementedError(
            f"{type(self).__name__} does not select pages; a page policy defines score and select."
        )


@dataclasses.dataclass(frozen=True)
class Dense(Policy):
    """Reads the whole cache: ordinary attention, the baseline of everything."""

    prefills: ClassVar[bool] = True

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """Always."""
        del layer, view
        return True


def by_row(rows: Bool[Array, "B"], one: Any, other: Any) -> Any:
    """Of two trees of arrays ``[B, ...]``, ``one`` in the rows where ``rows``, ``other`` in the others."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y), one, other)


def checked(policy: Policy | None, page_size: int, prefills: bool = False) -> Policy:
    """Returns ``policy``, :class:`Dense` for None.

    Raises:
      TypeError: no policy.
      ValueError: it cannot work with this page size, or not for prefill where ``prefills``.
    """
    policy = Dense() if policy is None else policy
    name = "prefill_policy" if prefills else "policy"
    if not isinstance(policy, Policy):
        raise TypeError(
            f"{name}: expected a quest_jax policy such as {'QuoKA' if prefills else 'Quest'}(budget=1024) or None, "
            f"got {policy!r}; quest_jax.methods()[name].make(budget) makes one by its name."
        )
    if prefills and not policy.prefills:
        raise ValueError(
            "prefill_policy: expected one that selects for the queries of a chunk (prefills = True), such as "
            f"QuoKA(budget=1024), got {policy!r}, which selects for one query; pass it as policy."
        )
    if not prefills and not policy.decodes:
        raise ValueError(
            f"policy: expected one that selects for one query, such as Quest(budget=1024), got {policy!r}, which reads "
            "prompts only; pass it as prefill_policy."
        )
    policy.check(page_size)
    return policy
