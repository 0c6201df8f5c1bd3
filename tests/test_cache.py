"""The cache: sizes, capacity, memory accounting, and that a decode step of a whole model copies none of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.cache import cache_nbytes, token_slots
from tests.models_for_tests import CONFIG, tiny


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize(("capacity", "page_size"), [(64, 16), (65, 16), (100, 7), (1, 1)])
def test_sizes(capacity, page_size, layout):
    cache = quest_jax.init_cache(3, 2, 8, batch=2, capacity=capacity, page_size=page_size, layout=layout)
    assert cache.page_size == page_size and cache.capacity >= capacity > cache.capacity - page_size
    assert cache.nbytes == cache_nbytes(3, 2, 8, batch=2, capacity=capacity, page_size=page_size)
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cache.kv, cache.meta))}) == 3 * (
        3 if layout == "split" else 2
    ), "a buffer shared by two layers could not be donated"


def test_token_slots_marks_real_tokens():
    cache = quest_jax.init_cache(1, 1, 8, batch=2, capacity=32, page_size=4)
    cache = cache.replace(
        lengths=jnp.array([5, 0]), page_table=jnp.asarray(np.arange(16)[::-1].reshape(2, 8), jnp.int32)
    )
    marked = np.argwhere(np.asarray(token_slots(cache)))
    assert marked.tolist() == [[14, 0], [15, 0], [15, 1], [15, 2], [15, 3]]


def compile_step(capacity, policy, **options):
    """A decode step of the tiny model, compiled for a cache of ``capacity``; and the state it was compiled for."""
    params = tiny()
    state = quest_jax.prefill(params, [[1, 2, 3]], capacity=capacity, policy=policy, **options)
    step = jax.jit(quest_jax.decode_step, donate_argnums=1)
    return step.lower(params, state).compile(), state


@pytest.mark.parametrize("policy", [
    None,
    quest_jax.Quest(64),
    quest_jax.Quest(64, reduce="round_robin", dense_layers=0),
    quest_jax.Quest(64, variant="sim"),
], ids=str)  # fmt: skip
def test_a_decode_step_copies_no_cache(as_a_user, policy):
    temporary, layer = [], []
    for capacity in (2048, 16384):
        compiled, state = compile_step(capacity, policy)
        memory = compiled.memory_analysis()
        cache = state.attention.cache
        assert memory.alias_size_in_bytes >= cache.nbytes, "the cache is not updated in place"
        shapes = {leaf.shape for leaf in jax.tree.leaves((cache.kv, cache.meta))}
        wide = [f"f32[{','.join(map(str, shape))}]" for shape in shapes]
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


def test_the_check_sees_a_copy(as_a_user):
    """The negative control: without donation the cache is copied, and the check above must say so."""
    compiled, state = compile_step(2048, None)
    undonated = jax.jit(quest_jax.decode_step).lower(tiny(), state).compile()
    assert undonated.memory_analysis().alias_size_in_bytes < state.attention.cache.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes >= state.attention.cache.nbytes
