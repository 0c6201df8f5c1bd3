"""SparQ: a few channels of the query tell which keys matter (Ribar et al., arXiv 2312.04985)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Selection, Sizes
from quest_jax.policies.exact import logits
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method
from quest_jax.policies.ranking import largest


@dataclasses.dataclass(frozen=True)
class SparQ(ListPolicy):
    r"""Top tokens by the product of the query's largest channels, and the mean value for the rest.

    Of a KV head's group the ``channels`` with the largest :math:`\sum_h |q_h|` are kept, :math:`\hat q_h`; a token
    scores :math:`\sum_h s_{h,j}` with :math:`s_{h,j} = \hat q_h \cdot k_j / \sqrt{D |\hat q_h|_1 / |q_h|_1}`. The last
    ``recent`` ones are always read. With :math:`\alpha_h` the share of :math:`\mathrm{softmax}(s_h)` that was read, the
    output is :math:`\alpha_h` times attention over it, and :math:`1 - \alpha_h` times the mean of all values so far. A
    step reads ``channels / 2 D`` of the cache to choose (where keys are kept by channel too; here it reads them whole,
    and counts the channels), and ``budget / L`` to attend.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`; tokens only.
      channels: how many of a query count.
      recent: tokens at the end that are always read, within the budget; None: an eighth of it.
      mean_value: add the mean of the values for what is not read.
    """

    channels: int = 16
    recent: int | None = None
    mean_value: bool = True

    copies_keys: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "token":
            raise ValueError(f"SparQ: expected granularity 'token', got {self.granularity!r}.")
        for name, least in (("channels", 1), ("recent", 0)):
            value = getattr(self, name)
            if (name, value) == ("recent", None):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"SparQ: expected {name} to be an integer, got {value!r}.")
            if value < least:
                raise ValueError(f"SparQ: expected {name} to be at least {least}, got {value}.")
        if (self.recent or 0) > self.budget:
            raise ValueError(f"SparQ: expected recent within the budget of {self.budget} tokens, got {self.recent}.")

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Every key."""
        del starts, pages, page_size
        return lengths

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """The channels of a key that count."""
        del metadata
        return min(self.channels, head_dim) * itemsize

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """The sum of the values, ``[B, K, D]``."""
        del layer
        shape = sizes.rows, sizes.kv_heads, sizes.head_dim
        return jnp.zeros(shape, jnp.float32) if self.mean_value else None

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Adds the new values."""
        del k
        real = (view.starts[:, None] + jnp.arange(v.shape[1]) < view.lengths[:, None])[..., None, None]
        return view.memory + jnp.where(real, v.astype(jnp.float32), 0).sum(axis=1)

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """The estimated logits, summed over the group; of recent tokens infinity."""
        estimate = self._estimate(q, view).sum(axis=2)
        recent = self.budget // 8 if self.recent is None else self.recent
        last = jnp.arange(view.capacity) >= (view.lengths - recent)[:, None]
        return jnp.where(last[:, None], jnp.inf, estimate)

    def _estimate(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B K G L"]:
        """Logits of the channels that count, with SparQ's temperature."""
        rows, heads, width = q.shape
        kv_heads = pool_shape(view.kv).kv_heads
        size = jnp.abs(q.astype(jnp.float32)).reshape(rows, kv_heads, -1, width)
        kept = largest(size.sum(axis=2), min(self.channels, width))
        counts = jnp.zeros((rows, kv_heads, width), bool)
        counts = counts.at[jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None], kept].set(True)[:, :, None]
        few = jnp.where(counts, q.reshape(size.shape), 0).reshape(rows, 1, heads, width)
        share = jnp.where(counts, size, 0).sum(axis=-1) / jnp.maximum(size.sum(axis=-1), 1e-30)
        exact = logits(few, (view.lengths - 1)[:, None], view)[:, :, :, 0]
        return exact / jnp.sqrt(jnp.maximum(share, 1e-30))[..., None]

    def beside(
        self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection, lse: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]] | None:
        """The mean value, with the weight that is estimated to be missing."""
        if not self.mean_value:
            return None
        shares = jax.nn.softmax(self._estimate(q[:, 0], view), axis=-1)  # [B, K, G, L]
        live = jnp.arange(selection.pages.shape[-1]) < selection.counts[..., None]
        read = jnp.take_along_axis(shares, selection.pages[:, :, None], axis=-1)
        alpha = jnp.where(live[:, :, None], read, 0).sum(axis=-1).reshape(lse.shape)  # [B, 1, H]
        rest = jnp.where(view.lengths[:, None, None] > self.budget, jnp.clip(1 - alpha, 0, 1), 0)
        mean = view.memory / jnp.maximum(view.lengths, 1)[:, None, None]
        mean = jnp.repeat(mean, q.shape[2] // mean.shape[1], axis=1)[:, None]
        return mean, lse + jnp.log(rest) - jnp.log(jnp.maximum(alpha, 1e-30))


METHODS = (
    Method(
        "sparq", SparQ, ("decode",), "16 / (2 D) + B / L",
        "[SparQ](https://arxiv.org/abs/2312.04985): 16 channels of the query choose, the mean value for the rest",
    ),
)  # fmt: skip
