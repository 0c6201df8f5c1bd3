"""Tokens drawn blindly: what any method must beat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class Random(ListPolicy):
    """Reads the current token and ``budget - 1`` others, each set of them equally likely, drawn anew by every query.

    A draw is a function of ``seed`` and of the query's bits: it differs between steps, layers and heads, and a run
    repeats itself, alone or in a batch. Reads ``budget / L`` of the cache, and nothing to choose.

    Attributes:
      budget, granularity, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`.
      seed: of the draws.
    """

    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise ValueError(f"Random: expected seed to be an integer of at least 0, got {self.seed!r}.")

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """Uniform in [0, 1)."""
        kv_heads = pool_shape(view.kv).kv_heads
        own = q.astype(jnp.float32).reshape(len(q), kv_heads, -1)
        bits = lax.bitcast_convert_type(own, jnp.uint32)
        # Mixed by odd factors, so that no two channels cancel.
        factors = 2 * jnp.arange(bits.shape[-1], dtype=jnp.uint32) + 1
        seeds = (bits * factors).sum(axis=-1, dtype=jnp.uint32)
        room = view.capacity // self.unit(view.page_size)

        def draw(seed):
            return jax.random.uniform(jax.random.fold_in(jax.random.key(self.seed), seed), (room,))

        return jax.vmap(jax.vmap(draw))(seeds)


METHODS = (
    Method("random", Random, ("decode",), "B / L", "the floor: tokens drawn anew by every query"),
    Method(
        "random_pages", lambda budget: Random(budget, granularity="page"), ("decode",), "B / L", "the floor, by pages"
    ),
)
