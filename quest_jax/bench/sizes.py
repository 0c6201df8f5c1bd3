"""The shapes that are timed, and the bytes that a decode step over them must read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quest_jax.models.config import LlamaConfig
from quest_jax.params import Params
from quest_jax.policies.quest import Quest
from quest_jax.policies.two_level import block_count

SMOLLM2 = LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)


class Shape(NamedTuple):
    """Query heads, KV heads and head dim of a layer."""

    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {"smollm2": Shape(9, 3, 64), "llama-3-8b": Shape(32, 8, 128), "mha": Shape(32, 32, 128)}


def shape_of(config: LlamaConfig) -> Shape:
    """The layers' shape of a model."""
    return Shape(config.n_heads, config.n_kv_heads, config.head_dim)


def dense_bytes(shape: Shape, length: int, dtype: str) -> int:
    """Bytes of the keys and values of ``length`` tokens, in one layer."""
    return 2 * shape.kv_heads * length * shape.head_dim * jnp.dtype(dtype).itemsize


def metadata_bytes(shape: Shape, length: int, page_size: int = 16) -> int:
    """Bytes of the minimum and maximum of every page, in one layer: 2D float32 a page and KV head."""
    return shape.kv_heads * -(-length // page_size) * 2 * shape.head_dim * 4


def quest_bytes(shape: Shape, length: int, dtype: str, budget: int) -> int:
    """Bytes that Quest reads in one layer: all metadata, and ``budget`` tokens; within the budget what dense reads."""
    if length <= budget:
        return dense_bytes(shape, length, dtype)
    return metadata_bytes(shape, length) + dense_bytes(shape, budget, dtype)


def two_level_bytes(shape: Shape, length: int, dtype: str, policy: Quest, page_size: int = 16) -> int:
    """Bytes that Quest reads in one layer with two levels: all blocks, the candidates' pages, and ``budget`` tokens."""
    if policy.block_pages is None:
        raise ValueError("two_level_bytes: expected a policy with block_pages, got one level.")
    block_tokens = page_size * policy.block_pages
    taken = block_count(policy.budget, page_size, policy.block_pages, policy.candidates, policy.sink_pages)
    if -(-length // block_tokens) <= taken:
        return quest_bytes(shape, length, dtype, policy.budget)
    scored = metadata_bytes(shape, length, block_tokens) + metadata_bytes(shape, taken * block_tokens, page_size)
    return scored + dense_bytes(shape, policy.budget, dtype)


def step_bytes(params: Params, length: int, budget: int | None, dense_layers: int = 2) -> int:
    """Bytes that a whole decode step reads: every weight once, and the layers' keys, values and metadata.

    The first ``dense_layers`` read everything. An untied embedding is not counted: a step reads one row of it.
    """
    config, embedding = params.config, params.weights["embed"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    weights -= 0 if config.tie_word_embeddings else embedding.nbytes
    shape = shape_of(config)
    dtype = params.dtype.name
    dense = dense_bytes(shape, length, dtype)
    sparse = dense if budget is None else quest_bytes(shape, length, dtype, budget)
    whole = min(dense_layers, config.n_layers)
    return weights + whole * dense + (config.n_layers - whole) * sparse
