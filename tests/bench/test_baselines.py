"""The dense yardsticks are attention, whatever their form and dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.bench import baselines, decode
from quest_jax.bench.sizes import SHAPES, Shape


def inputs(shape: Shape, length: int, dtype):
    parts = jax.random.split(jax.random.key(0), 3)
    sizes = zip(parts, (shape.heads // shape.kv_heads, length, length), strict=True)
    return [jax.random.normal(part, (shape.kv_heads, n, shape.head_dim), dtype) for part, n in sizes]


def expected(q, keys, values):
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    scores = np.einsum("kgd,kld->kgl", q, keys) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("kgl,kld->kgd", weights / weights.sum(axis=-1, keepdims=True), values)


@pytest.mark.parametrize("shape", [Shape(9, 3, 64), Shape(4, 4, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02)])
def test_every_form_is_attention(shape, dtype, tolerance):
    q, keys, values = inputs(shape, 128, dtype)
    wanted = expected(q, keys, values)
    for out in (
        baselines.split_attention(q, keys, values),
        baselines.grouped_attention(q, keys, values),
        baselines.dot_product_attention(q, keys.swapaxes(0, 1), values.swapaxes(0, 1)),
    ):
        assert out.shape == q.shape
        np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=tolerance)


def test_the_paged_calls_attend_to_the_whole_cache_and_change_nothing_for_the_next():
    shape = SHAPES["smollm2"]
    calls = decode.paged_calls(shape, 512, "float32", {"paged": decode.Dense(), "quest": decode.Quest(512)})
    first = [np.asarray(calls[name]()) for name in ("paged", "quest", "paged")]
    # A budget of all tokens is dense attention, and every run writes the same token to the same place.
    np.testing.assert_allclose(first[1], first[0], atol=2e-6)
    np.testing.assert_array_equal(first[2], first[0])
    state = decode.filled(shape, 512)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 1, heads, 64)) for i, heads in enumerate((9, 3, 3)))
    keys, values = (pool.reshape(3, -1, 64)[:, :512] for pool in state.cache.kv[0])
    keys, values = keys.at[:, 511].set(k[0, 0]), values.at[:, 511].set(v[0, 0])
    np.testing.assert_allclose(first[0].reshape(3, 3, 64), expected(q.reshape(3, 3, 64), keys, values), atol=2e-6)


def test_torch_is_refused_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(baselines, "has_torch", lambda: False)
    with pytest.raises(ImportError, match=r"quest-jax\[bench\]"):
        baselines.torch_attention(*(jnp.ones((1, 1, 8)) for _ in range(3)))


@pytest.mark.parity
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02)])
def test_torch_computes_the_same(dtype, tolerance):
    q, keys, values = inputs(Shape(9, 3, 64), 128, dtype)
    out = baselines.torch_attention(q, keys, values)()
    np.testing.assert_allclose(out[0].double().numpy(), expected(q, keys, values), atol=tolerance)
