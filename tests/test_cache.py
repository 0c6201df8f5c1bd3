"""The cache: sizes, capacity, memory accounting, and that a decode step of a whole model copies none of it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.cache import cache_nbytes, token_slots
from tests.models_for_tests import CONFIG, random_params, tiny


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize(("capacity", "page_size"), [(64, 16), (65, 16), (100, 7), (1, 1)])
def test_sizes(capacity, page_size, layout):
    cache = quest_jax.init_cache(3, 2, 8, batch=2, capacity=capacity, page_size=page_size, layout=layout)
    assert cache.page_size == page_size and cache.capacity >= capacity > cache.capacity - page_size
    assert cache.nbytes == cache_nbytes(3, 2, 8, batch=2, capacity=capacity, page_size=page_size)
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cache.kv, cache.meta))}) == 3 * (
        3 if layout == "split" else 2
    ), "a buffer shared by two layers could not be donated"


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("metadata", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_pages", [None, 2, 16])
def test_sizes_of_narrow_and_two_level_metadata(layout, metadata, block_pages):
    options = dict(batch=2, capacity=100, page_size=7, layout=layout, metadata=metadata, block_pages=block_pages)
    cache = quest_jax.init_cache(3, 2, 8, **options)
    assert cache.nbytes == cache_nbytes(3, 2, 8, **options)
    assert cache.pages_per_row == {None: 15, 2: 16, 16: 16}[block_pages] and cache.block_pages == block_pages
    plain = quest_jax.init_cache(3, 2, 8, batch=2, capacity=cache.capacity, page_size=7, layout=layout).nbytes
    one_level = {"float32": 64, "bfloat16": 32, "int8": 24}[metadata] * cache.pages_per_row
    two_levels = one_level * (1 + 1 / block_pages) if block_pages else one_level
    assert plain - cache.nbytes == 3 * 2 * 2 * (64 * cache.pages_per_row - two_levels)


@pytest.mark.parametrize(("options", "message"), [
    ({"metadata": "float16"}, "metadata: expected one of 'float32', 'bfloat16', 'int8', got 'float16'"),
    ({"block_pages": 0}, "expected block_pages to be an integer of at least 1, got 0"),
])  # fmt: skip
def test_impossible_metadata_is_refused(as_a_user, options, message):
    with pytest.raises(ValueError, match=message):
        quest_jax.init_cache(1, 1, 8, batch=1, capacity=64, **options)
    if "metadata" in options:
        with pytest.raises(ValueError, match=message):
            quest_jax.generate(tiny(), [[1, 2]], max_new_tokens=1, **options)


def test_token_slots_marks_real_tokens():
    cache = quest_jax.init_cache(1, 1, 8, batch=2, capacity=32, page_size=4)
    cache = cache.replace(
        lengths=jnp.array([5, 0]), page_table=jnp.asarray(np.arange(16)[::-1].reshape(2, 8), jnp.int32)
    )
    marked = np.argwhere(np.asarray(token_slots(cache)))
    assert marked.tolist() == [[14, 0], [15, 0], [15, 1], [15, 2], [15, 3]]


def compile_step(capacity, policy, params=None, **options):
    """A decode step of a tiny model, compiled for a cache of ``capacity``; and the state it was compiled for."""
    params = params or tiny()
    state = quest_jax.prefill(params, [[1, 2, 3]], capacity=capacity, policy=policy, **options)
    step = jax.jit(quest_jax.decode_step, donate_argnums=1)
    return step.lower(params, state).compile(), state


@pytest.mark.parametrize(("policy", "metadata"), [
    (None, "float32"),
    (quest_jax.Quest(64), "float32"),
    (quest_jax.Quest(64, reduce="round_robin", dense_layers=0), "float32"),
    (quest_jax.Quest(64, variant="sim"), "float32"),
    (quest_jax.Quest(64), "bfloat16"),
    (quest_jax.Quest(64), "int8"),
    (quest_jax.Quest(64, block_pages=16, candidates=2), "float32"),
    (quest_jax.Quest(64, block_pages=16, candidates=2, reduce="per_head"), "int8"),
], ids=str)  # fmt: skip
def test_a_decode_step_copies_no_cache(as_a_user, policy, metadata):
    temporary, layer = [], []
    for capacity in (2048, 16384):
        compiled, state = compile_step(capacity, policy, metadata=metadata)
        memory = compiled.memory_analysis()
        cache = state.attention.cache
        assert memory.alias_size_in_bytes >= cache.nbytes, "the cache is not updated in place"
        leaves = jax.tree.leaves((cache.kv, cache.meta, cache.blocks))
        names = {"float32": "f32", "bfloat16": "bf16", "int8": "s8"}
        wide = {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
        # Steps and offsets of int8 have the shape of scores, and are small.
        wide -= {f"f32[{','.join(map(str, leaf.shape))}]" for leaf in leaves if leaf.ndim == 3}
        copies = [
            line.strip()
            for line in compiled.as_text().splitlines()
            if re.search(r"= \S+ (copy|convert|transpose|copy-start)\(", line) and any(w in line for w in wide)
        ]
        assert copies == []
        temporary.append(memory.temp_size_in_bytes)
        layer.append(cache.nbytes / CONFIG.n_layers)
    # Scores and their ranking are a few numbers per page; nothing of the size of a layer's cache may grow.
    assert temporary[1] - temporary[0] < (layer[1] - layer[0]) / 20


def test_a_step_that_reads_rows_in_place_copies_no_cache(as_a_user):
    """As above with heads as wide as those of real models: the only ones whose rows dense decode reads in place."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    temporary, layer = [], []
    for capacity in (2048, 16384):
        compiled, state = compile_step(capacity, None, params=random_params(config, seed=0))
        memory, cache = compiled.memory_analysis(), state.attention.cache
        assert memory.alias_size_in_bytes >= cache.nbytes
        temporary.append(memory.temp_size_in_bytes)
        layer.append(cache.nbytes / config.n_layers)
    assert temporary[1] - temporary[0] < (layer[1] - layer[0]) / 10


def test_the_check_sees_a_copy(as_a_user):
    """The negative control: without donation the cache is copied, and the check above must say so."""
    compiled, state = compile_step(2048, None)
    undonated = jax.jit(quest_jax.decode_step).lower(tiny(), state).compile()
    assert undonated.memory_analysis().alias_size_in_bytes < state.attention.cache.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes >= state.attention.cache.nbytes
