"""Policies that drop tokens for good: by a mask of the cache, or, compact, out of the cache."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.policies.base import LayerView, Selection, Sizes
from quest_jax.policies.compact import is_compact, positions
from quest_jax.policies.lists import ListPolicy, best, marked


@dataclasses.dataclass(frozen=True)
class EvictingPolicy(ListPolicy):
    """A :class:`~quest_jax.policies.lists.ListPolicy` of tokens that never reads again what one step has left out.

    The prompt is attended by ``prefill_policy``, all of it unless told otherwise, and watched. From the first decode
    step on a row reads at most ``budget`` tokens: those that are alive and rank best, and the new one. What is left out
    is dead. The cache keeps it, which is for measuring what a method keeps; :func:`quest_jax.compact` frees it, and the
    tokens that are generated stay the same.

    A subclass has :meth:`rank`, and where it says ``watches`` :meth:`watch`, which reads every attended key once more.
    Both speak of slots ``L``: :func:`~quest_jax.policies.compact.positions` says where the tokens in them stand. A
    memory of more than ``alive`` and ``watched`` cannot become compact, unless the rest is for the first step
    (``forgets``).

    Attributes:
      budget, granularity, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`; tokens only.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "token":
            raise ValueError(f"{type(self).__name__}: expected granularity 'token', got {self.granularity!r}.")

    @property
    def drops(self) -> bool:
        """For good."""
        return True

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers; another budget may have buried tokens before this one."""
        del view
        return layer < self.dense_layers

    def available(self, view: LayerView) -> Int[Array, "B #lists"]:
        """Those that are alive."""
        return self.real(view).sum(axis=-1)

    def real(self, view: LayerView) -> Bool[Array, "B K L"]:
        """The slots that hold a token that is alive."""
        return view.memory["alive"] & (positions(view) < view.lengths[:, None, None])

    def kept(self, view: LayerView) -> Bool[Array, "B K L"]:
        """What is alive; of a row that has not been cut, what ranks best."""
        real = self.real(view)
        rank = self.rank(view._replace(starts=view.lengths))
        cut = best(jnp.where(real, rank, -jnp.inf), jnp.minimum(real.sum(axis=-1), self.budget), self.budget)
        return jnp.where(self.settled(view)[:, None, None], real, marked(cut, view.capacity))

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """The new token, and of those that are alive the best; of equal ones the earlier."""
        if not is_compact(view.memory):
            return super().choose(q, view, implementation)
        at = positions(view)
        rank = jnp.where(at == (view.lengths - 1)[:, None, None], jnp.inf, self.rank(view))
        order = jnp.argsort(at, axis=-1)  # a slot is no place in the text
        rank = jnp.take_along_axis(jnp.where(self.real(view), rank, -jnp.inf), order, axis=-1)
        counts = jnp.minimum(self.available(view), self.budget)
        taken = best(rank, counts, min(self.budget, view.capacity)).pages
        live = jnp.arange(taken.shape[-1]) < counts[..., None]
        slots = jnp.where(live, jnp.take_along_axis(order, taken, axis=-1), view.capacity)
        return Selection(jnp.minimum(jnp.sort(slots, axis=-1), view.capacity - 1), counts)

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """The keys that are attended, once more, where the method watches."""
        if not self.watches:
            return super().scored(starts, lengths, pages, page_size)
        return jnp.minimum(lengths, self.budget)

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A key."""
        del metadata
        return head_dim * itemsize

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """``alive`` ``[B, K, L]``, and ``watched``, a float32 number for every token."""
        del layer
        tokens = sizes.rows, sizes.kv_heads, sizes.pages * sizes.page_size
        memory = {"alive": jnp.ones(tokens, bool)}
        return memory | {"watched": jnp.zeros(tokens, jnp.float32)} if self.watches else memory

    def observe(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Any:
        """Buries what was not read, and lets the method watch."""
        memory = dict(view.memory)
        if seen is not None and q.shape[1] == 1:
            new = positions(view) >= view.starts[:, None, None]
            active = (view.lengths > view.starts)[:, None, None]
            memory["alive"] &= seen | new | ~active
        if self.watches:
            memory["watched"] = self.watch(q, view, seen, lse)
        return memory

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """The rank of what is alive."""
        del q
        return jnp.where(view.memory["alive"], self.rank(view), -jnp.inf)

    def rank(self, view: LayerView) -> Float[Array, "B K L"]:
        """What to keep first."""
        raise NotImplementedError(f"{type(self).__name__} does not rank; a policy that evicts defines rank.")

    def watch(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Float[Array, "B K L"]:
        """``watched`` after these queries."""
        raise NotImplementedError(f"{type(self).__name__} does not watch; a policy that watches defines watch.")
