"""Tokenizers of Hugging Face directories, against values transformers recorded."""

import json
import shutil

import pytest
import tokenizers

from quest_jax.tokenizer import load_tokenizer
from quest_jax.weights.checkpoint import MARKER
from tests.tokenizer.vocabulary import FIXTURES

NAMES = ("llama2", "llama3", "metaspace")


def expected(name):
    return json.loads((FIXTURES / "tokenizer" / name / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FIXTURES / "tokenizer" / "llama3", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_equal_those_of_transformers(name):
    tokenizer, values = load_tokenizer(FIXTURES / "tokenizer" / name), expected(name)
    assert [tokenizer.encode(text) for text in values["texts"]] == values["ids"]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in values["texts"]]
    assert plain == values["ids_without_special"]
    assert [tokenizer.decode(ids) for ids in values["ids"]] == values["decoded"]
    skipped = [tokenizer.decode(ids, skip_special_tokens=True) for ids in values["ids"]]
    assert skipped == values["decoded_without_special"]


def test_texts_longer_than_the_truncation_of_tokenizer_json_are_whole():
    path = FIXTURES / "tokenizer" / "llama3"
    assert tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).truncation["max_length"] == 8
    assert load_tokenizer(path).decode(load_tokenizer(path).encode("word " * 50)) == "<|begin_of_text|>" + "word " * 50


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_end_tokens_come_from_the_generation_config_then_the_config_and_the_tokenizer(folder):
    eot = 401
    assert load_tokenizer(folder).eos_token_ids == (eot,)
    write(folder / "config.json", {"eos_token_id": 7})
    assert load_tokenizer(folder).eos_token_ids == (7, eot)
    write(folder / "generation_config.json", {"eos_token_id": [9, eot]})
    assert load_tokenizer(folder).eos_token_ids == (9, eot)


def test_special_tokens_may_be_named_in_either_file(folder):
    write(folder / "special_tokens_map.json", {"pad_token": {"content": "<|user|>"}, "eos_token": "<|assistant|>"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens["pad_token"] == "<|user|>"
    assert tokenizer.special_tokens["eos_token"] == "<|eot_id|>"  # tokenizer_config.json wins
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).special_tokens["eos_token"] == "<|assistant|>"
    assert load_tokenizer(folder).chat_template is None


def test_a_token_only_named_as_special_is_found_in_text(folder):
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "<|user|>"]
    state["model"]["vocab"]["<|user|>"] = 402
    write(folder / "tokenizer.json", state)
    assert 402 not in load_tokenizer(folder).encode("a<|user|>b")
    write(folder / "special_tokens_map.json", {"sep_token": "<|user|>"})
    assert 402 in load_tokenizer(folder).encode("a<|user|>b")


def test_the_template_may_be_a_file_a_string_or_a_named_one(folder):
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    write(folder / "tokenizer_config.json", config)
    assert load_tokenizer(folder).chat_template == "D"
    write(folder / "chat_template.jinja", "J\r\n")
    assert load_tokenizer(folder).chat_template == "J\n"


def test_a_repository_is_fetched(folder, monkeypatch):
    monkeypatch.setattr("quest_jax.weights.locate.fetch_repository", lambda repo, **_: {"some/model": folder}[repo])
    assert load_tokenizer("some/model").encode("") == [400]


def set_decoder(decoder):
    def change(folder):
        state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        write(folder / "tokenizer.json", state | {"decoder": decoder})

    return change


def put(name, value):
    return lambda folder: write(folder / name, value)


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), ValueError, "config.json"),
        (put("tokenizer.json", '{"version": "1.0", '), ValueError, "tokenizer.json: expected a tokenizer of the"),
        (put("tokenizer.json", "[" * 100_000), ValueError, "tokenizer.json: expected a tokenizer of the"),
        (put("tokenizer_config.json", "[" * 100_000), ValueError, "tokenizer_config.json: expected JSON with little"),
        (put("tokenizer_config.json", "[]"), ValueError, "tokenizer_config.json: expected a JSON object"),
        (put("tokenizer_config.json", {"eos_token": 5}), ValueError, "eos_token: expected a string or an object.*5"),
        (put("tokenizer_config.json", {"chat_template": 5}), ValueError, "chat_template: expected a string or a list"),
        (put("generation_config.json", {"eos_token_id": "x"}), ValueError, "eos_token_id: expected a token id"),
        (put("generation_config.json", {"eos_token_id": [-1]}), ValueError, "eos_token_id: expected a token id"),
        (put("chat_template.jinja", "x" * 1_100_000), ValueError, "template of at most"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), ValueError, "expected UTF-8 text"),
        (set_decoder({"type": "WordPiece", "prefix": "##", "cleanup": True}), NotImplementedError, "WordPiece"),
        (
            set_decoder({"type": "BPEDecoder", "suffix": "</w>"}),
            NotImplementedError,
            "expected ByteLevel, .*BPEDecoder",
        ),
        (set_decoder({"type": "Sequence", "decoders": [STRIP]}), NotImplementedError, "Strip"),
    ],
)
def test_directories_that_cannot_be_used(folder, change, error, message):
    change(folder)
    with pytest.raises(error, match=message):
        load_tokenizer(folder)


def test_a_model_without_tokenizer_json_says_how_to_make_one(tmp_path):
    write(tmp_path / "config.json", {})
    write(tmp_path / "tokenizer.model", "")
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_of_this_library_has_no_tokenizer(tmp_path):
    write(tmp_path / MARKER, {})
    with pytest.raises(ValueError, match="holds weights and no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(FIXTURES / "tokenizer" / "llama3" / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).encode("") == [400]


@pytest.mark.parametrize(
    ("name", "error"), [("no/such/path", FileNotFoundError), ("", ValueError), ("nope", FileNotFoundError)]
)
def test_names_of_nothing(name, error):
    with pytest.raises(error):
        load_tokenizer(name)
