"""The check of a device: its dry run, what it needs, and that it times nothing that is wrong."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from quest_jax.bench import device_check, device_correctness, device_timing

ROOT = pathlib.Path(__file__).parents[2]
NEEDLESS = ("beartype", "huggingface_hub", "jaxtyping", "jinja2", "safetensors", "tokenizers", "torch")


@pytest.mark.slow
def test_a_dry_run_needs_only_jax_flax_and_numpy(tmp_path):
    script = ROOT / "quest_jax" / "bench" / "device_check.py"
    out = tmp_path / "result.json"
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({NEEDLESS!r})); "
        f"sys.argv = ['device_check', '--dry-run', '--seed', '3', '--out', {str(out)!r}]; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["seed"] == 3 and result["dry_run"]
    assert len(result["correctness"]) == 4 * len(device_correctness.DRY_RUN)
    assert all(one["passed"] and one["implementation"] == "xla" for one in result["correctness"])
    assert "platform 'cpu'" in result["environment"]["page_attention"]["mosaic_gpu"]
    timing = result["timing"]
    assert timing["copy"]["bytes_per_second"] > 0
    assert [(case["context"], case["batch"]) for case in timing["cases"]] == [(256, 1), (256, 2)]
    for case in timing["cases"]:
        times = {name: one for name, one in case.items() if isinstance(one, dict) and name != "dense over Quest"}
        assert len(times) >= 8
        assert all(one["seconds"] > 0 for one in times.values()), times
        assert set(case["dense over Quest"]) == {name for name in times if "dense" in name}


def test_a_wrong_op_is_found(monkeypatch):
    right = device_correctness.attention_op.page_attention

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return out * 1.02, lse

    monkeypatch.setattr(device_correctness.attention_op, "page_attention", wrong)
    shape = device_correctness.Shape(1, 2, 64, 16, (100,))
    passed = {one["op"]: one["passed"] for one in device_correctness.check(shape, np.random.default_rng(0))}
    assert passed == {"dense": False, "scores": True, "selected scores": True, "sparse": False}


def test_nothing_is_timed_that_is_wrong(monkeypatch, capsys):
    failed = [{"case": "attention of something", "passed": False}]
    monkeypatch.setattr(device_correctness, "check_all", lambda *args: failed)
    monkeypatch.setattr(device_timing, "time_all", lambda *args: pytest.fail("timed"))
    assert device_check.main(["--dry-run", "--seed", "1"]) == 1
    captured = capsys.readouterr()
    assert "timing" not in json.loads(captured.out)
    assert "WRONG, so nothing is timed: attention of something" in captured.err


def test_after_the_time_nothing_is_begun():
    sizes = device_timing.DRY_RUN
    found = device_timing.time_all(sizes, 0, -1.0, lambda line: None)
    assert [case["skipped"] for case in found["cases"]] == ["no time was left"] * 2


def test_what_does_not_fit_is_skipped(monkeypatch):
    monkeypatch.setattr(device_timing, "_memory", lambda: 1e5)
    found = device_timing.time_all(device_timing.DRY_RUN, 0, 60.0, lambda line: None)
    assert all("GB of caches" in case["skipped"] for case in found["cases"])


def test_an_error_is_recorded_not_raised():
    def broken():
        raise NotImplementedError("no such program here")

    found = device_timing._measure(broken, 1, 3, 0, float("inf"))
    assert found == {"error": "NotImplementedError: no such program here"}
