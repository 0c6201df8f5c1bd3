"""Quantised matrices: what they stand for, products with them, and models made of them."""

import dataclasses
import functools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.models import llama, mlp, quant_cpu
from quest_jax.models.config import Experts
from quest_jax.models.numbers import matmul, take_rows
from quest_jax.models.quant import GROUP, LIMITS, QuantArray, abstract_quantized
from quest_jax.weights.quantize import quantize, quantize_array
from tests.models.dense import init_dense, one_shot
from tests.models_for_tests import CONFIG, tiny

KINDS = sorted(LIMITS)


def make(shape, kind, axis=-2, seed=0) -> tuple[np.ndarray, QuantArray]:
    """Random numbers, of every column in another size, and the quantised matrix."""
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, (*shape[:-1], 1) if axis == -1 else shape[-1:])
    exact = exact.astype(np.float32)
    return exact, jax.tree.map(jnp.asarray, quantize_array(exact, kind, axis, "w"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((64, 5), -2), ((48, 33), -2), ((10, 7), -2), ((65, 1), -2), ((1, 9), -2), ((3, 40, 6), -2), ((7, 96), -1)],
    ids=str,
)
def test_no_number_moves_by_more_than_half_its_scale(kind, shape, axis):
    exact, made = make(shape, kind, axis)
    wide = np.asarray(made.dequantize(jnp.float32))
    assert made.shape == wide.shape == shape and wide.dtype == np.float32
    scales = np.repeat(np.asarray(made.scales), made.group, axis=axis).take(range(shape[axis]), axis)
    assert (np.abs(wide - exact) <= 0.5000001 * scales + 1e-6 * np.abs(exact)).all()
    # What the scale is: the largest number of its column, or of its group of the column.
    largest = np.abs(exact).max(axis=axis, keepdims=True)
    assert (scales <= largest / LIMITS[kind] * 1.000001).all() and made.scales.dtype == jnp.float32
    if kind == "int8":
        np.testing.assert_allclose(scales, np.broadcast_to(largest / 127, shape), rtol=1e-6)
        np.testing.assert_allclose(np.abs(wide).max(axis=axis), largest.squeeze(axis), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_times_a_scale_come_back_exactly(kind):
    """Numbers that are integers times a power of two, the largest integer in every group: nothing is rounded."""
    limit, rng = LIMITS[kind], np.random.default_rng(0)
    integers = rng.integers(-limit, limit + 1, (4, GROUP, 9))
    integers[:, 3] = limit * rng.choice([-1, 1], (4, 9))
    scales = 2.0 ** rng.integers(-20, 20, (4, 1, 9) if kind == "int4" else (1, 1, 9))
    exact = (integers * scales).reshape(-1, 9).astype(np.float32)
    made = quantize_array(exact, kind, -2, "w")
    np.testing.assert_array_equal(made.dequantize(jnp.float32), exact)
    np.testing.assert_array_equal(made.scales, scales[:, 0])
    np.testing.assert_array_equal(quantize_array(-exact, kind, -2, "w").dequantize(jnp.float32), -exact)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_the_smallest_numbers(kind):
    exact = np.zeros((64, 3), np.float32)
    exact[:, 1] = 1e-44
    exact[5, 2] = 1e38
    wide = np.asarray(quantize_array(exact, kind, -2, "w").dequantize(jnp.float32))
    assert (wide[:, 0] == 0).all() and (np.abs(wide[:, 1]) <= 1e-37).all()
    np.testing.assert_allclose(wide[:, 2], exact[:, 2], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(kind, bad):
    exact = np.ones((64, 3), np.float32)
    exact[17, 1] = bad
    with pytest.raises(ValueError, match="^layer_0/qkv: expected finite numbers, got NaN or infinity; load it without"):
        quantize_array(exact, kind, -2, "layer_0/qkv")


@pytest.mark.parametrize("axis", [-1, -2])
def test_bytes(axis):
    for kind, bits, scales in (("int8", 8, 1), ("int4", 4, 1536 // GROUP)):
        made = abstract_quantized((1536, 1536), kind, axis)
        assert made.nbytes == 1536 * 1536 * bits // 8 + 4 * scales * 1536
        _, array = make((128, 128), kind, axis)
        assert array.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(array))
        assert jax.tree.map(jnp.shape, array) == jax.tree.map(
            lambda leaf: leaf.shape, abstract_quantized((128, 128), kind, axis)
        )


@pytest.mark.parametrize("rows", [1, 2, quant_cpu._FEW, quant_cpu._FEW + 1])
@pytest.mark.parametrize(
    ("dtype", "shape", "axis"),
    [
        (jnp.float32, (100, 3), -2),
        (jnp.float32, (7, 5), -2),
        (jnp.float32, (2048, 300), -2),
        (jnp.float32, (1029, 96), -1),
        (jnp.bfloat16, (200, 40), -2),
        (jnp.bfloat16, (5, 20), -1),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_dequantised_matrix(kind, shape, axis, rows, dtype):
    _, made = make(shape, kind, axis)
    x = jax.random.normal(jax.random.key(rows), (rows, shape[axis])).astype(dtype)
    wide = np.asarray(made.dequantize(jnp.float32), np.float64)
    exact = np.asarray(x, np.float64) @ (wide if axis == -2 else wide.T)
    out = jax.jit(functools.partial(matmul, dtype=jnp.float32, contract=axis + 2))(x, made)
    assert out.dtype == jnp.float32 and out.shape == exact.shape
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(wide if axis == -2 else wide.T)
    assert (np.abs(out - exact) <= 1e-6 * size).all()
    shaped = jax.eval_shape(functools.partial(matmul, contract=axis + 2), x.reshape(rows, 1, -1), made)
    assert shaped.dtype == dtype and shaped.shape == (rows, 1, exact.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_other_platforms_compute_the_same(kind, monkeypatch):
    """The branch of GPUs and TPUs, lowered here in place of the CPU's."""
    _, made = make((96, 40), kind)
    x = jax.random.normal(jax.random.key(0), (1, 96))
    ours = matmul(x, made)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default, cuda=None: default(*args))
    np.testing.assert_allclose(ours, matmul(x, made), rtol=0, atol=1e-5 * float(jnp.abs(ours).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_embedding(kind):
    _, made = make((30, 64), kind, -1)
    tokens = jnp.array([[3, 29, 0], [30, -1, 2**31 - 1]])
    rows = np.asarray(take_rows(made, tokens, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(rows[0], made.dequantize(jnp.bfloat16)[tokens[0]].astype(jnp.float32))
    assert np.isnan(rows[1]).all()


@pytest.mark.parametrize("tokens", [1, 2, 40, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_dequantised_stacks(kind, tokens):
    """Few tokens go one by one, many in tiles, some of them shared by the rows of two experts."""
    experts = Experts(count=5, per_token=2, size=24, biased=True)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(*shape):
        return np.array(jax.random.normal(next(keys), shape))

    stacks = {"gate_up": draw(5, 32, 48), "down": draw(5, 24, 32)}
    others = {"router": draw(32, 5), "router_bias": draw(5), "gate_up_bias": draw(5, 48), "down_bias": draw(5, 32)}
    others["router"][:, 4] = 0  # and a bias that nothing beats: an expert that nobody goes to
    others["router_bias"][4] = -1e9
    made = {name: quantize_array(stack, kind, -2, name) for name, stack in stacks.items()}
    made, others = jax.tree.map(jnp.asarray, (made, others))
    wide = {name: stack.dequantize(jnp.float32) for name, stack in made.items()}
    x = jnp.asarray(draw(1, tokens, 32))
    ours, exact = (mlp.mix_experts(x, others | some, experts, "silu") for some in (made, wide))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-5 * float(jnp.abs(exact).max()))


def dequantized(params: quest_jax.Params) -> quest_jax.Params:
    def is_quantized(leaf):
        return isinstance(leaf, QuantArray)

    return params.replace(
        weights=jax.tree.map(
            lambda leaf: leaf.dequantize(params.dtype) if is_quantized(leaf) else leaf,
            params.weights,
            is_leaf=is_quantized,
        )
    )


def variant(tied: bool) -> quest_jax.Params:
    if not tied:
        return tiny()
    weights = {name: leaf for name, leaf in tiny().weights.items() if name != "lm_head"}
    return quest_jax.Params(weights, dataclasses.replace(CONFIG, tie_word_embeddings=True))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model_and_near_the_exact(kind, tied):
    params = variant(tied)
    made = quantize(params, kind)
    assert (made.quantized, made.dtype) == (kind, jnp.float32) and params.quantized is None
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, CONFIG.vocab_size)
    state = init_dense(params.config, 2, 12)
    exact, ours, wide = (
        np.asarray(one_shot(p.weights, params.config, tokens, state)[0]) for p in (params, made, dequantized(made))
    )
    np.testing.assert_allclose(ours, wide, rtol=0, atol=2e-4)
    rms = np.sqrt(np.mean((ours - exact) ** 2)) / exact.std()
    assert (0.001 < rms < 0.06) if kind == "int8" else (0.05 < rms < 0.9)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float32"), ("int4", "bfloat16")])
def test_generation_on_ragged_batches_is_that_of_the_dequantised_model(kind, dtype):
    made = quantize(tiny(jnp.dtype(dtype)), kind)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
    options = dict(max_new_tokens=6, page_size=4, budget=16)
    ours, wide = (quest_jax.generate(p, prompts, **options) for p in (made, dequantized(made)))
    assert ours.tokens.shape == (3, 6)
    if dtype == "float32":
        np.testing.assert_array_equal(ours.tokens, wide.tokens)
    alone = quest_jax.generate(made, prompts[1:2], **options)
    if dtype == "float32":
        np.testing.assert_array_equal(alone.tokens[0], ours.tokens[1])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_widens_no_more_than_blocks(kind, tied, batch):
    """All temporaries of a step together are smaller than one matrix of a layer in float32."""
    config = dataclasses.replace(
        CONFIG, vocab_size=8192, hidden_size=1024, intermediate_size=2048, n_heads=8, n_kv_heads=2, head_dim=128,
        n_layers=2, tie_word_embeddings=tied,
    )  # fmt: skip
    weights = jax.eval_shape(lambda: llama.init_weights(config, jax.random.key(0)))
    weights = quest_jax.weights.quantize.quantize_tree(weights, kind)

    def step(weights, tokens, positions):
        def attend(layer, q, k, v, state):
            return (q, state)

        hidden, _ = llama.apply(weights, config, tokens, positions, attend, None)
        return llama.project_logits(weights, config, hidden)

    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    memory = jax.jit(step).lower(weights, tokens, tokens).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 * 1024 * 2 * 2048
    shapes = [(1024, 1536), (1024, 1024), (1024, 4096), (2048, 1024)]
    head = ((8192, 1024), -1) if tied else ((1024, 8192), -2)
    said = max(quant_cpu.widened_nbytes(s, a, batch) for s, a in [*((s, -2) for s in shapes), head])
    assert memory.temp_size_in_bytes <= 1.25 * said + 64 * batch * (8192 + 4096)


def test_a_matrix_of_another_shape_is_refused():
    params = quantize(tiny(), "int8")
    embed = params.weights["embed"]
    broken = params.weights | {"embed": embed.replace(values=embed.values[:-1], scales=embed.scales[:-1])}
    with pytest.raises(flax.errors.ScopeParamShapeError, match="embed"):
        quest_jax.prefill(params.replace(weights=broken), [[1, 2]])


@pytest.mark.parametrize("weights", ["int3", "", "float32", 8, None])
def test_other_kinds_are_refused(as_a_user, weights):
    with pytest.raises(ValueError, match=r"(weights|quantize): expected .*\"int8\".*, got "):
        quantize(tiny(), weights)


def test_quantising_twice_is_refused():
    with pytest.raises(ValueError, match="expected weights in full precision"):
        quantize(quantize(tiny(), "int8"), "int8")
