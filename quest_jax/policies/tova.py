"""TOVA: what the last query looked at least is dropped (Oren et al., arXiv 2401.06104)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from quest_jax.policies.base import LayerView
from quest_jax.policies.evicting import EvictingPolicy
from quest_jax.policies.exact import column_mass
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class TOVA(EvictingPolicy):
    r"""Keeps the tokens with the largest attention weight of the last query, averaged over all heads of the layer.

    One set for all KV heads. Of a prompt its last query decides, at once; in decoding every step drops the token that
    the step before looked at least. A step reads ``budget / L`` of the cache, and the keys it attended to once more.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.evicting.EvictingPolicy`.
    """

    watches: ClassVar[bool] = True
    copies_keys: ClassVar[bool] = True

    def rank(self, view: LayerView) -> Float[Array, "B K L"]:
        """The weights."""
        return view.memory["watched"]

    def watch(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Float[Array, "B K L"]:
        """The weights of the last query, where there is one."""
        last = jnp.maximum(view.lengths - view.starts - 1, 0)[:, None]
        one = view._replace(starts=view.lengths - 1)
        q, lse = (jnp.take_along_axis(x, last.reshape(-1, *(1,) * (x.ndim - 1)), axis=1) for x in (q, lse))
        mass = column_mass(q, one, seen, lse).mean(axis=1, keepdims=True)
        active = (view.lengths > view.starts)[:, None, None]
        return jnp.where(active, mass, view.memory["watched"])


METHODS = (
    Method(
        "tova", TOVA, ("decode",), "3 B / (2 L)", "[TOVA](https://arxiv.org/abs/2401.06104): weights of the last query",
        kind="evict",
    ),
)  # fmt: skip
