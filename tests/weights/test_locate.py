import inspect
import os
import pathlib
import re

import pytest

from quest_jax.weights import locate as module
from quest_jax.weights.checkpoint import MARKER
from quest_jax.weights.locate import Location, locate


@pytest.fixture
def no_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "fetch_repository", lambda name, **_: asked.append(name) or pathlib.Path("/hub"))
    return asked


@pytest.mark.parametrize(
    ("file", "given", "kind"),
    [
        ("x/config.json", "x", "huggingface"),
        (f"x/{MARKER}", "x", "checkpoint"),
        ("x/model.gguf", "x/model.gguf", "gguf"),
    ],
)
def test_paths(tmp_path, monkeypatch, no_hub, file, given, kind):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (given, f"./{given}", f"{tmp_path}/{given}", pathlib.Path(given)):
        assert locate(spelling) == Location(kind, pathlib.Path(spelling))
    assert locate(f"~/{given}") == Location(kind, tmp_path / given)
    assert no_hub == []


def test_gguf_is_known_by_its_first_bytes(tmp_path):
    (tmp_path / "blob").write_bytes(b"GGUF\3")
    assert locate(tmp_path / "blob").kind == "gguf"


def test_names_and_repositories(tmp_path, monkeypatch, no_hub):
    monkeypatch.setitem(module.MODELS, "smollm2-135m", lambda: pathlib.Path("/cache/x.gguf"))
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m") == Location("gguf", pathlib.Path("/cache/x.gguf"))
    assert locate("HuggingFaceTB/SmolLM2-135M") == Location("huggingface", pathlib.Path("/hub"))
    assert no_hub == ["HuggingFaceTB/SmolLM2-135M"]


@pytest.mark.parametrize(
    "name",
    [
        "smollm3", "SmolLM2-135M", "./smollm2-135m", "/no/such/dir", "a/b/c", "../x", "org/", "/name", "org/name.gguf",
        "org/na me", "org/model.safetensors", "-x/y", pathlib.Path("org/name"),
    ],
)  # fmt: skip
def test_nothing_there(tmp_path, monkeypatch, no_hub, name):
    monkeypatch.chdir(tmp_path)
    text = re.escape(os.fspath(name))
    with pytest.raises(FileNotFoundError, match=f"^{text}: no such model; expected one of the names smollm2-135m"):
        locate(name)
    assert no_hub == []


@pytest.mark.parametrize("name", [None, 3, b"model.gguf", ["a"], object()])
def test_not_a_path(name):
    with pytest.raises(TypeError, match="name_or_path: expected a string or a path, got"):
        inspect.unwrap(locate)(name)  # without the checks of annotations that tests add


@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_empty(name):
    with pytest.raises(ValueError, match="name_or_path: expected the name or path of a model"):
        locate(name)


@pytest.mark.parametrize(
    ("file", "given", "message"),
    [
        ("x/readme", "x", f"expected a directory with config.json .* or {MARKER}"),
        ("x/model.gguf", "x", "give the file .*x/model.gguf itself"),
        ("x/model.safetensors", "x/model.safetensors", "give the directory .*x, which also has the config"),
        ("x/config.json", "x/config.json", "give the directory .*x, which also has the config"),
        ("x/model.bin", "x/model.bin", "expected a GGUF file, got one that starts with b'PK"),
    ],
)
def test_holds_no_model(tmp_path, file, given, message):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=message):
        locate(tmp_path / given)


def test_neither_file_nor_directory(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="expected a file or a directory, got something else"):
        locate(tmp_path / "pipe")
