"""Twilight: many pages by Quest, of them as few as an estimate in 4 bits asks for (Lin et al., arXiv 2502.02770)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import Kind, metadata_kind, metadata_nbytes
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Policy, Selection, Sizes
from quest_jax.policies.four_bits import from_4_bits, to_4_bits
from quest_jax.policies.method import Method
from quest_jax.policies.quest import Quest
from quest_jax.policies.top_p import TopP

_LINE = 16  # bytes in which it counts what it scores


@dataclasses.dataclass(frozen=True)
class Twilight(Policy):
    r"""The fewest of Quest's pages that hold a share ``p`` of the attention by keys in 4 bits, at most the budget's.

    Quest, by its shrunk box, takes ``candidates`` pages for every page of the budget. Beside the cache every key is
    kept in 4 bits a channel with a step and an offset of its own. The candidates' tokens get
    :math:`\mathrm{softmax}_j(q \cdot \hat k_j / \sqrt D)` by these, per query head. A page's mass is the sum of its
    tokens', averaged over the heads of a group, and the pages of most mass are read until they have ``p``. The first
    page and the current one always are. The paper takes single tokens per query head, which here are pages per KV head.
    What Quest did not find is not in the estimate.

    A step reads ``1 / S`` of the cache and ``1 / 16 + 1 / D`` of the candidates to choose (twice that as a share of a
    bfloat16 cache), and at most ``budget / L`` to attend.

    Attributes:
      budget: tokens to read at most per KV head.
      p: share of the mass, in (0, 1].
      candidates: pages whose tokens are scored, for every page of the budget.
      beta: size of Quest's shrunk box.
      dense_layers: the first layers attend to everything.

    Raises:
      ValueError, TypeError: a value outside these, or at first use a budget below two pages.

    Every field is static: changing one recompiles.
    """

    budget: int
    p: float = 0.85
    candidates: int = 4
    beta: float = 0.5
    dense_layers: int = 2

    def __post_init__(self):
        for name, least in (("budget", 1), ("candidates", 1), ("dense_layers", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"Twilight: expected {name} to be an integer, got {value!r}.")
            if value < least:
                raise ValueError(f"Twilight: expected {name} to be at least {least}, got {value}.")
        for name in ("p", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"Twilight: expected {name} to be a number, got {value!r}.")
        if not 0 < self.p <= 1:
            raise ValueError(f"Twilight: expected p in (0, 1], a share of the attention, got {self.p}.")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"Twilight: expected beta in [0, 1], got {self.beta}.")

    def check(self, page_size: int) -> None:
        """Raises ValueError when the budget does not hold the first page and the current one."""
        if self.budget < 2 * page_size:
            raise ValueError(
                f"Twilight: expected a budget of at least two pages, {2 * page_size} tokens, got {self.budget}; "
                "raise the budget or take smaller pages (page_size=)."
            )

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers."""
        del view
        return layer < self.dense_layers

    def scored_in(self, view: LayerView) -> Int[Array, "B"]:
        """16 bytes each: the min and max of every page, and the candidates' keys in 4 bits."""
        key, size = view.memory[0].shape[-1] + 8, view.page_size
        used = -(-view.lengths // size)
        taken = view.lengths - jnp.maximum(used - self._pages_scored(size), 0) * size  # the last, partial page is one
        read = used * metadata_nbytes(pool_shape(view.kv).head_dim, metadata_kind(view.meta)) + taken * key
        return -(-read // _LINE)

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """16: see :meth:`scored_in`."""
        del head_dim, itemsize, metadata
        return _LINE

    def _pages_scored(self, page_size: int) -> int:
        return self.candidates * (self.budget // page_size)

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """Every key in 4 bits, uint8 ``[B, K, L, D / 2]``, and its step and least channel, float32 ``[B, K, L, 2]``."""
        del layer
        shape = sizes.rows, sizes.kv_heads, sizes.pages * sizes.page_size
        return jnp.zeros((*shape, -(-sizes.head_dim // 2)), jnp.uint8), jnp.zeros((*shape, 2), jnp.float32)

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Rounds the new keys."""
        del v
        at = view.starts[:, None] + jnp.arange(k.shape[1])
        at = jnp.where(at < view.lengths[:, None], at, view.capacity)[..., None]  # out of range: dropped
        where = jnp.arange(len(k))[:, None, None], jnp.arange(k.shape[2]), at
        return tuple(old.at[where].set(new, mode="drop") for old, new in zip(view.memory, to_4_bits(k), strict=True))

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Quest's candidates, then the pages of most mass among them."""
        size = view.page_size
        first = Quest(self._pages_scored(size) * size, beta=self.beta, reduce="mean")
        found = first.choose(q, view, implementation)
        rows, kv_heads, count = found.pages.shape
        flat = (jnp.arange(rows)[:, None] * kv_heads + jnp.arange(kv_heads))[
            ..., None
        ] * view.pages_per_row + found.pages
        codes, scales = (leaf.reshape(-1, size, leaf.shape[-1])[flat] for leaf in view.memory)  # [B, K, n, S, ..]
        keys = from_4_bits(codes, scales, q.shape[-1]).reshape(rows, kv_heads, count * size, -1)
        by_head = q[:, 0].astype(jnp.float32).reshape(rows, kv_heads, -1, q.shape[-1])
        logits = jnp.einsum("bkgd,bkld->bkgl", by_head, keys, precision=lax.Precision.HIGHEST) * q.shape[-1] ** -0.5
        place = found.pages[..., None] * size + jnp.arange(size)
        live = (jnp.arange(count) < found.counts[..., None])[..., None] & (place < view.lengths[:, None, None, None])
        live = live.reshape(rows, kv_heads, 1, -1)
        weights = jnp.where(live, jax.nn.softmax(jnp.where(live, logits, -jnp.inf), axis=-1), 0)
        mass = weights.mean(axis=2).reshape(rows, kv_heads, count, size).sum(axis=-1)
        at = jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None], found.pages
        # What is no candidate stands behind those that are, of which there are as many as can be read.
        scores = jnp.full((rows, kv_heads, view.pages_per_row), -1.0).at[at].max(jnp.where(mass > 0, mass, 0))
        return TopP(self.budget, p=self.p).select(scores, view.lengths, size)


METHODS = (
    Method(
        "twilight", Twilight, ("decode",), "1 / S + (1 / 4 + 4 / D) B / L + at most B / L",
        "[Twilight](https://arxiv.org/abs/2502.02770) by pages: of `quest_mean`'s of four budgets, those with 85 % of "
        "the attention by keys in 4 bits", exact=False,
    ),
)  # fmt: skip
