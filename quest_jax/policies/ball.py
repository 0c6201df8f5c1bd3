"""Pages by the ball around their mean key, in the place of Quest's box."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.policies.base import LayerView, Selection
from quest_jax.policies.method import Method
from quest_jax.policies.page_memory import Pages, Real, Summarized


@dataclasses.dataclass(frozen=True)
class Ball(Summarized):
    r"""Quest with a ball for the box: :math:`q \cdot c + |q| r`, which no ``q . k`` of the page exceeds.

    ``c`` is the page's mean key and ``r`` the largest distance of a key from it. It is kept in half of the bytes of a
    box, D + 1 float32 numbers a page: a step reads ``1 / 2 S`` of the cache to choose and ``budget / L`` to attend.
    ``with_box`` takes the smaller of this and Quest's bound, head by head, and reads both.

    Attributes: those of :class:`~quest_jax.policies.quest.Quest`; one level only. With ``ranking="shrunk_box"`` ball
      and box are ``beta`` times as large.
      with_box: the smaller of the two bounds.
    """

    with_box: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.with_box, bool):
            raise TypeError(f"Ball: expected with_box to be a bool, got {self.with_box!r}.")

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """Centre and radius, and where it takes the box too, min and max."""
        box = super(Summarized, self).scored_nbytes(head_dim, itemsize, metadata)
        return super().scored_nbytes(head_dim, itemsize, metadata) + box * self.with_box

    def width(self, head_dim: int) -> int:
        """Centre and radius."""
        return head_dim + 1

    def summarize(self, keys: Pages, real: Real) -> Float[Array, "B K n width"]:
        """Centre and radius."""
        centre = jnp.where(real, keys, 0).sum(axis=-2) / real.sum(axis=-2)
        away = jnp.where(real, keys - centre[..., None, :], 0)
        return jnp.concatenate([centre, jnp.linalg.norm(away, axis=-1).max(axis=-1)[..., None]], axis=-1)

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """As Quest, by the balls."""
        if q.shape[1] != 1:
            raise ValueError(f"Ball: expected one query token per row, got {q.shape[1]}.")
        rows, _, heads, width = q.shape
        centre, radius = view.memory[..., :width], view.memory[..., width]
        by_head = q[:, 0].astype(jnp.float32).reshape(rows, centre.shape[1], -1, width)
        middle = jnp.einsum("bkgd,bkpd->bkgp", by_head, centre, precision=lax.Precision.HIGHEST)
        around = jnp.linalg.norm(by_head, axis=-1)[..., None] * radius[:, :, None]
        scores = middle + self._box_size * around
        if self.with_box:
            box = page_scores(
                q[:, 0], view.meta, view.lengths, page_size=view.page_size, reduce="none", beta=self._box_size,
                implementation=implementation,
            )  # fmt: skip
            scores = jnp.minimum(scores, box.reshape(scores.shape))
        return self.select(self.agree(scores, width, view.lengths, view.page_size), view.lengths, view.page_size)


METHODS = (
    Method("ball", Ball, ("decode",), "1 / (2 S) + B / L", "ranked by a ball around the mean key: the bound it gives"),
    Method(
        "ball_box", lambda budget: Ball(budget, with_box=True), ("decode",), "3 / (2 S) + B / L",
        "the smaller of the bounds by ball and by box",
    ),
)  # fmt: skip
