"""Tokens drawn blindly: what any method must beat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView
from quest_jax.policies.chunk_lists import ChunkListPolicy
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

    def score(self, q: Float[Array, "B *T H D"], view: LayerView) -> Float[Array, "B K N"]:
        """Uniform in [0, 1), for one query or those of a chunk."""
        kv_heads = pool_shape(view.kv).kv_heads
        own = q.astype(jnp.float32).reshape(len(q), -1, kv_heads, q.shape[-1] * q.shape[-2] // kv_heads)
        bits = lax.bitcast_convert_type(own, jnp.uint32)
        # Mixed by odd factors, so that no two channels cancel. What pads a chunk has no part in it.
        factors = 2 * jnp.arange(bits.shape[-1], dtype=jnp.uint32) + 1
        real = jnp.arange(bits.shape[1]) < (view.lengths - view.starts)[:, None]
        seeds = jnp.where(real[..., None, None], bits * factors, jnp.uint32(0)).sum(axis=(1, 3), dtype=jnp.uint32)
        room = view.capacity // self.unit(view.page_size)

        def draw(seed):
            return jax.random.uniform(jax.random.fold_in(jax.random.key(self.seed), seed), (room,))

        return jax.vmap(jax.vmap(draw))(seeds)


@dataclasses.dataclass(frozen=True)
class RandomChunk(ChunkListPolicy, Random):
    """Reads ``budget`` past tokens, each set of them equally likely, drawn anew for every chunk of a prompt.

    Attributes:
      budget, granularity, dense_layers, chunk: see :class:`~quest_jax.policies.chunk_lists.ChunkListPolicy`.
      seed: of the draws.
    """


METHODS = (
    Method("random", Random, ("decode",), "B / L", "the floor: tokens drawn anew by every query"),
    Method(
        "random_pages", lambda budget: Random(budget, granularity="page"), ("decode",), "B / L", "the floor, by pages"
    ),
    Method(
        "random_chunk", RandomChunk, ("prefill",), "(B + T) / L", "the floor: past tokens drawn anew by every chunk"
    ),
)
