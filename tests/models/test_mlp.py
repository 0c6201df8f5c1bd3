"""The mixture of experts: every way of computing it against a plain loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models import mlp
from quest_jax.models.config import Experts

HIDDEN = 12


def make(experts, hidden=HIDDEN, biased=False, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"router": (hidden, experts.count), "gate_up": (experts.count, hidden, 2 * experts.size),
              "down": (experts.count, experts.size, hidden)}  # fmt: skip
    if biased:
        shapes |= {"router_bias": (experts.count,), "gate_up_bias": (experts.count, 2 * experts.size),
                   "down_bias": (experts.count, hidden)}  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def by_hand(x, matrices, experts, activation):
    m = {name: value.astype(np.float64) for name, value in matrices.items()}
    out = np.zeros(x.shape)
    for n, row in enumerate(x.astype(np.float64)):
        logits = row @ m["router"] + m.get("router_bias", 0)
        best = np.argsort(-logits, kind="stable")[: experts.per_token]
        over = logits if experts.router == "softmax_all" else logits[best]
        weights = np.exp(logits[best] - over.max()) / np.exp(over - over.max()).sum()
        if experts.router == "softmax_all" and experts.normalized:
            weights = weights / weights.sum()
        for weight, e in zip(weights, best, strict=True):
            out[n] += weight * through(row, e, m, activation)
    return out


def through(row, expert, matrices, activation):
    """One token through one expert, in float64."""
    m = {name: value[expert].astype(np.float64) for name, value in matrices.items() if not name.startswith("router")}
    gate, up = np.split(row.astype(np.float64) @ m["gate_up"] + m.get("gate_up_bias", 0), 2)
    if activation == "silu":
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return inner @ m["down"] + m.get("down_bias", 0)


CASES = [
    (Experts(6, 2, 5), "silu", False),
    (Experts(6, 2, 5, normalized=False), "silu", False),
    (Experts(4, 4, 3, "softmax_chosen", biased=True), "swiglu_clamped", True),
    (Experts(9, 1, 8, "softmax_chosen", biased=True), "swiglu_clamped", True),
]


@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 300])
@pytest.mark.parametrize(("experts", "activation", "biased"), CASES)
def test_a_mixture_is_what_the_loop_gives(experts, activation, biased, tokens):
    matrices = make(experts, biased=biased)
    x = np.random.default_rng(tokens).standard_normal((1, tokens, HIDDEN)).astype(np.float32)
    got = mlp.mix_experts(jnp.asarray(x), jax.tree.map(jnp.asarray, matrices), experts, activation)
    expected = by_hand(x[0], matrices, experts, activation)
    np.testing.assert_allclose(got[0], expected, atol=2e-6 * np.abs(expected).max() + 1e-6)


@pytest.mark.parametrize("form", [mlp._blocked, mlp._ragged])
@pytest.mark.parametrize("alike", [False, True])
def test_all_forms_agree(form, alike):
    """Also where every token goes to the same experts, and the others get none."""
    experts = Experts(7, 2, 5, biased=True)
    # As models have it: products of unit variance. Then the bound is a few units in the last place of float32.
    fan_in = {"gate_up": HIDDEN, "down": experts.size}
    matrices = {name: m / np.float32(fan_in.get(name, 1) ** 0.5) for name, m in make(experts, biased=True).items()}
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((70, HIDDEN)).astype(np.float32)
    chosen = np.array([rng.permutation(7)[:2] for _ in range(70)])
    chosen = np.full((70, 2), [6, 3]) if alike else chosen
    expected = np.stack(
        [[through(row, e, matrices, "silu") for e in own] for row, own in zip(rows, chosen, strict=True)]
    )
    got = jax.jit(form, static_argnums=3)(rows, jnp.asarray(chosen, jnp.int32), matrices, "silu")
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_a_mixture_needs_no_room_for_every_expert_times_every_token():
    experts = Experts(32, 2, 64)
    shapes = {"router": (128, 32), "gate_up": (32, 128, 128), "down": (32, 64, 128)}
    matrices = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((1, 1024, 128), jnp.float32)
    program = jax.jit(lambda x, m: mlp.mix_experts(x, m, experts, "silu")).lower(x, matrices).compile()
    pairs = 4 * 1024 * 2 * 128  # bytes of the rows that go to experts
    assert program.memory_analysis().temp_size_in_bytes < 8 * pairs
