"""StreamingLLM against a cache of keys without rotation, which rotates them all anew by their slot in every step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.models import llama
from quest_jax.models.config import RopeConfig
from quest_jax.models.rope import attention_scaling, inverse_frequencies
from quest_jax.policies.sink_window import SinkWindow
from quest_jax.policies.streaming_llm import StreamingLLM
from tests.models_for_tests import CONFIG, tiny

KV_HEADS, WIDTH, CAPACITY, PAGE = 2, 16, 64, 8
PROMPTS, STEPS, BUDGET = (40, 13, 22), 5, 20
LLAMA3 = RopeConfig(theta=500.0, kind="llama3", factor=4.0, original_max_positions=64)
YARN = RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_max_positions=64, rotary_dim=8)


def rotated(x, positions, rope, width=WIDTH):
    """``x [T, heads, D]`` at ``positions``, in float64: as the decoder's docstring has it."""
    half = (rope.rotary_dim or width) // 2
    frequencies = np.asarray(inverse_frequencies(rope, width), np.float64)
    angle = np.asarray(positions, np.float64)[:, None, None] * frequencies
    cos, sin = np.cos(angle) * attention_scaling(rope), np.sin(angle) * attention_scaling(rope)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attended(q, k, v):
    """[H, D] of one query ``[H, D]`` over ``k, v [N, K, D]``, in float64."""
    group = len(q) // k.shape[1]
    scores = np.einsum("hd,nhd->hn", q, np.repeat(k, group, axis=1)) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), np.repeat(v, group, axis=1))


def streamed(q, k, v, rope, budget, sink, width=WIDTH):
    """The last query ``[H, D]`` over what is left of ``k, v [L, K, D]``, none of them rotated yet."""
    length = len(k)
    kept = [*range(sink), *range(length - budget + sink, length)] if length > budget else [*range(length)]
    slots = np.arange(len(kept))
    return attended(rotated(q[None], slots[-1:], rope, width)[0], rotated(k[kept], slots, rope, width), v[kept])


@jax.jit
def step(state, q, k, v, new):
    return quest_jax.attend(0, q, k, v, quest_jax.extend(state, new))


