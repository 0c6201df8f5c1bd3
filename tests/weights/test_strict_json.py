import pytest

from quest_jax.weights import strict_json
from quest_jax.weights.strict_json import parse_json, read_json


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b'{"a": 1,}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "b": {"c": 1, "c": 2}}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\xff"}',
        b'{"a":' * 200_000,
        b"[" * 1_000_000,
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda text: text[:24].decode("ascii", "replace") + f" ({len(text)})",
)
def test_refuses(text):
    with pytest.raises(ValueError, match="^some file: expected"):
        parse_json(text, "some file")


def test_names_the_duplicate():
    with pytest.raises(ValueError, match="'head_dim' twice"):
        parse_json(b'{"head_dim": 64, "n": 1, "head_dim": 32}', "config.json")


def test_reads_ordinary_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2.5, null, true, "\\u00e9"], "b": {}}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, True, "é"], "b": {}}


def test_size_is_limited_before_parsing(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", 100)
    path = tmp_path / "config.json"
    path.write_text('{"a": "' + "x" * 92 + '"}')
    with pytest.raises(ValueError, match="at most 100 bytes"):
        read_json(path)
    path.write_text('{"a": "' + "x" * 91 + '"}')
    assert len(read_json(path)["a"]) == 91
