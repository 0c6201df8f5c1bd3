"""What the doctor says about an environment."""

import io
import json
import pathlib

import jax
import pytest
from rich.console import Console

from quest_jax import doctor
from quest_jax.pallas_kernels.dispatch import Implementation


def render(report) -> str:
    console = Console(file=io.StringIO(), width=200)
    doctor.show(report, console)
    return console.file.getvalue()


def install(folder: pathlib.Path, name: str, *requirements: str):
    """Makes ``importlib.metadata`` see a distribution in ``folder``."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requirements)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_the_report_is_json_and_names_what_runs_here():
    report = doctor.examine()
    assert json.loads(json.dumps(report)) == report
    assert report["versions"]["jax"] == jax.__version__
    assert [(device["platform"], device["id"]) for device in report["devices"]] == [
        (device.platform, device.id) for device in jax.devices()
    ]
    assert report["machine"]["memory_bytes"] > 1e8
    assert {name: op["uses"] for name, op in report["ops"].items()} == dict.fromkeys(
        ("append", "page_scores", "page_attention", "token_scores"), "xla"
    )


def test_everything_of_the_report_is_shown():
    report = doctor.examine()
    shown = render(report)
    for word in (report["versions"]["jax"], "cpu:0", "page_attention", report["cache"]["folder"]):
        assert word in shown


def test_the_reason_against_an_implementation_is_shown(monkeypatch):
    def never(call):
        return f"it needs a TPU, and this is {call.platform}."

    def always(call):
        return None

    implementations = (Implementation("mosaic", print, never), Implementation("xla", print, always))
    monkeypatch.setattr(doctor, "OPS", {"append": implementations})
    report = doctor.examine()
    assert report["ops"] == {"append": {"uses": "xla", "declined": {"mosaic": "it needs a TPU, and this is cpu."}}}
    assert "not mosaic: it needs a TPU, and this is cpu." in render(report)


def test_extras_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "there", 'absent-two; extra == "big"', 'jax; extra == "small"')
    install(
        tmp_path, "toy", "jax", 'jax>=0.1; extra == "full"', "absent-one>=2; extra == 'lacking'",
        'there[big,small]; extra == "nested"', 'toy[full,nested]; extra == "all"',
    )  # fmt: skip
    assert doctor.extras("toy") == {
        "full": [], "lacking": ["absent-one"], "nested": ["absent-two"], "all": ["absent-two"],
    }  # fmt: skip
    assert doctor.extras("never-installed") == {}


@pytest.mark.parametrize("missing, says", [([], "installed"), (["tyro"], 'lacks tyro; pip install "quest-jax[cli]"')])
def test_a_missing_extra_comes_with_its_command(missing, says):
    lines = [" ".join(line.split()) for line in render(doctor.examine() | {"extras": {"cli": missing}}).splitlines()]
    assert f"extra cli {says}" in lines


def test_cached_models_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "empty; smollm2-135m would be fetched" in render(doctor.examine())
    (tmp_path / "quest_jax").mkdir()
    (tmp_path / "quest_jax" / "some.gguf").write_bytes(b"GGUF" * 500_000)
    report = doctor.examine()
    assert report["cache"] == {"folder": str(tmp_path / "quest_jax"), "models": {"some.gguf": 2_000_000}}
    assert "some.gguf (2 MB)" in render(report)
