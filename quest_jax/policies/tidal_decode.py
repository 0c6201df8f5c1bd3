"""TidalDecode: exact top tokens in two layers, read by the layers after them (Yang et al., arXiv 2410.05076)."""

import dataclasses

from jaxtyping import Array, Float

from quest_jax.policies.base import LayerView
from quest_jax.policies.carried import CarriedPolicy
from quest_jax.policies.exact import mass
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class TidalDecode(CarriedPolicy):
    r"""Takes the tokens with most attention in a few layers; the layers after those read the same.

    A layer that chooses takes for each KV head the ``budget`` tokens of largest
    :math:`\sum_h \mathrm{softmax}_j(q_h \cdot k_j / \sqrt D)`, the current one among them. The sum runs over the query
    heads of the KV head: the paper's models without grouped heads have one each, its program lists by query head. What
    it reads: see :class:`~quest_jax.policies.carried.CarriedPolicy`.

    Attributes:
      budget, dense_layers, selecting, role: see there.
    """

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B K L"]:
        """The mass of every token."""
        return mass(q[:, None], view)


METHODS = (
    Method(
        "tidal_decode", TidalDecode, ("decode",), "B / L, but 3 / 2 in the two layers that choose",
        "[TidalDecode](https://arxiv.org/abs/2410.05076): two layers choose, the layers after them read the same",
    ),
)  # fmt: skip
