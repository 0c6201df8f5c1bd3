"""Quest with one virtual token for every page that is not read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.policies.base import LayerView, Selection, Sizes
from quest_jax.policies.lists import marked
from quest_jax.policies.method import Method
from quest_jax.policies.page_memory import Pages, Real, rewrite
from quest_jax.policies.quest import Quest


@dataclasses.dataclass(frozen=True)
class Compensated(Quest):
    r"""Reads Quest's pages, and of every other page the mean of its keys and values as if it were one token.

    A page of n tokens with mean key :math:`\mu` and mean value :math:`\nu` takes part with the logit
    :math:`q \cdot \mu / \sqrt D + \log n`, by Jensen's inequality never more than its tokens have together, and brings
    :math:`\nu`. Reads ``1 / S`` of the cache more than Quest.

    Attributes: those of :class:`~quest_jax.policies.quest.Quest`; one level only.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.block_pages is not None:
            raise ValueError(
                "Compensated: expected block_pages None, since it reads the means of every page, got "
                f"{self.block_pages}."
            )

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A page's min and max, and the means of its keys and values."""
        return super().scored_nbytes(head_dim, itemsize, metadata) + 2 * head_dim * itemsize

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """The sums of the keys and values of every page, float32 ``[B, K, P, 2 D]``."""
        del layer
        return jnp.zeros((sizes.rows, sizes.kv_heads, sizes.pages, 2 * sizes.head_dim), jnp.float32)

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Makes the sums of the pages that were written to."""
        del v

        def sums(keys: Pages, values: Pages, real: Real) -> Float[Array, "B K n width"]:
            return jnp.where(real, jnp.concatenate([keys, values], axis=-1), 0).sum(axis=-2)

        return rewrite(view.memory, k, view, sums)

    def beside(
        self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection, lse: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]] | None:
        """The pages that are not read, each as one token."""
        del lse
        heads, width = q.shape[2:]
        kv_heads, listed = view.memory.shape[1], marked(selection, view.pages_per_row)
        page = jnp.arange(view.pages_per_row)
        count = jnp.clip(view.lengths[:, None] - page * view.page_size, 0, view.page_size)  # [B, P]
        listed = jnp.repeat(listed, heads // listed.shape[1], axis=1)  # [B, H, P]
        means = view.memory / jnp.maximum(count, 1)[:, None, :, None]
        keys, values = jnp.split(jnp.repeat(means, heads // kv_heads, axis=1), 2, axis=-1)
        exact = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bhd,bhpd->bhp", q[:, 0].astype(jnp.float32), keys, precision=exact) * width**-0.5
        unread = ~listed & (count > 0)[:, None]
        scores = jnp.where(unread, scores + jnp.log(jnp.maximum(count, 1))[:, None], -jnp.inf)
        sums = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.where(unread, jnp.exp(scores - jnp.where(jnp.isneginf(sums), 0, sums)[..., None]), 0)
        return jnp.einsum("bhp,bhpd->bhd", weights, values, precision=exact)[:, None], sums[:, None]


METHODS = (
    Method(
        "quest_compensated", lambda budget: Compensated(budget, reduce="mean"), ("decode",), "2 / S + B / L",
        "`quest_mean`, and every page that is not read as one token: its mean key and value",
    ),
)  # fmt: skip
