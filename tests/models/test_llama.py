"""The decoder as functions: the weight tree, the contract with `attend`, dtypes, ids that do not exist."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from quest_jax.models import llama, numbers
from quest_jax.models.config import LlamaConfig, RopeConfig
from tests.models.dense import attend_dense, init_dense, one_shot, stepwise

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
TOKENS = jnp.array([[5, 0, 49, 7, 7], [1, 2, 3, 4, 11]], jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 5))


apply = jax.jit(llama.apply, static_argnums=(1, 4))
project_logits = jax.jit(llama.project_logits, static_argnums=1)


@functools.cache
def make_weights(config: LlamaConfig = CONFIG, dtype=jnp.float32):
    """Ten times the initial spread: attention is sharp and logits are of order one."""
    weights = llama.init_weights(config, jax.random.key(3), dtype)
    return jax.tree.map(lambda x: x * 10 if x.ndim == 2 else x, weights)


def pass_queries(layer, q, k, v, state):
    return q, state


def paths(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def test_the_tree_is_the_documented_one():
    block = {
        "attn_norm": (24,),
        "qkv": (24, (6 + 2 * 2) * 8),
        "out": (48, 24),
        "mlp_norm": (24,),
        "gate_up": (24, 80),
        "down": (40, 24),
    }
    expected = {f"layer_{i}/{name}": shape for i in range(3) for name, shape in block.items()}
    expected |= {"embed": (50, 24), "norm": (24,)}
    assert paths(llama.abstract_weights(TIED)) == expected
    assert paths(llama.abstract_weights(CONFIG)) == expected | {"lm_head": (24, 50)}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_init_makes_what_abstract_promises(config, dtype):
    abstract, weights = llama.abstract_weights(config, dtype), llama.init_weights(config, jax.random.key(0), dtype)
    assert type(abstract) is type(weights) is dict and type(abstract["layer_0"]) is dict
    assert jax.tree.map(lambda x: (x.shape, x.dtype), weights) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == dtype for leaf in jax.tree.leaves(abstract))


def test_init_is_reproducible_and_every_matrix_is_its_own():
    first, again, other = (llama.init_weights(CONFIG, jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    matrices = [leaf for leaf in jax.tree.leaves(first) + jax.tree.leaves(other) if leaf.ndim == 2]
    corners = {float(matrix[0, 0]) for matrix in matrices}
    assert len(corners) == len(matrices) == 2 * (3 * 4 + 2)
    assert 0.015 < np.std(first["embed"]) < 0.025
    assert np.all(first["norm"] == 1) and np.all(first["layer_2"]["mlp_norm"] == 1)


def test_shapes_order_of_layers_and_state():
    calls = []

    def attend(layer, q, k, v, state):
        calls.append((layer, q.shape, k.shape, v.shape))
        return q, [*state, state[-1] + layer + 1]

    hidden, state = apply(make_weights(), CONFIG, TOKENS, POSITIONS, attend, [jnp.int32(10)])
    heads, kv = (2, 5, 6, 8), (2, 5, 2, 8)
    assert calls == [(i, heads, kv, kv) for i in range(3)]
    assert [int(x) for x in state] == [10, 11, 13, 16]
    assert hidden.shape == (2, 5, 24) and hidden.dtype == jnp.float32
    logits = project_logits(make_weights(), CONFIG, hidden)
    assert logits.shape == (2, 5, 50) and logits.dtype == jnp.float32
    last = project_logits(make_weights(), CONFIG, hidden[:, -1])  # any leading axes
    np.testing.assert_allclose(last, logits[:, -1], atol=1e-5)


def test_one_block_by_hand():
    """In numpy, from the documented columns (all q heads, all k heads, all v heads), with an attend that repeats v."""
    config = dataclasses.replace(CONFIG, n_layers=1)
    weights = make_weights(config)

    def attend(layer, q, k, v, state):
        return jnp.tile(v, (1, 1, 3, 1)), {"q": q, "k": k, "v": v}

    hidden, seen = apply(weights, config, TOKENS, POSITIONS, attend, None)

    def norm(x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.rms_norm_eps)

    block = jax.tree.map(lambda x: np.asarray(x, np.float64), weights["layer_0"])
    x = np.asarray(weights["embed"], np.float64)[np.asarray(TOKENS)]
    q, k, v = (part.reshape(2, 5, -1, 8) for part in np.split(norm(x) @ block["qkv"], [48, 64], axis=-1))
    np.testing.assert_allclose(seen["v"], v, atol=1e-4)
    for name, unturned in (("q", q), ("k", k)):
        # Position 0 is not turned, later ones are, and turning keeps lengths.
        np.testing.assert_allclose(seen[name][:, 0], unturned[:, 0], atol=1e-4)
        assert np.abs(seen[name][:, 1] - unturned[:, 1]).max() > 0.1
        np.testing.assert_allclose(np.linalg.norm(seen[name], axis=-1), np.linalg.norm(unturned, axis=-1), rtol=1e-4)
    x = x + np.tile(v, (1, 1, 3, 1)).reshape(2, 5, 48) @ block["out"]
    gate, up = np.split(norm(x) @ block["gate_up"], 2, axis=-1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ block["down"]
    np.testing.assert_allclose(hidden, norm(x), atol=1e-4)


def test_norm_weights_multiply():
    weights = make_weights()
    doubled, _ = apply({**weights, "norm": weights["norm"] * 2}, CONFIG, TOKENS, POSITIONS, pass_queries, None)
    single, _ = apply(weights, CONFIG, TOKENS, POSITIONS, pass_queries, None)
    np.testing.assert_allclose(doubled, 2 * single, rtol=1e-6)


def test_query_head_h_reads_kv_head_h_over_group():
    """Other values in KV head 1 change what query heads 3, 4, 5 return, and nothing else."""

    def attend(layer, q, k, v, state):
        out, dense = attend_dense(layer, q, k, v, state[0])
        return out, (dense, [*state[1], out])

    weights, outputs = make_weights(), []
    for shift in (0.0, 1.0):
        block = weights["layer_0"]
        edited = {**weights, "layer_0": {**block, "qkv": block["qkv"].at[:, -8:].add(shift)}}
        _, (_, layers) = apply(edited, CONFIG, TOKENS, POSITIONS, attend, (init_dense(CONFIG, 2, 5), []))
        outputs.append(layers[0])
    difference = np.abs(outputs[1] - outputs[0]).max(axis=(0, 1, 3))
    assert np.all(difference[:3] == 0) and np.all(difference[3:] > 0.1)


def test_only_differences_of_positions_matter():
    weights, state = make_weights(), init_dense(CONFIG, 2, 5)

    def logits(positions):
        hidden, _ = apply(weights, CONFIG, TOKENS, positions, attend_dense, state)
        return np.asarray(project_logits(weights, CONFIG, hidden))

    np.testing.assert_allclose(logits(POSITIONS), logits(POSITIONS + 1000), atol=5e-3)
    assert np.abs(logits(POSITIONS) - logits(POSITIONS[:, ::-1])).max() > 0.1


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_stepwise_equals_one_shot(config):
    weights = make_weights(config)
    batch, _ = one_shot(weights, config, TOKENS, init_dense(config, 2, 5))
    np.testing.assert_allclose(stepwise(weights, config, TOKENS[0]), batch[0], atol=2e-5)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_bfloat16_is_close_to_float32_and_says_its_dtypes(config):
    weights, dtypes = make_weights(config, jnp.bfloat16), []

    def attend(layer, q, k, v, state):
        dtypes.extend([q.dtype, k.dtype, v.dtype])
        return attend_dense(layer, q, k, v, state)

    hidden, _ = apply(weights, config, TOKENS, POSITIONS, attend, init_dense(config, 2, 5, jnp.bfloat16))
    assert set(dtypes) == {jnp.dtype(jnp.bfloat16)} and hidden.dtype == jnp.bfloat16
    logits = project_logits(weights, config, hidden)
    assert logits.dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    exact, _ = one_shot(wide, config, TOKENS, init_dense(config, 2, 5))
    error = np.asarray(logits - exact)
    assert 1e-5 < np.sqrt(np.mean(error**2)) < 0.05 * np.std(exact)


def test_norms_of_bfloat16_are_rounded_once():
    """Squares, mean and root in float32: equal to the float32 norm of the same numbers, rounded at the end."""
    x, weight = jax.random.normal(jax.random.key(0), (2, 64, 96), jnp.bfloat16)
    exact = numbers.rms_norm(x.astype(jnp.float32), weight[0].astype(jnp.float32), 1e-5)
    np.testing.assert_array_equal(numbers.rms_norm(x, weight[0], 1e-5), exact.astype(jnp.bfloat16))


def test_an_attend_that_answers_in_float32_keeps_the_residual_bfloat16():
    weights = make_weights(dtype=jnp.bfloat16)
    hidden, _ = apply(weights, CONFIG, TOKENS, POSITIONS, lambda i, q, k, v, s: (q.astype(jnp.float32), s), None)
    assert hidden.dtype == jnp.bfloat16


def test_attend_in_another_layout_is_refused():
    """[B, H, T, D] holds as many numbers and would reshape without complaint."""
    message = r"attend: expected an output of the queries' shape .*\(2, 5, 6, 8\), got \(2, 6, 5, 8\)"
    with pytest.raises(ValueError, match=message):
        apply(make_weights(), CONFIG, TOKENS, POSITIONS, lambda i, q, k, v, s: (q.swapaxes(1, 2), s), None)


def test_weights_of_another_config_are_refused():
    with pytest.raises(ScopeParamShapeError, match="embed.*50, 24.*50, 32"):
        other = dataclasses.replace(CONFIG, hidden_size=32)
        apply(make_weights(other), CONFIG, TOKENS, POSITIONS, pass_queries, None)


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_become_nan(bad):
    hidden, _ = apply(make_weights(), CONFIG, TOKENS.at[0, 2].set(bad), POSITIONS, pass_queries, None)
    assert np.all(np.isnan(hidden[0, 2]))
    assert np.all(np.isfinite(np.delete(hidden.reshape(10, 24), 2, axis=0)))


def test_extreme_embeddings_stay_finite():
    """A row of zeros (norm of nothing), and an outlier whose square would overflow anything narrower than float32."""
    weights = make_weights(dtype=jnp.bfloat16)
    weights = {**weights, "embed": weights["embed"].at[0].set(0).at[49, 3].set(30000)}
    logits, _ = one_shot(weights, CONFIG, TOKENS, init_dense(CONFIG, 2, 5, jnp.bfloat16))
    assert np.all(np.isfinite(logits))


def test_rope_lengths_reach_dynamic_rope_only():
    def rotated(kind, lengths):
        rope = RopeConfig(kind=kind, factor=4.0, original_max_positions=8)
        config = dataclasses.replace(CONFIG, rope=rope, n_layers=1)
        positions = POSITIONS + 1
        _, q = apply(
            make_weights(), config, TOKENS, positions, lambda i, q, k, v, s: (q, q), None, rope_lengths=lengths
        )
        return np.asarray(q)

    mixed = jnp.array([6, 100], jnp.int32)
    assert np.array_equal(rotated("default", None), rotated("default", mixed))
    short, long = np.abs(rotated("dynamic", None) - rotated("dynamic", mixed)).max(axis=(1, 2, 3))
    assert short == 0 and long > 1e-2
