"""RoPE: frequencies against values recorded from transformers, rotation against complex numbers in float64."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models.config import RopeConfig
from quest_jax.models.rope import apply_rope, attention_scaling, inverse_frequencies, rope_rotation

RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "fixtures" / "parity" / "rope.json").read_text())
STATIC = [row for row in RECORDED if row["case"]["rope_type"] != "dynamic"]


def to_config(case: dict) -> RopeConfig:
    """A row of rope.json (transformers' names) as ours."""
    skipped = ("head_dim", "rope_theta", "rope_type", "original_max_position_embeddings", "max", "length")
    return RopeConfig(
        theta=case["rope_theta"],
        kind=case["rope_type"],
        original_max_positions=case.get("original_max_position_embeddings", case.get("max")),
        **{name: value for name, value in case.items() if name not in skipped},
    )


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['case']['rope_type']}-{row['case']['head_dim']}")
def test_frequencies_equal_transformers(row):
    case, config = row["case"], to_config(row["case"])
    expected = np.array(row["inverse_frequencies"], np.float32)
    if config.kind == "dynamic":
        # Position 1 turns every pair by its frequency; below 0.5 rad arcsin gives it back to float32 accuracy.
        positions, lengths = jnp.array([[1]], jnp.int32), jnp.array([case["length"]], jnp.int32)
        cos, sin = rope_rotation(config, case["head_dim"], positions, lengths)
        actual = np.arctan2(np.float64(sin[0, 0]), np.float64(cos[0, 0]))
    else:
        actual = inverse_frequencies(config, case["head_dim"])
        assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=4e-7)
    assert attention_scaling(config) == pytest.approx(row["attention_scaling"], rel=1e-12)


def test_the_recorded_rows_differ_from_plain_rope():
    """Guards the fixture: a row whose scaling does nothing would test nothing."""
    for row in RECORDED:
        case = row["case"]
        plain = inverse_frequencies(RopeConfig(theta=case["rope_theta"]), case["head_dim"])
        scaled = np.array(row["inverse_frequencies"], np.float32)
        acts = case["rope_type"] != "default" and case.get("length", 10**9) > case.get("max", 0)
        assert (np.abs(scaled / plain - 1).max() > 1e-4) == acts


@pytest.mark.parametrize("row", STATIC, ids=lambda row: f"{row['case']['rope_type']}-{row['case']['head_dim']}")
def test_angles_stay_accurate_up_to_a_million_positions(row):
    """The angle is one float32 product, as in transformers; cosine and sine of it must be exact to float32."""
    config, head_dim = to_config(row["case"]), row["case"]["head_dim"]
    positions = np.array([[0, 1, 2, 1023, 8191, 131071, 524287, 999_999, 1_048_575]], np.int32)
    cos, sin = jax.jit(rope_rotation, static_argnums=(0, 1))(config, head_dim, positions)
    angles = positions[..., None].astype(np.float32) * inverse_frequencies(config, head_dim)
    assert cos.shape == sin.shape == (1, 9, head_dim // 2)
    assert cos.dtype == sin.dtype == jnp.float32
    scaling = attention_scaling(config)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)) * scaling, atol=3e-7)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)) * scaling, atol=3e-7)


def test_rotation_is_a_complex_product_of_the_two_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 16)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [90, 7, 7, 300, 12]], np.int32)
    config = RopeConfig(theta=500.0)
    out = apply_rope(jnp.asarray(x), *rope_rotation(config, 16, jnp.asarray(positions)))
    turn = np.exp(1j * positions[..., None].astype(np.float64) * inverse_frequencies(config, 16))
    turned = (x[..., :8] + 1j * x[..., 8:]) * turn[:, :, None, :]
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
    np.testing.assert_array_equal(out[0, 0], x[0, 0])  # position 0 turns nothing


def test_scores_depend_on_distances_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 64)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned = [
            apply_rope(x, *rope_rotation(RopeConfig(), 64, jnp.array([[at]], jnp.int32)))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(100, 93) == pytest.approx(score(7, 0), abs=1e-4)
    assert abs(score(100, 90) - score(7, 0)) > 1e-2


def test_bfloat16_is_rounded_once():
    """Computed in float32: equals the float32 rotation of the same numbers, rounded."""
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8), jnp.bfloat16)
    rotation = rope_rotation(RopeConfig(), 8, jnp.arange(1000, 1004, dtype=jnp.int32)[None])
    out = apply_rope(x, *rotation)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, apply_rope(x.astype(jnp.float32), *rotation).astype(jnp.bfloat16))


DYNAMIC = RopeConfig(kind="dynamic", factor=4.0, original_max_positions=32)


def test_dynamic_decides_each_row_by_its_own_length():
    positions = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (3, 4))
    cos, _ = rope_rotation(DYNAMIC, 16, positions, jnp.array([32, 33, 100], jnp.int32))
    plain, _ = rope_rotation(RopeConfig(), 16, positions)
    np.testing.assert_array_equal(cos[0], plain[0])  # within the trained length: bit for bit unstretched
    for row, length in enumerate([32, 33, 100]):
        alone, _ = rope_rotation(DYNAMIC, 16, positions[:1], jnp.array([length], jnp.int32))
        np.testing.assert_array_equal(cos[row], alone[0])
    assert np.abs(cos[1] - cos[0]).max() > 1e-4 and np.abs(cos[2] - cos[1]).max() > 1e-2


def test_dynamic_without_lengths_takes_the_last_position():
    positions = jnp.array([[0, 1, 2], [70, 71, 72]], jnp.int32)
    inferred = rope_rotation(DYNAMIC, 16, positions)
    given = rope_rotation(DYNAMIC, 16, positions, jnp.array([3, 73], jnp.int32))
    np.testing.assert_array_equal(inferred, given)


@pytest.mark.parametrize("config", [RopeConfig(), DYNAMIC], ids=["default", "dynamic"])
def test_positions_and_lengths_never_recompile(config):
    function = jax.jit(lambda positions, lengths: rope_rotation(config, 16, positions, lengths))
    for start in (0, 5, 1000):
        positions = start + jnp.arange(3, dtype=jnp.int32)[None]
        function(positions, positions[:, -1] + 1)
    assert function._cache_size() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: inverse_frequencies(DYNAMIC, 2), "head_dim >= 4"),
        (
            lambda: inverse_frequencies(
                RopeConfig(kind="llama3", original_max_positions=64, low_freq_factor=4.0, high_freq_factor=4.0), 8
            ),
            "high_freq_factor > low_freq_factor",
        ),
    ],
)
def test_formulas_without_a_value_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
