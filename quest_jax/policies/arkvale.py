"""ArkVale: pages by the mean distance of their keys from the middle (Chen et al., NeurIPS 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.append.reference import min_max
from quest_jax.policies.base import LayerView, Selection
from quest_jax.policies.method import Method
from quest_jax.policies.page_memory import Pages, Real, Summarized


@dataclasses.dataclass(frozen=True)
class ArkVale(Summarized):
    r"""Quest with ArkVale's "cuboid-mean" for the box: as far out as the keys are on average, not at most.

    With :math:`c = (m + M) / 2`, the middle of a page's keys by channel, and :math:`r = \frac1n \sum_j |k_j - c|`,
    their mean distance from it by channel, a page scores :math:`q \cdot c + |q| \cdot r`. That is no bound. The centre
    is the middle of min and max, not the mean key, as in the authors' program. Theirs also moves pages to the host and
    back, which is not done here: all stay in memory. Reads to choose what Quest reads, ``1 / S`` of the cache (float32
    ``c - r`` and ``c + r`` of a page in the place of min and max), and ``budget / L`` to attend.

    Attributes: those of :class:`~quest_jax.policies.quest.Quest`; one level only. With ``ranking="shrunk_box"`` the
      cuboid is ``beta`` times as large.
    """

    def width(self, head_dim: int) -> int:
        """``c - r`` and ``c + r``."""
        return 2 * head_dim

    def summarize(self, keys: Pages, real: Real) -> Float[Array, "B K n width"]:
        """``c - r`` and ``c + r``."""
        low, high = min_max(keys, real)
        centre = (low + high) / 2
        away = jnp.where(real, jnp.abs(keys - centre[..., None, :]), 0).sum(axis=-2) / real.sum(axis=-2)
        return jnp.concatenate([centre - away, centre + away], axis=-1)

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """As Quest, of the cuboids."""
        return super().choose(q, view._replace(meta=view.memory), implementation)


METHODS = (
    Method(
        "arkvale", ArkVale, ("decode",), "1 / S + B / L",
        "[ArkVale](https://github.com/pku-liang/ArkVale)'s cuboid-mean: a box as large as the keys' mean distance from "
        "its middle",
    ),
)  # fmt: skip