@pytest.mark.parametrize(("group", "rope", "sink"), [
    (3, RopeConfig(), 4), pytest.param(4, LLAMA3, 1, marks=pytest.mark.slow),
    pytest.param(1, YARN, 4, marks=pytest.mark.slow), pytest.param(3, YARN, 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_it_is_a_cache_that_is_rotated_anew(group, rope, sink):
    rng = np.random.default_rng(group)
    shape = (len(PROMPTS), CAPACITY)
    q = 2 * rng.standard_normal((*shape, KV_HEADS * group, WIDTH))
    k, v = rng.standard_normal((2, *shape, KV_HEADS, WIDTH))
    positions = range(CAPACITY)
    turned = [np.stack([rotated(row, positions, rope) for row in x]).astype(np.float32) for x in (q, k)]
    inputs = *turned, v.astype(np.float32)
    outs = {}
    for rows in (slice(None), slice(0, 1)):
        prompts = np.array(PROMPTS)[rows]
        state = quest_jax.init_attention(
            1, KV_HEADS, WIDTH, batch=len(prompts), capacity=CAPACITY, page_size=PAGE,
            policy=StreamingLLM(BUDGET, sink=sink, rope=rope),
        )  # fmt: skip
        poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.cache.kv, state.cache.meta))
        state = state.replace(cache=state.cache.replace(kv=poisoned[0], meta=poisoned[1]))
        _, state = step(state, *(x[rows, : max(PROMPTS)] for x in inputs), jnp.asarray(prompts))
        for i in range(STEPS):
            at = (prompts + i)[:, None, None, None]
            own = (np.take_along_axis(x[rows], at, axis=1) for x in inputs)
            out, state = step(state, *own, jnp.ones(len(prompts), int))
            outs[i, len(prompts)] = np.asarray(out)[:, 0]
            assert state.reads.read[0].tolist() == [KV_HEADS * min(BUDGET, n + i + 1) for n in prompts]
            assert not state.reads.scored.any()
        if group != 3 or sink == 0:
            break
    for row, prompt in enumerate(PROMPTS):
        for i in range(STEPS):
            length = prompt + i + 1
            want = streamed(q[row, length - 1], k[row, :length], v[row, :length], rope, BUDGET, sink)
            np.testing.assert_allclose(outs[i, len(PROMPTS)][row], want, atol=2e-5, err_msg=f"{row} {i}")
    if (4, 1) in outs:
        np.testing.assert_allclose(outs[4, 1][0], outs[4, len(PROMPTS)][0], atol=2e-6)


def test_a_far_query_is_turned_by_the_angle_that_it_has():
    """At position 10^6 one unit in the last place of the angle is 0.06 radians: it cancels."""
    at, budget = 1_000_000, 64
    policy, q = StreamingLLM(budget, rope=RopeConfig()), np.random.default_rng(0).standard_normal((1, 1, 2, WIDTH))
    cos, sin = quest_jax.models.rope.rope_rotation(RopeConfig(), WIDTH, jnp.array([[at]]))
    there = quest_jax.models.rope.apply_rope(jnp.asarray(q, jnp.float32), cos, sin)
    state = quest_jax.init_attention(1, 2, WIDTH, batch=1, capacity=64, policy=policy)
    view = state.view(0)._replace(starts=jnp.array([at], jnp.int32), lengths=jnp.array([at + 1], jnp.int32))
    want = rotated(q[0], [budget - 1], RopeConfig())
    np.testing.assert_allclose(policy._turned(there, view)[0], want, atol=2e-5)


@functools.cache
def model():
    """A tiny Llama with rotary embeddings of Llama 3.1, but for one layer."""
    params = tiny()
    config = dataclasses.replace(CONFIG, n_layers=3, rope=LLAMA3, unrotated_layers=(1,))
    return params.replace(config=config, weights={n: w for n, w in params.weights.items() if n != "layer_3"})


def reference(tokens, prompt, budget, sink):
    """Logits from the prompt's last token on: of the decoder without rotation, which is attention's own here."""
    params = model()
    config, width = params.config, params.config.head_dim
    bare = dataclasses.replace(config, unrotated_layers=tuple(range(config.n_layers)))
    cached, logits = {}, []

    def attend(layer, q, k, v, first):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        old = cached.get(layer, (k[:0], v[:0]))
        keys, values = cached[layer] = tuple(np.concatenate(pair) for pair in zip(old, (k, v), strict=True))
        if layer in config.unrotated_layers:
            turn = lambda x, positions: x  # noqa: E731
        else:
            turn = functools.partial(rotated, rope=config.rope, width=width)
        out = []
        for i in range(len(q)):
            length = first + i + 1
            kept = [*range(sink), *range(length - budget + sink, length)]
            kept = [*range(length)] if first == 0 or length <= budget else kept
            slots = np.arange(len(kept))
            out.append(attended(turn(q[i : i + 1], slots[-1:])[0], turn(keys[kept], slots), values[kept]))
        return jnp.asarray(np.stack(out)[None], jnp.float32), first

    for start, end in [(0, prompt)] + [(at, at + 1) for at in range(prompt, len(tokens))]:
        piece = jnp.asarray([tokens[start:end]])
        hidden, _ = llama.apply(params.weights, bare, piece, start + jnp.arange(end - start)[None], attend, start)
        logits.append(np.asarray(llama.project_logits(params.weights, bare, hidden))[0, -1])
    return np.array(logits)


@pytest.mark.slow
def test_a_model_streams():
    params, policy = model(), StreamingLLM(BUDGET)
    prompts, fed = [[1, 2, 3, 4, 5, 6] * 4, [9, 8, 7] * 2], [[11, 12, 13], [14, 15, 16]]
    options = dict(page_size=PAGE, eos_token_ids=(), capacity=64)
    state = quest_jax.feed_tokens(params, quest_jax.prefill(params, prompts, policy=policy, **options), fed)
    dense = quest_jax.prefill(params, prompts, **options)
    replaced = quest_jax.feed_tokens(params, quest_jax.replace_policy(dense, policy=policy), fed)
    np.testing.assert_array_equal(replaced.logits, state.logits)
    assert state.attention.policy == policy, "the state keeps the policy that it was given"
    for row in range(2):
        want = reference(prompts[row] + fed[row], len(prompts[row]), BUDGET, 4)[-1]
        np.testing.assert_allclose(state.logits[row], want, atol=2e-3)
    window = quest_jax.feed_tokens(
        params, quest_jax.replace_policy(dense, policy=SinkWindow(BUDGET, dense_layers=0)), fed
    )
    assert abs(window.logits - state.logits)[0].max() > 0.05, "where a sink stands matters"
    out = quest_jax.generate(params, prompts[:1], policy=policy, max_new_tokens=4, **options)
    new = out.tokens[0].tolist()
    greedy = reference(prompts[0] + new[:-1], len(prompts[0]), BUDGET, 4).argmax(axis=1)
    assert new == greedy.tolist()
    assert np.asarray(out.stats.sparse).all()


def test_what_cannot_work_is_refused(as_a_user):
    q, kv = jnp.ones((1, 1, 2, WIDTH)), jnp.ones((1, 1, 2, WIDTH))
    state = quest_jax.init_attention(1, 2, WIDTH, batch=1, capacity=64, policy=StreamingLLM(16))
    with pytest.raises(ValueError, match="expected rope=, the rotary embedding of the queries and keys, got None"):
        quest_jax.attend(0, q, kv, kv, state)
    with pytest.raises(ValueError, match="expected the rope of the model, .*, or None, got RopeConfig"):
        quest_jax.prefill(tiny(), [[1]], policy=StreamingLLM(16, rope=RopeConfig(theta=7.0)))
    for kind in ("dynamic", "longrope"):
        factors = dict(short_factors=(1.0,) * 8, long_factors=(2.0,) * 8) if kind == "longrope" else {}
        rope = RopeConfig(kind=kind, factor=2.0, original_max_positions=256, **factors)
        params = tiny().replace(config=dataclasses.replace(CONFIG, rope=rope))
        with pytest.raises(NotImplementedError, match=f"'{kind}' rotates rows of more than 256 tokens by other"):
            quest_jax.prefill(params, [[1]], policy=StreamingLLM(64), capacity=512)
        quest_jax.plan(params, 1, 256, policy=StreamingLLM(64))
        state = quest_jax.prefill(params, [[1]], policy=StreamingLLM(64), capacity=256)
        with pytest.raises(NotImplementedError, match="more than 256 tokens .* got room for 257"):
            quest_jax.compact(params, state, capacity=257)


def test_roles_and_defaults():
    policy = StreamingLLM(16, rope=RopeConfig(), unrotated_layers=(1,), sink=2)
    assert policy.at(1, 3) == SinkWindow(16, dense_layers=0, sink=2) and policy.at(0, 3) == policy.at(2, 3) != policy
    assert StreamingLLM(16).fitted(CONFIG).fitted(CONFIG) == StreamingLLM(16, rope=CONFIG.rope)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: StreamingLLM(4), ValueError, "StreamingLLM: expected a budget above the sink of 4 tokens"),
    (lambda: StreamingLLM(64, granularity="page"), ValueError, "expected granularity 'token', got 'page'"),
    (lambda: StreamingLLM(64, rope=10000.0), TypeError, "rope to be a quest_jax.RopeConfig or None, got 10000.0"),
])  # fmt: skip
def test_impossible_methods_are_refused(as_a_user, make, error, message):
    with pytest.raises(error, match=message):
        make()
