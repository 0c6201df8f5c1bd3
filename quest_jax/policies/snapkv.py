"""SnapKV: the end of a prompt chooses, once, what is kept of it (Li et al., arXiv 2404.14469)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from quest_jax.policies.base import LayerView, Policy, Selection, Sizes
from quest_jax.policies.compact import is_compact
from quest_jax.policies.evicting import EvictingPolicy
from quest_jax.policies.exact import logits_of_row
from quest_jax.policies.lists import best, everything
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class SnapKV(EvictingPolicy):
    r"""Keeps of a prompt its last ``window`` tokens, and those before that their queries look at most, smoothed.

    With :math:`a_{h,t,j}` the causal attention of the prompt's last w queries over the prompt, a token before them has

    .. math:: \sum_h \mathrm{pool}_j \Big( \sum_{t > n - w} a_{h,t,j} \Big)

    ``budget - window`` of these are kept, and the window. The paper keeps a list per query head; here the heads of a KV
    head share one, by their sum. The first decode step ends a prompt: it reads all keys once to choose. Every later
    token is kept: those decoded, a question read by ``feed_tokens``, and a further chunk of several tokens, which the
    prefill policy attends to everything for, dead tokens too, and after which nothing is chosen anew. A step reads
    ``(budget + new tokens) / L``. The memory is the last queries, ``4 window H D`` bytes a row; it needs ``n_heads`` of
    :func:`~quest_jax.attention.init_attention`.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.evicting.EvictingPolicy`; of the prompt.
      window: queries that choose; None: 32, or half of a smaller budget.
      kernel: tokens that are pooled, an odd number.
      pool: their mean, ``avg``, or ``max``.
    """

    window: int | None = None
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"

    copies_keys: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    forgets: ClassVar[tuple[str, ...]] = ("queries", "cut")

    def __post_init__(self):
        super().__post_init__()
        for name, value in (("window", self.prompt_queries), ("kernel", self.kernel)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"SnapKV: expected {name} to be an integer, got {value!r}.")
        if not 1 <= self.prompt_queries <= self.budget:
            raise ValueError(f"SnapKV: expected a window of 1 to {self.budget} tokens, the budget, got {self.window}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"SnapKV: expected kernel to be odd and at least 1, got {self.kernel}.")
        if self.pool not in ("avg", "max"):
            raise ValueError(f"SnapKV: expected pool 'avg' or 'max', got {self.pool!r}.")

    @property
    def prompt_queries(self) -> int:
        """The window."""
        return min(32, max(1, self.budget // 2)) if self.window is None else self.window

    def continues(self, other: Policy) -> bool:
        """With queries of the same window."""
        return isinstance(other, SnapKV) and self.prompt_queries == other.prompt_queries

    def settled(self, view: LayerView) -> Bool[Array, "B"]:
        """Those that were cut, and those with nothing to cut."""
        return view.memory["cut"] | (view.lengths <= self.budget)

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """``alive``; the last ``queries`` ``[B, window, H, D]``; and which rows are ``cut`` to the budget, ``[B]``."""
        if sizes.heads is None:
            raise ValueError("SnapKV: keeps queries, expected their number of heads; pass n_heads to init_attention.")
        queries = jnp.zeros((sizes.rows, self.prompt_queries, sizes.heads, sizes.head_dim), jnp.float32)
        return super().new_memory(layer, sizes) | {"queries": queries, "cut": jnp.zeros(sizes.rows, bool)}

    def observe(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Any:
        """Keeps the last queries of a prompt; after a step that chose, buries what it left out."""
        memory = super().observe(q, view, seen, lse)
        if is_compact(memory):
            return memory
        if seen is not None and q.shape[1] == 1:
            return memory | {"cut": memory["cut"] | (view.lengths > view.starts)}
        every = jnp.concatenate([memory["queries"], q.astype(jnp.float32)], axis=1)
        last = (view.lengths - view.starts)[:, None] + jnp.arange(self.prompt_queries)
        return memory | {"queries": jnp.take_along_axis(every, last[..., None, None], axis=1)}

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """What is alive; in the first step, of the prompt the best of ``budget``, and the new token."""
        del implementation
        if q.shape[1] != 1:
            raise ValueError(f"SnapKV: expected one query token per row, got {q.shape[1]}.")
        if is_compact(view.memory):
            return everything(self.real(view), view.capacity)
        cut, alive, new = view.memory["cut"], view.memory["alive"], view.lengths - view.starts
        nothing = jnp.zeros(alive.shape, jnp.float32)
        rank = lax.cond((~cut & (new > 0)).any(), lambda: self.rank(view), lambda: nothing)
        place = jnp.arange(view.capacity)
        rank = jnp.where(alive & (place < view.lengths[:, None, None]), rank, -jnp.inf)
        first = jnp.minimum(view.starts, self.budget) + new
        return best(rank, jnp.where(cut[:, None], self.available(view), first[:, None]), view.capacity)

    def rank(self, view: LayerView) -> Float[Array, "B K L"]:
        """The pooled weights of what lies before the window; in it infinity."""
        args = jnp.arange(len(view.starts)), view.memory["queries"], view.starts
        window = jnp.arange(view.capacity) >= (view.starts - self.prompt_queries)[:, None, None]
        return jnp.where(window, jnp.inf, lax.map(lambda one: self._rank_of_row(view, *one), args))

    def _rank_of_row(self, view: LayerView, row: Int[Array, ""], q: Float[Array, "w H D"], prompt: Int[Array, ""]):
        """[K, L]; queries of before the prompt's first token give nothing."""
        at = prompt - self.prompt_queries + jnp.arange(self.prompt_queries)
        scores = logits_of_row(view, row, q, at, prompt)  # [K, G, w, L]
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
        sums = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).sum(axis=2)
        sums = jnp.where(jnp.arange(view.capacity) < prompt - self.prompt_queries, sums, 0)
        join, share = (lax.add, self.kernel) if self.pool == "avg" else (lax.max, 1)
        return (lax.reduce_window(sums, 0.0, join, (1, 1, self.kernel), (1, 1, 1), "SAME") / share).sum(axis=1)


METHODS = (
    Method(
        "snapkv", SnapKV, ("decode",), "(B + new tokens) / L",
        "[SnapKV](https://arxiv.org/abs/2404.14469): of the prompt what its last queries look at", kind="evict",
    ),
)  # fmt: skip
