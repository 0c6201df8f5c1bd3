"""Generation with a tiny random model: dense against sparse, batches against single rows, chunks, bounds, programs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.cache import token_slots
from quest_jax.decode import _prefill_chunk_jit
from quest_jax.generate import _decode_block_jit
from quest_jax.models import llama
from tests.models_for_tests import CONFIG, tiny

# One capacity and one chunk for most tests, so that they share their compiled programs.
generate = functools.partial(quest_jax.generate, capacity=256, chunk=16)
prefill = functools.partial(quest_jax.prefill, capacity=256, chunk=16)
RNG = np.random.default_rng(0)
SPARSE = quest_jax.Quest(32)  # by name: always selects, as a budget would not for texts this short
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (70, 5, 33, 17, 1, 16)]


def plain_logits(params, tokens):
    """Logits ``[T, V]`` of one prompt, by attention over plain arrays: no cache, no pages."""

    def attend(layer, q, k, v, state):
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,blhd->bhtl", q, k, precision="highest") * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bhtl,blhd->bthd", jax.nn.softmax(scores, axis=-1), v, precision="highest"), state

    tokens = jnp.asarray([tokens])
    hidden, _ = llama.apply(params.weights, CONFIG, tokens, jnp.arange(tokens.shape[1])[None], attend, None)
    return llama.project_logits(params.weights, CONFIG, hidden)[0]


def greedy(params, prompt, n):
    """Greedy tokens by running the whole text anew for each, and the smallest margin between the first two logits."""
    tokens, margin = list(prompt), np.inf
    run = jax.jit(plain_logits)
    for _ in range(n):
        # Padded behind: causal attention does not see it, and one program serves all steps.
        padded = jnp.asarray(tokens + [0] * (len(prompt) + n - len(tokens)))
        logits = np.asarray(run(params, padded))[len(tokens) - 1]
        first, second = np.argsort(-logits)[:2]
        margin = min(margin, logits[first] - logits[second])
        tokens.append(int(first))
    return tokens[len(prompt) :], margin


@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=len)
def test_dense_equals_plain_attention(prompt):
    params = tiny()
    expected, margin = greedy(params, prompt, 12)
    assert margin > 1e-3, "this case cannot tell right from wrong"
    out = generate(params, [prompt], max_new_tokens=12)
    assert out.tokens.tolist() == [expected] and out.lengths.tolist() == [12]
    np.testing.assert_allclose(prefill(params, [prompt]).logits[0], plain_logits(params, prompt)[-1], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 70])
def test_chunks_of_any_size_give_the_same_state(chunk):
    params = tiny()
    whole = prefill(params, PROMPTS[:3], chunk=128, capacity=128)
    pieces = prefill(params, PROMPTS[:3], chunk=chunk, capacity=128)
    chex.assert_trees_all_close(pieces.attention.cache, whole.attention.cache, atol=1e-4)
    np.testing.assert_allclose(pieces.logits, whole.logits, atol=1e-4)
    chex.assert_trees_all_equal(pieces.attention.cache.meta, quest_jax.rebuild_metadata(pieces.attention.cache))


@pytest.mark.parametrize("policy", [None, SPARSE])
def test_each_row_of_a_ragged_batch_equals_its_single_run(policy):
    params = tiny()
    batch = generate(params, PROMPTS, policy=policy, max_new_tokens=10)
    state = prefill(params, PROMPTS, policy=policy)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(params, [prompt], policy=policy, max_new_tokens=10)
        assert alone.tokens[0].tolist() == batch.tokens[row].tolist(), row
        single = prefill(params, [prompt], policy=policy)
        np.testing.assert_allclose(state.logits[row], single.logits[0], atol=1e-4)


def test_equal_prompts_are_answered_equally_wherever_they_stand():
    out = generate(tiny(), [PROMPTS[2]] * 3, policy=SPARSE, max_new_tokens=10)
    assert out.tokens[0].tolist() == out.tokens[1].tolist() == out.tokens[2].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("budget", [96, 1000])
def test_a_budget_that_holds_everything_gives_dense_tokens_and_logits(budget):
    params = tiny()
    dense = generate(params, PROMPTS[:2], max_new_tokens=20)
    sparse = generate(params, PROMPTS[:2], budget=budget, max_new_tokens=20)
    assert dense.tokens.tolist() == sparse.tokens.tolist()
    assert sparse.stats.reads.whole.all() and sparse.stats.share_read() >= 1
    states = [prefill(params, PROMPTS[:2], budget=b) for b in (None, budget)]
    fed = [quest_jax.feed_tokens(params, state, dense.tokens[:, :15]).logits for state in states]
    np.testing.assert_allclose(*fed, atol=1e-5)


def test_stats_are_those_of_the_pages_read():
    out = generate(tiny(), [PROMPTS[0]], policy=SPARSE, max_new_tokens=20)
    stats = out.stats
    assert stats.pages_read.shape == (20, CONFIG.n_layers, 1)
    used = -(-(70 + 1 + np.arange(20)) // 16)
    for layer in range(CONFIG.n_layers):
        expected = used if layer < 2 else np.full(20, 2)
        assert stats.pages_read[:, layer, 0].tolist() == (expected * CONFIG.n_kv_heads).tolist()
        assert stats.sparse[:, layer, 0].tolist() == [layer >= 2] * 20
    page, meta = 16 * 2 * 16 * 4, 2 * 16 * 4
    assert stats.bytes_dense()[0, 0, 0] == used[0] * CONFIG.n_kv_heads * page == stats.bytes_read()[0, 0, 0]
    assert stats.bytes_read()[0, 2, 0] == CONFIG.n_kv_heads * (2 * page + used[0] * meta)
    assert 0 < stats.share_read() < 1


@pytest.mark.slow
@pytest.mark.parametrize(("metadata", "page", "block_pages"), [
    ("float32", 128, 2), ("bfloat16", 64, None), ("bfloat16", 64, 2), ("int8", 40, None),
])  # fmt: skip
def test_narrow_and_two_level_metadata_are_counted(metadata, page, block_pages):
    policy = quest_jax.Quest(32, block_pages=block_pages, candidates=1)
    out = generate(tiny(), [PROMPTS[0]], policy=policy, max_new_tokens=12, metadata=metadata)
    used = -(-(70 + 1 + np.arange(12)) // 16)  # of a capacity of 8 pages or more, in blocks of 32 tokens
    scored = used if block_pages is None else -(-used // 2) + (used - 2 * np.maximum(-(-used // 2) - 2, 0))
    read = out.stats.bytes_read()[:, 2, 0] - 2 * CONFIG.n_kv_heads * 16 * 2 * 16 * 4
    assert read.tolist() == (scored * CONFIG.n_kv_heads * page).tolist()
    whole = generate(tiny(), [PROMPTS[0]], max_new_tokens=12)
    enough = quest_jax.Quest(128, block_pages=block_pages)
    same = generate(tiny(), [PROMPTS[0]], policy=enough, max_new_tokens=12, metadata=metadata)
    assert same.tokens.tolist() == whole.tokens.tolist()
    inside = jax.jit(lambda p: generate(p, [PROMPTS[0]], policy=policy, max_new_tokens=12, metadata=metadata))(tiny())
    assert inside.tokens.tolist() == out.tokens.tolist()


def test_a_policy_of_other_blocks_than_the_cache_keeps_is_refused(as_a_user):
    state = prefill(tiny(), PROMPTS[:1], policy=quest_jax.Quest(32, block_pages=2))
    assert quest_jax.replace_policy(state, 32).attention.cache.block_pages == 2
    with pytest.raises(ValueError, match="blocks of 4 pages, and this cache keeps blocks of 2"):
        quest_jax.replace_policy(state, policy=quest_jax.Quest(32, block_pages=4))
    with pytest.raises(ValueError, match="blocks of 2 pages, and this cache keeps none"):
        quest_jax.replace_policy(prefill(tiny(), PROMPTS[:1]), policy=quest_jax.Quest(32, block_pages=2))


def test_poisoned_memory_changes_nothing():
    params = tiny()
    state = prefill(params, PROMPTS[:3], policy=SPARSE)
    cache = state.attention.cache
    real = token_slots(cache)
    dirty = cache.replace(
        kv=jax.tree.map(lambda x: jnp.where(real[None, ..., None], x, jnp.nan), cache.kv),
        meta=tuple(
            jnp.where((jnp.arange(m.shape[2]) * 16 < cache.lengths[:, None])[:, None, :, None], m, jnp.nan)
            for m in cache.meta
        ),
    )
    poisoned = state.replace(attention=state.attention.replace(cache=dirty))
    step = jax.jit(quest_jax.decode_step)
    for _ in range(12):
        state, token = step(params, state)
        poisoned, same = step(params, poisoned)
        assert token.tolist() == same.tolist()
        np.testing.assert_array_equal(state.logits, poisoned.logits)


def test_a_row_ends_at_eos_and_the_others_go_on():
    params = tiny()
    free = generate(params, PROMPTS[:3], max_new_tokens=12)
    eos = int(free.tokens[0, 4])
    first = [row.index(eos) + 1 if eos in row else 12 for row in free.tokens.tolist()]
    out = generate(params, PROMPTS[:3], max_new_tokens=12, eos_token_ids=[96, eos])
    assert out.lengths.tolist() == first
    for row, length in enumerate(first):
        assert out.tokens[row, :length].tolist() == free.tokens[row, :length].tolist()
        assert (out.tokens[row, length:] == -1).all()
    assert not out.stats.pages_read[first[0] - 1 :, :, 0].any(), "an ended row reads nothing"


def test_one_program_for_lengths_temperatures_seeds_and_numbers_of_tokens():
    params = tiny()
    generate(params, [PROMPTS[0]], policy=SPARSE, temperature=0.7, top_p=0.9, max_new_tokens=40)
    before = _decode_block_jit._cache_size(), _prefill_chunk_jit._cache_size()
    for length, temperature, top_p, seed, new in ((66, 1.3, 0.5, 7, 33), (128, 0.1, 1.0, 8, 70), (100, 2.0, 0.1, 9, 1)):
        prompt = RNG.integers(0, CONFIG.vocab_size, length).tolist()
        generate(
            params, [prompt], policy=SPARSE, temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=new,
            eos_token_ids=[seed],
        )  # fmt: skip
    assert (_decode_block_jit._cache_size(), _prefill_chunk_jit._cache_size()) == before


def test_inside_jit_it_is_the_same():
    params = tiny()
    eager = generate(params, PROMPTS[:1], policy=SPARSE, max_new_tokens=6)

    @jax.jit
    def answer(params, tokens):
        return generate(params, tokens, policy=SPARSE, max_new_tokens=6)

    out = answer(params, jnp.asarray(PROMPTS[:1]))
    assert out.tokens.tolist() == eager.tokens.tolist() and out.lengths.tolist() == [6]
    chex.assert_trees_all_equal(out.stats.pages_read, eager.stats.pages_read)


def test_inside_jit_with_lengths_it_is_the_same():
    params, width = tiny(), 70
    eager = generate(params, PROMPTS[:3], policy=SPARSE, max_new_tokens=6)
    padded = jnp.asarray([p + [0] * (width - len(p)) for p in PROMPTS[:3]])
    lengths = jnp.asarray([len(p) for p in PROMPTS[:3]])
    run = functools.partial(quest_jax.generate, policy=SPARSE, max_new_tokens=6)
    out = jax.jit(lambda p, t, n: run(p, t, lengths=n))(params, padded, lengths)
    assert out.tokens.tolist() == eager.tokens.tolist()


def test_your_own_loop_gives_the_same_tokens():
    params = tiny()
    expected = generate(params, PROMPTS[:2], policy=SPARSE, max_new_tokens=40).tokens
    state = prefill(params, PROMPTS[:2], policy=SPARSE)
    traces = []

    def traced_step(params, state):
        traces.append(1)
        return quest_jax.decode_step(params, state)

    step = jax.jit(traced_step, donate_argnums=1)
    tokens = []
    for _ in range(40):
        state, token = step(params, state)
        tokens.append(token)
    assert jnp.stack(tokens, axis=1).tolist() == expected.tolist()
    assert len(traces) == 1, "one program, across four page boundaries"


def test_a_full_cache_ends_the_row_loudly():
    params = tiny()
    state = prefill(params, [PROMPTS[0]], capacity=120)
    step, tokens = jax.jit(quest_jax.decode_step, donate_argnums=1), []
    for _ in range(62):
        state, token = step(params, state)
        tokens.append(int(token[0]))
    # 128 slots hold the prompt of 70 and 58 more; the 59th is drawn but has no place.
    assert bool(state.done[0]) and int(state.lengths[0]) == 128
    assert tokens[58] >= 0 and tokens[59:] == [-1, -1, -1]


def test_given_tokens_decode_as_generated_ones_do():
    params = tiny()
    out = generate(params, PROMPTS[:2], policy=SPARSE, max_new_tokens=12)
    context = prefill(params, PROMPTS[:2], policy=SPARSE)
    fed = quest_jax.feed_tokens(params, context, out.tokens[:, :8])
    assert jnp.argmax(fed.logits, axis=-1).tolist() == out.tokens[:, 8].tolist()
    ragged = quest_jax.feed_tokens(params, context, [out.tokens[0, :3].tolist(), out.tokens[1, :8].tolist()])
    assert jnp.argmax(ragged.logits, axis=-1).tolist() == [int(out.tokens[0, 3]), int(out.tokens[1, 8])]
    assert ragged.lengths.tolist() == [73, 13]


def test_one_context_serves_several_policies():
    params = tiny()
    context = prefill(params, [PROMPTS[0]])
    question = PROMPTS[1]
    for policy in (None, SPARSE, quest_jax.Quest(64)):
        state = quest_jax.feed_tokens(params, quest_jax.replace_policy(context, policy=policy), [question])
        whole = prefill(params, [PROMPTS[0]], policy=policy)
        np.testing.assert_array_equal(state.logits, quest_jax.feed_tokens(params, whole, [question]).logits)


def test_seeds_make_draws_repeatable_and_rows_independent():
    params, options = tiny(), dict(temperature=1.5, max_new_tokens=12)
    one = generate(params, [PROMPTS[0]] * 2, seed=3, **options)
    again = generate(params, [PROMPTS[0]] * 2, seed=3, **options)
    other = generate(params, [PROMPTS[0]] * 2, seed=4, **options)
    assert one.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    assert one.tokens[0].tolist() != one.tokens[1].tolist(), "two rows, two draws"
    mixed = generate(params, PROMPTS[:2], seed=[11, 3], **options)
    alone = generate(params, [PROMPTS[1]], seed=3, **options)
    assert mixed.tokens[1].tolist() == alone.tokens[0].tolist()


def test_bfloat16_stays_close_to_float32():
    wide = prefill(tiny(), PROMPTS[:2], policy=SPARSE).logits
    narrow = prefill(tiny(jnp.bfloat16), PROMPTS[:2], policy=SPARSE)
    assert narrow.attention.cache.kv[0][0].dtype == jnp.bfloat16 and narrow.logits.dtype == jnp.float32
    correlation = np.corrcoef(np.asarray(wide).ravel(), np.asarray(narrow.logits).ravel())[0, 1]
    assert correlation > 0.99
    out = generate(tiny(jnp.bfloat16), PROMPTS[:2], policy=SPARSE, max_new_tokens=5)
    assert out.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_any_page_size_gives_the_same_dense_tokens(page_size):
    params = tiny()
    expected = generate(params, PROMPTS[:2], max_new_tokens=8).tokens.tolist()
    for budget in (None, 2048):
        out = generate(params, PROMPTS[:2], max_new_tokens=8, page_size=page_size, budget=budget)
        assert out.tokens.tolist() == expected


def test_inside_jit_a_row_of_impossible_length_has_no_answer():
    tokens = jnp.array([PROMPTS[1]] * 4)
    lengths = jnp.array([0, 5, 6, -1])
    out = jax.jit(lambda t, n: generate(tiny(), t, lengths=n, max_new_tokens=3))(tokens, lengths)
    assert out.lengths.tolist() == [0, 3, 0, 0]
    assert out.tokens[1].tolist() == generate(tiny(), [PROMPTS[1]], max_new_tokens=3).tokens[0].tolist()


def test_nan_logits_are_an_error_not_an_answer():
    params = tiny()
    broken = params.replace(weights=params.weights | {"norm": params.weights["norm"].at[0].set(jnp.nan)})
    with pytest.raises(FloatingPointError, match="NaN in row 0"):
        generate(broken, [PROMPTS[1]], max_new_tokens=3)
    inside = jax.jit(lambda p: generate(p, jnp.asarray([PROMPTS[1]]), max_new_tokens=3).lengths)(broken)
    assert inside.tolist() == [0]


def test_inside_jit_settings_may_be_traced_and_prompts_known():
    params = tiny()
    eager = generate(params, PROMPTS[1:3], temperature=0.8, seed=5, eos_token_ids=[3], max_new_tokens=6)
    run = jax.jit(
        lambda t, s, e: generate(params, PROMPTS[1:3], temperature=t, seed=s, eos_token_ids=e, max_new_tokens=6).tokens
    )
    assert run(0.8, 5, jnp.array([3])).tolist() == eager.tokens.tolist()
    state = prefill(params, [PROMPTS[0]])
    fed = jax.jit(lambda s, t: quest_jax.feed_tokens(params, s, t))(state, jnp.array([PROMPTS[1]]))
    np.testing.assert_allclose(fed.logits, quest_jax.feed_tokens(params, state, [PROMPTS[1]]).logits, atol=1e-5)


def test_inside_jit_there_is_room_for_what_was_asked(as_a_user):
    params, tokens = tiny(), jnp.asarray(PROMPTS[2:3])
    run = jax.jit(lambda t: quest_jax.generate(params, t, max_new_tokens=300, capacity=None, chunk=16).lengths)
    assert run(tokens).tolist() == [300]
    with pytest.raises(ValueError, match="capacity: expected at least 333"):
        jax.jit(lambda t: quest_jax.generate(params, t, max_new_tokens=300, capacity=40).lengths)(tokens)


def test_inside_jit_an_id_out_of_range_gives_no_tokens():
    params = tiny()
    for wrong in (97, -1):
        out = jax.jit(lambda t: generate(params, t, max_new_tokens=3))(jnp.array([[1, wrong, 2]]))
        assert out.lengths.tolist() == [0] and out.tokens.tolist() == [[-1] * 3]


def test_a_conversation_goes_on_after_eos():
    params = tiny()
    free = generate(params, [PROMPTS[0]], max_new_tokens=6)
    eos = int(free.tokens[0, 2])
    state = prefill(params, [PROMPTS[0]], eos_token_ids=[eos])
    step = jax.jit(quest_jax.decode_step)
    while not bool(state.done[0]):
        state, _ = step(params, state)
    turn = quest_jax.feed_tokens(params, state, [[eos, *PROMPTS[1]]])
    assert not bool(turn.done[0])
    _, token = step(params, turn)
    said = free.tokens[0].tolist()
    said = said[: said.index(eos) + 1]
    whole = prefill(params, [PROMPTS[0] + said + PROMPTS[1]])
    assert int(token[0]) == int(jnp.argmax(whole.logits[0]))


def test_a_state_of_another_model_is_refused():
    other = quest_jax.random_params(quest_jax.LlamaConfig(97, 48, 64, 2, 6, 2, 16, 4096))
    with pytest.raises(ValueError, match=r"\(2, 2, 16\), got one of \(3, 2, 16\)"):
        quest_jax.decode_step(other, prefill(tiny(), [PROMPTS[1]]))
