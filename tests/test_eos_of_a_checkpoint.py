"""Generation ends at every id that the files of a model name as an end, whichever file names it."""

import json
import shutil

import pytest

import quest_jax
from tests.tokenizer.vocabulary import FIXTURES

PROMPTS = [[5, 9, 12], [40, 3], [7, 7, 21, 50]]
NEW = 12


def generate(params, **options):
    return quest_jax.generate(params, PROMPTS, max_new_tokens=NEW, capacity=64, chunk=16, **options)


@pytest.fixture(scope="module")
def free() -> list[list[int]]:
    """What the model writes where nothing ends it."""
    return generate(quest_jax.load(FIXTURES / "parity" / "gqa"), eos_token_ids=()).tokens.tolist()


def write(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_rows_end_at_each_of_several_ids(file, free, tmp_path):
    ends = [row[n] for row, n in zip(free, (2, 4, 6), strict=True)]
    expected = [next(n + 1 for n, token in enumerate(row) if token in ends) for row in free]
    assert {row[length - 1] for row, length in zip(free, expected, strict=True)} == set(ends), "each id ends a row"
    shutil.copytree(FIXTURES / "parity" / "gqa", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path / file, eos_token_id=ends)
    params = quest_jax.load(tmp_path)
    assert params.config.eos_token_ids == tuple(dict.fromkeys(ends))
    out = generate(params)
    assert out.lengths.tolist() == expected
    for row, text, length in zip(out.tokens.tolist(), free, expected, strict=True):
        assert row == text[:length] + [-1] * (NEW - length)


def test_generation_config_wins_over_config(free, tmp_path):
    shutil.copytree(FIXTURES / "parity" / "gqa", tmp_path, dirs_exist_ok=True)
    write(tmp_path / "config.json", eos_token_id=[row[0] for row in free])
    write(tmp_path / "generation_config.json", eos_token_id=63)
    assert quest_jax.load(tmp_path).config.eos_token_ids == (63,)
