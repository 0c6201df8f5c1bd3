"""attend: append, score, select, attend, and what it says it read."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.cache import rebuild_blocks, rebuild_metadata
from quest_jax.pallas_kernels.metadata import Kind, keep_used
from tests.pallas_kernels.cases import attention_float64

KV_HEADS, HEADS, WIDTH = 2, 6, 16


def make(policy=None, batch=2, capacity=256, layers=1, **options):
    return quest_jax.init_attention(layers, KV_HEADS, WIDTH, batch=batch, capacity=capacity, policy=policy, **options)


def draw(batch, tokens, seed=0):
    rng = np.random.default_rng(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(jnp.asarray(rng.normal(size=(batch, tokens, h, WIDTH)), jnp.float32) for h in heads)


def read(state, qkv, sizes, lengths, attend=quest_jax.attend):
    """Feeds tokens in pieces of ``sizes``; rows end at ``lengths``. Returns outputs ``[B, T, H, D]`` and the state."""
    step, outputs, at = jax.jit(attend, static_argnums=0), [], 0
    for size in sizes:
        piece = [x[:, at : at + size] for x in qkv]
        state = quest_jax.extend(state, jnp.clip(jnp.asarray(lengths) - at, 0, size))
        out, state = step(0, *piece, state)
        outputs.append(out)
        at += size
    return jnp.concatenate(outputs, axis=1), state


@pytest.mark.parametrize("size", [1, 7, 16, 33, 64, 100])
def test_chunks_of_any_size_fill_the_same_cache(size):
    qkv, lengths = draw(2, 100), (100, 61)
    sizes = [size] * (100 // size) + ([100 % size] if 100 % size else [])
    whole, expected = read(make(), qkv, [100], lengths, quest_jax.prefill_attention)
    out, state = read(make(), qkv, sizes, lengths, quest_jax.prefill_attention)
    chex.assert_trees_all_equal(state.cache, expected.cache)
    np.testing.assert_allclose(out, whole, atol=2e-6)


@pytest.mark.parametrize("metadata", Kind.__args__)
def test_metadata_equals_rebuilt_after_any_mix_of_writes(metadata):
    policy = quest_jax.Quest(32, dense_layers=0, block_pages=2, candidates=1)
    state = make(policy, metadata=metadata)
    poisoned = state.cache.replace(  # what memory held before is not folded in
        meta=jax.tree.map(lambda x: x + 1, state.cache.meta), blocks=jax.tree.map(lambda x: x + 1, state.cache.blocks)
    )
    _, state = read(state.replace(cache=poisoned), draw(2, 90), [33, 1, 1, 16, 7, 32], (90, 47))
    clean = state.cache.replace(meta=rebuild_metadata(state.cache))
    used, used_blocks = (jnp.arange(0, 256, size) < jnp.array([[90], [47]]) for size in (16, 32))
    chex.assert_trees_all_equal(keep_used(state.cache.meta[0], used), clean.meta[0])
    chex.assert_trees_all_equal(keep_used(state.cache.blocks[0], used_blocks), rebuild_blocks(clean)[0])
    assert clean.metadata == metadata and clean.block_pages == 2


def test_blocks_hold_the_bounds_of_all_their_pages_and_of_no_other():
    _, state = read(make(quest_jax.Quest(64, block_pages=4)), draw(2, 200), [150, 50], (200, 61))
    meta, blocks = np.asarray(state.cache.meta[0]), np.asarray(state.cache.blocks[0])
    for row, pages in enumerate((13, 4)):
        for block in range(-(-pages // 4)):
            own = meta[row, :, 4 * block : min(4 * block + 4, pages)]
            expected = np.concatenate([own[..., :WIDTH].min(axis=1), own[..., WIDTH:].max(axis=1)], axis=-1)
            np.testing.assert_array_equal(blocks[row, :, block], expected)


@pytest.mark.parametrize("options", [dict(metadata="bfloat16"), dict(metadata="int8"), dict(block_pages=2)], ids=str)
def test_narrow_and_two_level_metadata_within_the_budget_are_dense(options):
    qkv, lengths, sizes = draw(2, 128), (128, 77), [100] + [1] * 28
    policy = quest_jax.Quest(128, dense_layers=0, block_pages=options.pop("block_pages", None), candidates=1)
    dense, _ = read(make(), qkv, sizes, lengths)
    sparse, state = read(make(policy, **options), qkv, sizes, lengths)
    np.testing.assert_allclose(sparse, dense, atol=1e-6)
    assert bool(state.reads.whole[0, 0])


@pytest.mark.parametrize("budget", [128, 160, 1000])
def test_a_budget_that_holds_everything_is_dense(budget):
    qkv, lengths = draw(2, 128), (128, 77)
    sizes = [100] + [1] * 28
    dense, _ = read(make(), qkv, sizes, lengths)
    sparse, state = read(make(quest_jax.Quest(budget, dense_layers=0)), qkv, sizes, lengths)
    np.testing.assert_allclose(sparse, dense, atol=1e-6)
    assert bool(state.reads.whole[0, 0])


def test_decoding_attends_to_the_selected_pages_and_no_others():
    """Recomputes the output in float64 from the pages that the policy named."""
    policy = quest_jax.Quest(48, dense_layers=0)
    qkv, lengths = draw(2, 200), (200, 133)
    _, state = read(make(policy), qkv, [199], [199, 132], quest_jax.prefill_attention)
    q, k, v = draw(2, 1, seed=9)
    state = quest_jax.extend(state, jnp.array([1, 1]))
    out, state = quest_jax.attend(0, q, k, v, state)
    scores = policy.score(q[:, 0], state.cache.meta[0], state.cache.lengths, 16, None)
    pages, counts = policy.select(scores, state.cache.lengths, 16)
    assert counts.tolist() == [[3, 3], [3, 3]] and int(state.reads.read.sum()) == 12
    for row in range(2):
        keys, values = (
            np.concatenate([old[row, : lengths[row] - 1], new[row]]).astype(np.float64)
            for old, new in ((qkv[1], k), (qkv[2], v))
        )
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            seen = np.isin(np.arange(len(keys)) // 16, np.asarray(pages)[row, own])
            expected, _ = attention_float64(np.asarray(q, np.float64)[row, 0, head], keys[:, own], values[:, own], seen)
            np.testing.assert_allclose(out[row, 0, head], expected, atol=2e-6)


def test_reads_are_those_of_the_selection():
    policy = quest_jax.Quest(48, dense_layers=1)
    state = make(policy, layers=2)
    state = quest_jax.extend(state, jnp.array([200, 20]))
    for layer in range(2):
        _, state = quest_jax.attend(layer, *draw(2, 200), state)
    state = quest_jax.extend(state, jnp.array([1, 0]))
    for layer in range(2):
        out, state = quest_jax.attend(layer, *draw(2, 1), state)
    assert (np.asarray(out)[1] == 0).all(), "a row without a token gives zeros"
    reads = state.reads
    assert reads.read.tolist() == [[13 * KV_HEADS, 0], [3 * KV_HEADS, 0]]
    assert reads.live.tolist() == [[13 * KV_HEADS, 0], [13 * KV_HEADS, 0]]
    assert reads.scored.tolist() == [[0, 0], [13 * KV_HEADS, 0]]
    assert reads.whole.tolist() == [[True, False], [False, False]]


def test_poisoned_memory_changes_nothing():
    policy = quest_jax.Quest(48, dense_layers=0)
    qkv, lengths = draw(2, 120), (120, 75)
    clean = make(policy)
    dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, clean)
    results = [read(state, qkv, [64, 40] + [1] * 16, lengths)[0] for state in (clean, dirty)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("layout", ["split", "fused"])
def test_layouts_agree(layout):
    policy, qkv = quest_jax.Quest(48, dense_layers=0), draw(2, 120)
    sizes = [100] + [1] * 20
    expected, _ = read(make(policy), qkv, sizes, (120, 75))
    out, _ = read(make(policy, layout=layout), qkv, sizes, (120, 75))
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_shuffled_page_table_changes_nothing():
    policy, qkv = quest_jax.Quest(48, dense_layers=0), draw(2, 120)
    state = make(policy)
    table = jnp.asarray(np.random.default_rng(0).permutation(32).reshape(2, 16), jnp.int32)
    shuffled = state.replace(cache=state.cache.replace(page_table=table))
    sizes = [100] + [1] * 20
    expected, _ = read(state, qkv, sizes, (120, 75))
    out, filled = read(shuffled, qkv, sizes, (120, 75))
    np.testing.assert_array_equal(out, expected)
    chex.assert_trees_all_equal(filled.cache.meta, rebuild_metadata(filled.cache))


def test_a_full_row_takes_no_more():
    state = make(batch=1, capacity=32)
    state = quest_jax.extend(state, jnp.array([40]))
    assert int(state.cache.lengths[0]) == 32
    assert int(quest_jax.extend(state, jnp.array([1])).cache.lengths[0]) == 32
    assert int(quest_jax.extend(state, jnp.array([2**31 - 1])).cache.lengths[0]) == 32
    assert int(quest_jax.extend(state, jnp.array([-5])).cache.lengths[0]) == 32


class OnlyTheLastPage(quest_jax.PagePolicy):
    """A policy as a user writes one: two methods."""

    def score(self, q, meta, lengths, page_size, implementation):
        pages = jnp.arange(meta.shape[2])
        live = pages * page_size < lengths[:, None]
        return jnp.broadcast_to(jnp.where(live, 1.0 * pages, -jnp.inf)[:, None], meta.shape[:3])

    def select(self, scores, lengths, page_size):
        best = jnp.argmax(scores, axis=-1)[..., None].astype(jnp.int32)
        return quest_jax.Selection(best, jnp.ones(scores.shape[:2], jnp.int32))


def test_a_policy_of_your_own_needs_two_methods():
    qkv = draw(2, 100)
    out, state = read(make(OnlyTheLastPage()), qkv, [99, 1], (100, 99))
    assert state.reads.read.tolist() == [[KV_HEADS, 0]]
    q, k, v = (np.asarray(x[0], np.float64) for x in qkv)
    expected, _ = attention_float64(q[99, 0], k[:, 0], v[:, 0], np.arange(100) >= 96)
    np.testing.assert_allclose(out[0, 99, 0], expected, atol=2e-6)


def test_one_program_serves_every_length():
    policy = quest_jax.Quest(32, dense_layers=0)
    traces = []

    @functools.partial(jax.jit, donate_argnums=3)
    def step(q, k, v, state):
        traces.append(1)
        return quest_jax.attend(0, q, k, v, quest_jax.extend(state, jnp.array([1, 1])))

    state = make(policy)
    for seed in range(70):  # across four page boundaries, below and above the budget
        _, state = step(*draw(2, 1, seed), state)
    assert len(traces) == 1 and state.cache.lengths.tolist() == [70, 70]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(policy="quest"), TypeError, "expected a quest_jax policy such as Quest"),
        (lambda: make(quest_jax.Quest(8)), ValueError, "at least one page, 16 tokens, got 8"),
        (lambda: make(capacity=0), ValueError, "capacity to be an integer of at least 1, got 0"),
        (lambda: make(page_size=-1), ValueError, "page_size to be an integer of at least 1, got -1"),
        (lambda: make(dtype=jnp.int8), ValueError, "float32, bfloat16 or float16, got int8"),
        (lambda: make(layout="rows"), ValueError, "'auto', 'fused' or 'split', got 'rows'"),
        (lambda: quest_jax.attend(3, *draw(2, 1), make()), ValueError, r"layer in \[0, 1\), got 3"),
        (lambda: quest_jax.attend(0, *draw(2, 1), make(implementation="cuda")), ValueError, "one of .*got 'cuda'"),
        (lambda: quest_jax.attend(0, *draw(3, 1), make()), ValueError, r"\[2, T, 2, 16\]"),
        (lambda: quest_jax.decode_attention(0, *draw(2, 3), make()), ValueError, "one token per row, got 3"),
        (lambda: quest_jax.attend(0, draw(2, 1)[0], *draw(2, 2)[1:], make()), ValueError, "same rows and tokens"),
        (lambda: quest_jax.attend(0, draw(3, 1)[0], *draw(2, 1)[1:], make()), ValueError, "same rows and tokens"),
        (lambda: quest_jax.extend(make(), jnp.array([1])), ValueError, "expected 2 integers, one a row"),
        (lambda: quest_jax.extend(make(), jnp.array([1.5, 1.0])), ValueError, "expected 2 integers, one a row"),
    ],
)
def test_impossible_calls_are_refused(as_a_user, call, error, message):
    with pytest.raises(error, match=message):
        call()
