"""What the bench's clock says of calls, by clocks that the test moves."""

import types

import jax.numpy as jnp
import pytest

from quest_jax.bench import timing


@pytest.fixture
def clock(monkeypatch):
    """Wall and processor time, which only the candidates move."""
    now = types.SimpleNamespace(wall=100.0, cpu=10.0)
    fake = types.SimpleNamespace(
        perf_counter=lambda: now.wall, process_time=lambda: now.cpu, sleep=lambda seconds: None
    )  # fmt: skip
    monkeypatch.setattr(timing, "time", fake)
    return now


def test_median_quartiles_and_the_first_run_apart(clock):
    walls = iter([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])

    def run():
        clock.wall += next(walls)
        clock.cpu += 6.0

    found = timing.time_interleaved({"a": run}, 5)["a"]
    assert found == pytest.approx((3.0, 2.0, 4.0, 6.0, 9.0 - 3.0))


def test_one_round_that_was_compiled_before(clock):
    def run():
        clock.wall += 2.0

    assert timing.time_interleaved({"a": run}, 1, warm=True)["a"] == (2.0, 2.0, 2.0, 0.0, None)


def test_rounds_go_through_all_candidates_in_turn():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    assert list(timing.time_interleaved(calls, 2)) == list("abc")
    assert "".join(order) == "abc" * 3
    order.clear()
    timing.time_interleaved(calls, 1, warm=True)
    assert "".join(order) == "abc"


def test_the_result_is_waited_for():
    waited = []

    class Slow:
        def block_until_ready(self):
            waited.append(1)
            return self

    timing.time_interleaved({"a": lambda: (jnp.ones(3), Slow())}, 2, warm=True)
    assert len(waited) == 2
