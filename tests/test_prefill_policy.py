"""Prompts read by QuoKA: in generate, next to Quest, counted, and in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import Dense, Quest, QuoKA, generate, prefill, replace_policy
from quest_jax.decode import _prefill_chunk_jit
from quest_jax.inputs import as_prefill_policy
from tests.models_for_tests import CONFIG, tiny

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (70, 5)]


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("mode", ["dense", "compete"])
def test_a_prefill_budget_that_holds_the_prompt_is_dense(granularity, mode):
    prompts = [PROMPTS[0] * 3, PROMPTS[1]]
    dense = generate(tiny(), prompts, max_new_tokens=8)
    policy = QuoKA(256, chunk=32, granularity=granularity, chunk_mode=mode)
    out = generate(tiny(), prompts, prefill_policy=policy, max_new_tokens=8)
    assert out.tokens.tolist() == dense.tokens.tolist()
    assert out.stats.prefill.share_read() == 1


@pytest.mark.slow
def test_quoka_reads_the_prompt_and_quest_writes_the_answer():
    prompts = [PROMPTS[0] * 5, PROMPTS[1]]
    policy = QuoKA(64, n_queries=4, chunk=32, granularity="token")
    out = generate(tiny(), prompts, policy=Quest(64), prefill_policy=policy, max_new_tokens=6)
    read, layers = out.stats.prefill, CONFIG.n_layers
    chunks = -(-len(prompts[0]) // 32)
    assert read.reads.read.shape == (chunks, layers, 2) and out.stats.reads.read.shape == (6, layers, 2)
    for chunk in range(chunks):
        past, length = 32 * chunk, min(len(prompts[0]), 32 * (chunk + 1))
        tokens = min(64, past) + length - past
        assert read.pages_read[chunk, 0].tolist()[0] == CONFIG.n_kv_heads * (tokens if past > 64 else length)
        assert read.reads.scored[chunk, 0, 0] == (CONFIG.n_kv_heads * past if past > 64 else 0)
    token, key = 2 * 16 * 4, 16 * 4 + 4
    assert read.bytes_read()[-1, 0, 0] == CONFIG.n_kv_heads * (tokens * token + past * key)
    assert 0 < read.share_read() < 1 and 0 < out.stats.share_read() < 1
    # A row's answer does not depend on its neighbours, and the same comes out as one program.
    alone = generate(tiny(), prompts[:1], policy=Quest(64), prefill_policy=policy, max_new_tokens=6)
    assert alone.tokens.tolist() == out.tokens.tolist()[:1]
    width = len(prompts[0])
    padded = jnp.array([row + [0] * (width - len(row)) for row in prompts])

    @jax.jit
    def program(params, tokens, lengths):
        return generate(params, tokens, lengths=lengths, policy=Quest(64), prefill_policy=policy, max_new_tokens=6)

    jitted = program(tiny(), padded, jnp.array([len(row) for row in prompts]))
    assert jitted.tokens.tolist() == out.tokens.tolist()
    np.testing.assert_array_equal(jitted.stats.prefill.reads.read, read.reads.read)


def test_decoding_by_quoka_keeps_the_norms_and_other_policies_drop_them():
    policy = QuoKA(32, granularity="token")
    state = prefill(tiny(), [PROMPTS[0]], policy=policy)
    assert state.attention.cache.norms is not None
    out = generate(tiny(), [PROMPTS[0]], policy=policy, max_new_tokens=6)
    assert (np.asarray(out.stats.pages_read) == CONFIG.n_kv_heads * 33).all()
    state = prefill(tiny(), [PROMPTS[0]], prefill_budget=32)
    assert state.attention.cache.norms is None
    with pytest.raises(ValueError, match="QuoKA reads inverse key norms, which this cache does not keep"):
        replace_policy(state, policy=policy)


def test_a_chunk_copies_no_cache(as_a_user):
    """Neither in the branch that selects nor in the one that reads all; temporaries do not follow the capacity."""
    policy, temporary, layer = QuoKA(64, chunk=32, granularity="token"), [], []
    for capacity in (1024, 8192):
        state = prefill(tiny(), [[1] * 20], capacity=capacity, policy=policy, prefill_policy=policy)
        cache = state.attention.cache
        args = (tiny(), state, jnp.ones((1, 32), jnp.int32), jnp.int32(32), jnp.array([64]))
        compiled = _prefill_chunk_jit.lower(*args).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        shapes = {
            str(leaf.shape).strip("()").replace(" ", "").rstrip(",") for leaf in jax.tree.leaves((cache.kv, cache.meta))
        }
        copies = [
            line
            for line in compiled.as_text().splitlines()
            if re.search(r"= \S+ (copy|convert|transpose|copy-start)\(", line) and any(f"[{s}]" in line for s in shapes)
        ]
        assert copies == []
        temporary.append(memory.temp_size_in_bytes)
        layer.append(cache.nbytes / CONFIG.n_layers)
    assert temporary[1] - temporary[0] < (layer[1] - layer[0]) / 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prefill_budget": 0}, ValueError, "prefill_budget: expected at least 1, got 0"),
        ({"prefill_budget": 2.5}, TypeError, "prefill_budget: expected an integer, got 2.5"),
        ({"prefill_budget": 64, "prefill_policy": QuoKA(64)}, ValueError, "prefill_budget or prefill_policy, got both"),
        ({"prefill_policy": Quest(64)}, ValueError, "selects for one query; pass it as policy"),
        ({"prefill_policy": 64}, TypeError, r"prefill_policy: expected a quest_jax policy such as QuoKA"),
        ({"prefill_budget": 64, "chunk": 256}, ValueError, "chunk: expected 128, the chunk of the prefill policy"),
        ({"prefill_policy": QuoKA(8, granularity="page")}, ValueError, "at least one page, 16 tokens, got 8"),
        ({"chunk": 0}, ValueError, "chunk: expected at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(as_a_user, options, error, message):
    with pytest.raises(error, match=message):
        generate(tiny(), [PROMPTS[0]], max_new_tokens=2, **options)


def test_a_given_chunk_may_repeat_the_policys():
    state = prefill(tiny(), [PROMPTS[0]], prefill_policy=QuoKA(64, chunk=32), chunk=32)
    assert int(state.lengths[0]) == 70 and isinstance(state.attention.policy, Dense)


def test_a_budget_lets_every_head_choose():
    """Not the paper's mean over a group, which loses more at the same bytes: docs/study.md."""
    assert as_prefill_policy(64, None, 16) == QuoKA(64, group="each") != QuoKA(64)
    prompt = [i * 7 % 97 for i in range(200)]
    by_budget, by_policy, by_mean = (
        prefill(tiny(), [prompt], eos_token_ids=(), **options).logits
        for options in (
            {"prefill_budget": 32}, {"prefill_policy": QuoKA(32, group="each")}, {"prefill_policy": QuoKA(32)},
        )
    )  # fmt: skip
    np.testing.assert_array_equal(by_budget, by_policy)
    assert np.abs(by_budget - by_mean).max() > 1e-4
