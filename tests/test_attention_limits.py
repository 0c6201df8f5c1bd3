"""Windows and sinks: what layers may see less, and what takes its share of a softmax, against float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.attention import init_attention
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import IMPLEMENTATIONS as APPENDS
from quest_jax.pallas_kernels.page_attention.op import page_attention

KV_HEADS, GROUP, WIDTH, LENGTH = 2, 3, 16, 90
HEADS = KV_HEADS * GROUP
EVERYTHING = [
    (None, None),
    (quest_jax.Quest(96, dense_layers=0), quest_jax.QuoKA(96)),
    (quest_jax.Quest(96, dense_layers=0, reduce="per_head"), quest_jax.QuoKA(96, chunk_mode="compete")),
    (quest_jax.QuoKA(96, chunk_mode="compete"), quest_jax.QuoKA(96, granularity="page")),
]


def draw(rows=2, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((rows, LENGTH, heads, WIDTH)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(jnp.asarray(x, jnp.float32) for x in (3 * q, k, v)) + (rng.standard_normal(HEADS).astype(np.float32),)


def by_hand(q, k, v, window, sinks):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    at = np.arange(LENGTH)
    scores = np.einsum("bthd,blhd->bhtl", q, np.repeat(k, GROUP, axis=2)) / WIDTH**0.5
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or LENGTH))
    weights = np.exp(np.where(seen, scores, -np.inf))
    total = weights.sum(axis=-1) + (0 if sinks is None else np.exp(np.float64(sinks))[:, None])
    return np.einsum("bhtl,blhd->bthd", weights / total[..., None], np.repeat(v, GROUP, axis=2))


def attend_in_steps(q, k, v, window, sinks, policy, prefill_policy, steps, **options):
    state = init_attention(
        1,
        KV_HEADS,
        WIDTH,
        batch=len(q),
        capacity=96,
        page_size=4,
        policy=policy,
        prefill_policy=prefill_policy,
        **options,
    )
    outs, start = [], 0
    for tokens in steps:
        piece = slice(start, start + tokens)
        state = quest_jax.extend(state, jnp.full(len(q), tokens))
        limits = {"window": window, "sinks": None if sinks is None else jnp.asarray(sinks)}
        out, state = quest_jax.attend(0, q[:, piece], k[:, piece], v[:, piece], state, **limits)
        outs.append(out)
        start += tokens
    return np.concatenate(outs, axis=1), state


STEPS = (44, 1, 1, 44)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "sinks", "policy", "prefill_policy"), [
    *((window, False, None, None) for window in (1, 16, 33, 1000)),
    (7, True, None, None),
    *((None, True, *policies) for policies in EVERYTHING),
    (33, True, *EVERYTHING[1]),  # read by no policy
], ids=str)  # fmt: skip
def test_attention_is_that_of_float64(policy, prefill_policy, window, sinks):
    q, k, v, drawn = draw()
    own = drawn if sinks else None
    out, state = attend_in_steps(q, k, v, window, own, policy, prefill_policy, STEPS)
    np.testing.assert_allclose(out, by_hand(q, k, v, window, own), atol=2e-6)
    if window is not None and window < 96:
        pages = -(-(window + 44 - 1) // 4) + 1
        assert (np.asarray(state.reads.scored) == 0).all()
        unit = quest_jax.Dense().unit(4) if prefill_policy is None else prefill_policy.unit(4)
        assert (np.asarray(state.reads.read) <= KV_HEADS * pages * 4 // unit).all()


def test_what_lies_before_the_window_may_be_anything():
    q, k, v, _ = draw()
    expected, _ = attend_in_steps(q, k, v, 7, None, None, None, STEPS)
    spoilt = k.at[:, :29].multiply(1e6), v.at[:, :29].multiply(1e6)
    got, _ = attend_in_steps(q, *spoilt, 7, None, None, None, STEPS)
    np.testing.assert_array_equal(got[:, 36:], expected[:, 36:])


def test_a_sink_that_is_far_below_or_above():
    q, k, v, _ = draw()
    plain, _ = attend_in_steps(q, k, v, None, None, None, None, STEPS)
    for level, expected in ((-1e4, plain), (1e4, np.zeros_like(plain))):
        got, _ = attend_in_steps(q, k, v, None, np.full(HEADS, level, np.float32), None, None, STEPS)
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("limits", "message"), [
    ({"window": 0}, "expected a window of at least 1 token, a static integer, or None, got 0"),
    ({"window": 2.0}, "a static integer, or None, got 2.0"),
    ({"window": True}, "a static integer, or None, got True"),
    ({"sinks": jnp.zeros(KV_HEADS)}, rf"expected sinks \[{HEADS}\], one a query head, got \({KV_HEADS},\)"),
])  # fmt: skip
def test_impossible_limits_are_refused(as_a_user, limits, message):
    q, k, v, _ = draw(rows=1)
    state = quest_jax.extend(init_attention(1, KV_HEADS, WIDTH, batch=1, capacity=96), jnp.array([LENGTH]))
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(quest_jax.attend)(0, q, k, v, state, **limits)


@pytest.mark.parametrize(("target", "name"), [
    (("tpu", "TPU v5 lite"), "mosaic_tpu"),
    (("gpu", "NVIDIA H200", (9, 0)), "mosaic_gpu"),
])  # fmt: skip
def test_a_kernel_asked_for_by_name_says_that_it_knows_no_window(as_a_user, target, name):
    q = jax.ShapeDtypeStruct((1, 1, HEADS, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((KV_HEADS, 24, 16, 256), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)

    def call(q, kv, sizes):
        return page_attention(q, kv, sizes, sizes, window=7, implementation=name)

    with dispatch.target(*target), pytest.raises(NotImplementedError, match="not what lies before a window"):
        jax.eval_shape(call, q, pool, sizes)


def test_a_name_stands_for_the_ops_that_have_it(as_a_user):
    """Appending has no kernel for GPUs: with the others by name it goes to XLA; alone it says so."""
    state = init_attention(
        1, 2, 128, batch=1, capacity=2048, dtype=jnp.bfloat16, layout="fused", implementation="mosaic_gpu",
        policy=quest_jax.Quest(budget=256, dense_layers=0),
    )  # fmt: skip
    q, kv = jnp.ones((1, 1, 8, 128), jnp.bfloat16), jnp.ones((1, 1, 2, 128), jnp.bfloat16)

    def step(state, q, k, v):
        return quest_jax.attend(0, q, k, v, quest_jax.extend(state, jnp.array([1])))[0]

    with dispatch.target("gpu", "NVIDIA H200", (9, 0)):
        assert str(jax.make_jaxpr(step)(state, q, kv, kv)).count("mpmd_map") >= 2  # scoring and attention
        call = dispatch.describe_call(dispatch.PoolShape(2, 128, 16, 128), jnp.bfloat16, "fused", 8)
        with pytest.raises(NotImplementedError, match="append has no such kernel. These do: 'xla'"):
            dispatch.resolve("append", APPENDS, call, "mosaic_gpu")
    with pytest.raises(ValueError, match="one of 'mosaic_tpu', 'mosaic_gpu', 'xla', got 'triton'"):
        dispatch.resolve("append", APPENDS, call, "triton")
