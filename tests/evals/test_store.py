import json

import pytest

from quest_jax.evals.store import Store

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
