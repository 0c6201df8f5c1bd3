"""KeyDiff: the keys least like the others are kept (Park et al., arXiv 2504.15364)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels.append.norms import EPSILON
from quest_jax.policies.base import LayerView
from quest_jax.policies.evicting import EvictingPolicy
from quest_jax.policies.exact import keys_of
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class KeyDiff(EvictingPolicy):
    r"""Keeps the keys of lowest cosine to the mean of the normalised keys that are alive; no query is asked.

    .. math:: -\cos(k_j, \tfrac1n \sum_i k_i / |k_i|)

    A step reads the keys that are alive to rank them, and keys and values of ``budget`` tokens.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.evicting.EvictingPolicy`.
    """

    copies_keys: ClassVar[bool] = True

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """The keys that are alive: all of them before the first step, then the budget's and the new one."""
        del starts, pages, page_size
        return jnp.minimum(lengths, self.budget + 1)

    def rank(self, view: LayerView) -> Float[Array, "B K L"]:
        """Minus the cosine."""

        def one(args):
            row, real = args
            keys = jnp.where(real[..., None], keys_of(view, row).astype(jnp.float32), 0)  # [K, L, D]
            keys = keys / jnp.maximum(jnp.sqrt((keys * keys).sum(axis=-1, keepdims=True)), EPSILON)
            mean = keys.sum(axis=1) / jnp.maximum(real.sum(axis=-1), 1)[:, None]
            mean = mean / jnp.maximum(jnp.sqrt((mean * mean).sum(axis=-1, keepdims=True)), EPSILON)
            return -jnp.einsum("kld,kd->kl", keys, mean, precision=lax.Precision.HIGHEST)

        return lax.map(one, (jnp.arange(len(view.lengths)), self.real(view)))


METHODS = (
    Method(
        "keydiff", KeyDiff, ("decode",), "3 B / (2 L)",
        "[KeyDiff](https://arxiv.org/abs/2504.15364): the keys least like their mean", kind="evict",
    ),
)  # fmt: skip
