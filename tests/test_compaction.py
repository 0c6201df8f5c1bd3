"""A compact state against the state it was made of, whose dead tokens a mask hides: the same tokens, fewer bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quest_jax
from quest_jax.attention import attend, extend
from quest_jax.cache import rebuild_metadata, token_slots
from quest_jax.policies.h2o import H2O
from quest_jax.policies.sink_window import SinkWindow
from quest_jax.policies.snapkv import SnapKV
from quest_jax.policies.streaming_llm import StreamingLLM
from quest_jax.policies.tova import TOVA
from tests.models_for_tests import CONFIG, SCALE

PAGE, BUDGET, CAPACITY, STEPS = 8, 20, 256, 64
PROMPTS = [[(5 * i * i + 3 * i) % 97 for i in range(n)] for n in (75, 11, 40)]


@functools.cache
def model(heads, layers=1):
    """With peaks in its attention and margins in its logits."""
    params = quest_jax.random_params(dataclasses.replace(CONFIG, n_layers=layers, n_heads=heads), seed=0)
    scaled = jax.tree_util.tree_map_with_path(lambda path, w: w * SCALE.get(path[-1].key, 1), params.weights)
    return params.replace(weights=scaled)


@jax.jit
def steps(params, state, n):
    """``n`` decode steps: the state, and of up to ``STEPS`` the tokens, logits and reads."""

    def one(i, carry):
        state, every = carry
        state, token = quest_jax.decode_step(params, state)
        now = token, state.logits, state.attention.reads
        return state, jax.tree.map(lambda old, new: old.at[i].set(new), every, now)

    now = jnp.zeros_like(state.done, jnp.int32), state.logits, state.attention.reads
    every = jax.tree.map(lambda x: jnp.zeros((STEPS, *x.shape), x.dtype), now)
    return lax.fori_loop(0, n, one, (state, every))


def begun(params, policy, capacity=CAPACITY):
    """A state after the first decode step, by which the prompts were cut to the budget."""
    options = dict(page_size=PAGE, capacity=capacity, eos_token_ids=())
    return steps(params, quest_jax.prefill(params, PROMPTS, policy=policy, **options), 1)[0]


def assert_same(one, other, atol=2e-3):
    """Tokens, logits and reads of all steps."""
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_allclose(one[1], other[1], atol=atol)
    for name in ("read", "live", "scored", "whole"):
        np.testing.assert_array_equal(getattr(one[2], name), getattr(other[2], name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in quest_jax.methods().items() if one.kind == "evict"])
def test_both_modes_give_the_same_tokens(name):
    policy = dataclasses.replace(quest_jax.methods()[name].make(BUDGET), dense_layers=0)
    params = model((2, 6, 8)[len(name) % 3])
    state = begun(params, policy)
    small = quest_jax.compact(params, state, capacity=144 if policy.grows else None)
    assert small.attention.cache.nbytes < state.attention.cache.nbytes
    end, found = steps(params, state, STEPS)
    small_end, small_found = steps(params, small, STEPS)
    assert_same(small_found, found)
    kv_heads = CONFIG.n_kv_heads
    reads, grown = np.asarray(found[2].read)[-1], np.asarray(end.lengths) - [len(p) for p in PROMPTS]
    kept = np.minimum(BUDGET, [len(p) for p in PROMPTS]) + grown if policy.grows else np.full(3, BUDGET)
    assert (reads[0] == kept * kv_heads).all() and len(np.unique(found[0])) > 10
    # What is alive stands where it did, in slots that are not in that order once some were free.
    view = end.attention.view(0)
    alive = np.broadcast_to(end.attention.policy.real(view), (3, kv_heads, CAPACITY))
    kept = {name: np.asarray(one) for name, one in small_end.attention.cache.memory[0].items()}
    mixed = 0
    for row, length in enumerate(np.asarray(end.lengths)):
        for kv in range(kv_heads):
            at = kept["position"][row, kv, kept["alive"][row, kv]].tolist()
            assert sorted(at) == np.flatnonzero(alive[row, kv, :length]).tolist()
            mixed += at != sorted(at)
    assert bool(mixed) is not policy.grows


@pytest.mark.slow
def test_dense_layers_keep_everything():
    params = model(6, layers=2)
    state = quest_jax.prefill(
        params, PROMPTS, policy=TOVA(BUDGET, dense_layers=1), page_size=PAGE, capacity=CAPACITY, eos_token_ids=()
    )
    state = quest_jax.feed_tokens(params, state, [[1], [2], [3]])
    small = quest_jax.compact(params, state)
    old, new = state.attention.cache, small.attention.cache
    assert old.capacity == new.capacity == CAPACITY and new.kv[0] is old.kv[0]
    # 21 tokens are 3 pages of the 32 that a row has; all else of such a layer goes with them.
    kept, was = ([sum(x.nbytes for x in jax.tree.leaves((c.kv[i], c.meta[i], c.memory[i]))) for i in (0, 1)]
                 for c in (new, old))  # fmt: skip
    assert kept[0] == was[0] and kept[1] < (3 / 32 + 0.01) * was[1] and new.nbytes == sum(kept)
    question = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    asked, shrunk = (quest_jax.feed_tokens(params, one, question) for one in (state, small))
    np.testing.assert_allclose(shrunk.logits, asked.logits, atol=2e-3)
    np.testing.assert_array_equal(shrunk.lengths, np.asarray(state.lengths) + [3, 2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("make", [TOVA, StreamingLLM])
def test_memory_no_longer_grows_with_the_text(make):
    """Without dense layers a row goes on past the capacity of its prompt, as one does that had the room at once."""
    params, policy = model(2), make(BUDGET, dense_layers=0)
    roomy, tight = (begun(params, policy, capacity) for capacity in (CAPACITY, 128))
    small = quest_jax.compact(params, tight, capacity=136)
    assert small.attention.cache.nbytes < tight.attention.cache.nbytes < roomy.attention.cache.nbytes
    end, (tokens, *_) = steps(params, small, STEPS)
    assert int(end.lengths[0]) == 136 > tight.attention.cache.capacity and bool(end.done[0])
    want, fed = np.array(steps(params, roomy, STEPS)[1][0]), 136 - 76
    want[fed + 1 :, 0] = -1  # the first row is full
    np.testing.assert_array_equal(tokens, want)


@pytest.mark.slow
@pytest.mark.parametrize("make", [H2O, SnapKV])
def test_a_row_that_ended_at_once_is_cut(make):
    """It has had no step that could; the others go on, and so does it when it is given tokens."""
    params = model(6)
    policy = make(BUDGET, dense_layers=0)
    state = quest_jax.prefill(params, PROMPTS, policy=policy, page_size=PAGE, capacity=CAPACITY, eos_token_ids=())
    ends = int(state.logits[0].argmax())
    state = quest_jax.prefill(params, PROMPTS, policy=policy, page_size=PAGE, capacity=CAPACITY, eos_token_ids=(ends,))
    state = steps(params, state, 2)[0]
    assert state.done.tolist() == [True, False, False]
    small = quest_jax.compact(params, state, capacity=144)
    both = [quest_jax.feed_tokens(params, one, [[1, 2, 3], [4], [5, 6]]) for one in (state, small)]
    both = [one.replace(done=jnp.zeros_like(one.done)) for one in both]
    assert_same(*(steps(params, one, STEPS)[1] for one in reversed(both)))


def test_what_cannot_be_compact_is_refused(as_a_user):
    params = model(6, layers=2)
    prompt = quest_jax.prefill(params, PROMPTS, policy=TOVA(BUDGET), page_size=PAGE, capacity=CAPACITY)

    def refused(error, message, state, **options):
        with pytest.raises(error, match=message):
            quest_jax.compact(params, state, **options)

    refused(ValueError, "expected a layer that selects .* got 0 such layers", prompt)
    one = quest_jax.replace_policy(prompt, policy=TOVA(BUDGET, dense_layers=1))
    refused(ValueError, "expected at most 20 tokens alive in a row, the budget, got 75 in row 0: .* take it, then", one)
    refused(ValueError, "and a budget of 300, for which a row needs 301 slots: nothing", quest_jax.replace_policy(
        prompt, policy=TOVA(300, dense_layers=1)))  # fmt: skip
    refused(ValueError, "policy that drops tokens for good, such as h2o, got Dense", quest_jax.replace_policy(prompt))
    with pytest.raises(NotImplementedError, match="cannot inside jit"):
        jax.jit(quest_jax.compact)(params, one)
    with pytest.raises(TypeError, match="expected what quest_jax.load returns"):
        quest_jax.compact(one, one)
    with pytest.raises(ValueError, match=r"expected a state of a model with .* \(3, 2, 16\), got one of \(2, 2, 16\)"):
        quest_jax.compact(model(6, layers=3), one)
    pages = quest_jax.replace_policy(prompt, policy=SinkWindow(BUDGET, granularity="page"))
    refused(ValueError, "policy that drops tokens for good, such as h2o, got SinkWindow", pages)
    snap = quest_jax.prefill(
        params, PROMPTS, policy=SnapKV(BUDGET, dense_layers=1), page_size=PAGE, capacity=CAPACITY, eos_token_ids=()
    )
    refused(ValueError, "got 75 in row 0: of a prompt none has died", snap)
    # What a window keeps depends on no query.
    window = quest_jax.replace_policy(prompt, policy=SinkWindow(BUDGET, dense_layers=1))
    assert quest_jax.compact(params, window).attention.cache.nbytes < window.attention.cache.nbytes
    # The row of 11 tokens keeps all of them, and all that its capacity has room for.
    snap = quest_jax.feed_tokens(params, snap, [[1], [2], [3]])
    refused(ValueError, "for which a row needs 256 slots: nothing would be freed", snap)

    state = quest_jax.feed_tokens(params, one, [[1], [2], [3]])
    for capacity in (70, CAPACITY + 1):
        refused(
            ValueError, f"at least the 76 tokens there are and at most 256, .* got {capacity}", state, capacity=capacity
        )
    refused(ValueError, "at most 2147483647 tokens, positions being int32", state, capacity=2**31)
    cache = state.attention.cache
    more = cache.replace(memory=tuple(kept and kept | {"norm": kept["alive"]} for kept in cache.memory or ()))
    own = state.replace(attention=state.attention.replace(cache=more))
    refused(NotImplementedError, "TOVA keeps norm beside alive and watched, which cannot be moved", own)
    small = quest_jax.compact(params, state)
    refused(ValueError, "compact already", small)
    for policy in (None, TOVA(BUDGET + 1, dense_layers=1), quest_jax.Quest(64)):
        with pytest.raises(ValueError, match="a compact state decodes by the policy it was made for, TOVA"):
            quest_jax.replace_policy(small, policy=policy)
    assert quest_jax.replace_policy(small, policy=TOVA(BUDGET, dense_layers=1)).attention.cache.limit == CAPACITY
    for function in (rebuild_metadata, token_slots):
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: a compact cache"):
            function(small.attention.cache)
    width = CONFIG.head_dim
    for tokens, window in ((2, None), (1, 8)):
        q, k = np.ones((3, tokens, 6, width), np.float32), np.ones((3, tokens, CONFIG.n_kv_heads, width), np.float32)
        new = extend(small.attention, np.full(3, tokens))
        with pytest.raises(NotImplementedError, match="a compact layer takes one token at a time, by TOVA"):
            attend(1, q, k, k, new, window=window)
    q, k = (np.ones((3, 1, heads, width), "float16") for heads in (6, CONFIG.n_kv_heads))
    with pytest.raises(ValueError, match=r"expected keys \[3, 1, 2, 16\] of float32, got \(3, 1, 2, 16\) of float16"):
        attend(1, q, k, k, extend(small.attention, np.ones(3, int)))
