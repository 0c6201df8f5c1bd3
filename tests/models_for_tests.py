"""Tiny random models that the tests of generation share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.params import Params, random_params

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=48, intermediate_size=64, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16,
    max_positions=4096, rope=RopeConfig(theta=10000.0), eos_token_ids=(), bos_token_id=None,
)  # fmt: skip
# Two dense layers and one that selects take three quarters of the time to compile; where layers are told apart, or hand
# on what they chose, two select.
DEEP = dataclasses.replace(CONFIG, n_layers=4)

# Weights as trained ones are in size: attention has peaks, and logits (standard deviation about 3) have margins.
SCALE = {"embed": 20, "lm_head": 23, "qkv": 8, "out": 8, "gate_up": 8, "down": 8}


@functools.cache
def tiny(dtype=jnp.float32, config=CONFIG) -> Params:
    """A random model whose choices have margins; in every dtype the same one, rounded."""
    params = random_params(config, seed=0)
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, w: (w * SCALE.get(path[-1].key, 1)).astype(dtype), params.weights
    )
    return params.replace(weights=scaled)


def deep() -> Params:
    """The same with a layer more that selects."""
    return tiny(config=DEEP)
