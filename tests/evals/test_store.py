import importlib.util
import json
import sys

import pytest

from quest_jax.evals.store import Store, source
from quest_jax.policies.lists import ListPolicy

SETTINGS = {"task": "facts", "method": "quest", "budget": 256, "seed": 0}


def test_a_result_is_found_by_its_settings_alone(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    assert store.get(SETTINGS) is None
    store.put(SETTINGS, {"scores": [1.0, 0.0]})
    again = Store(tmp_path / "new" / "folder")
    assert again.get(dict(reversed(SETTINGS.items()))) == {"scores": [1.0, 0.0]}
    assert again.get(SETTINGS | {"seed": 1}) is None
    assert [path.name[:16] for path in (tmp_path / "new" / "folder").iterdir()] == ["facts-quest-256-"]


@pytest.mark.parametrize("text", ["", '{"settings": {}', "[]", '{"result": 1}', "\x00\xff", "[" * 100_000])
def test_a_damaged_file_is_named_and_left_alone(tmp_path, text):
    Store(tmp_path).put(SETTINGS, 1)
    (path,) = tmp_path.iterdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{path.name}: expected a result of an earlier run, got a damaged file"):
        Store(tmp_path)
    assert path.read_text(encoding="utf-8") == text


def test_what_cannot_be_written_leaves_the_old_result(tmp_path):
    store = Store(tmp_path)
    store.put(SETTINGS, [1.0])
    with pytest.raises(ValueError, match="JSON"):
        store.put(SETTINGS, [float("nan")])
    assert store.get(SETTINGS) == [1.0]
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["settings"] == SETTINGS


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("here", encoding="utf-8")
    with pytest.raises(ValueError, match="cells: expected a folder for results .* got Not a directory; name another"):
        Store(tmp_path / "file" / "cells")


def test_a_method_that_was_changed_is_another(tmp_path, monkeypatch):
    """By its own file, and by those of what it inherits from."""

    def loaded(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    base = "from quest_jax.policies.lists import ListPolicy\nclass Base(ListPolicy):\n    scale = {}\n"
    mine = "from base_of_mine import Base\nclass Mine(Base):\n    sign = {}\n"
    digests = []
    for scale, sign in ((1, 1), (1, 1), (1, -1), (2, 1)):
        loaded("base_of_mine", base.format(scale))
        digests.append(source(loaded("mine", mine.format(sign)).Mine))
    assert digests[0] == digests[1] != source(ListPolicy)
    assert len({*digests}) == 3


def test_a_class_without_a_file_is_refused():
    with pytest.raises(ValueError, match="expected a class in a file, .* got Typed; write it to a file"):
        source(type("Typed", (), {"__module__": "__main__ of nothing"}))
