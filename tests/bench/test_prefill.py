"""The prefill bench: its dense yardstick is attention, its model counts what it says, its rows are complete."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import QuoKA, cli
from quest_jax.bench import machine, prefill
from quest_jax.bench.sizes import Shape


def test_the_yardstick_is_causal_attention():
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 6, 16), (2, 64, 16), (2, 64, 16)])
    )
    out = prefill.blocked_attention(q, k, v, 50, 16)  # [K, G * T, D]
    for head in range(6):
        scores = q[:, head] @ k[head // 3].T / 4
        seen = jnp.arange(64) <= 50 + jnp.arange(8)[:, None]
        expected = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v[head // 3]
        np.testing.assert_allclose(out[head // 3, head % 3 * 8 : head % 3 * 8 + 8], expected, atol=2e-6)


def test_operations_are_those_of_the_algorithm():
    shape, policy = Shape(32, 8, 128), QuoKA(1024)
    dense, ours = prefill._operations(shape, 8192, policy)
    assert dense == 2 * 32 * 128 * 8192 * 128  # one product with the keys, one with the values
    assert ours == 8 * 16 * (8192 - 128) * 128 + 2 * 32 * 128 * (1024 + 128) * 128
    assert prefill._operations(shape, 8192, QuoKA(1024, group="each"))[1] - ours == (32 - 8) * 16 * (8192 - 128) * 128
    assert prefill._operations(shape, 1152, policy)[1] == prefill._operations(shape, 1152, policy)[0]


@pytest.mark.slow
def test_the_command_writes_its_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_READ_BYTES", 16 << 20)
    file = tmp_path / "rows.json"
    arguments = ["bench", "prefill", "--lengths", "1024", "--prompts", "--budget", "128", "--rounds", "1"]
    assert cli.main([*arguments, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["shape"], row["method"]) for row in rows] == [
        (shape, method)
        for shape in ("smollm2", "llama-3-8b")
        for method in ("dense, plain arrays", "dense", "QuoKA 128")
    ]
    for start in (0, 3):
        best = min(row["ms"] for row in rows[start : start + 2])
        for row in rows[start : start + 3]:
            assert row["ratio"] == pytest.approx(best / row["ms"]) and row["ms"] > 0
            assert row["achieved"] == pytest.approx(row["ratio"] / row["byte_model"])
    assert rows[2]["byte_model"] > 2 and rows[2]["budget"] == 128 and rows[0]["budget"] is None
    assert "QuoKA 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--lengths", "1000"], ["--lengths", "512"], ["--rounds", "0"], ["--budget", "0"]]
)
def test_bad_sizes_are_refused(arguments, capsys):
    assert cli.main(["bench", "prefill", *arguments]) == 2
    assert "expected" in capsys.readouterr().err
