"""Tokenizers of GGUF files: ids as llama.cpp gives them, and files that cannot be right."""

import pytest

from quest_jax.tokenizer import Detokenizer, load_tokenizer
from tests.tokenizer.vocabulary import metadata, other_family, prompts, recorded, small_metadata, write_gguf


@pytest.fixture
def load(tmp_path):
    return lambda **changes: load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata(**changes)))


@pytest.fixture
def load_small(tmp_path):
    return lambda **changes: load_tokenizer(write_gguf(tmp_path / "model.gguf", small_metadata(**changes)))


@pytest.mark.parametrize("prompt", prompts(), ids=lambda prompt: prompt["name"])
def test_ids_of_the_reference_prompts(smollm2, prompt):
    assert smollm2.encode(prompt["text"]) == prompt["ids"]
    assert smollm2.decode(prompt["ids"]) == prompt["text"]
    assert smollm2.decode(prompt["greedy_ids"]) == prompt["greedy_text"]


@pytest.mark.parametrize("split", recorded()["ids"])
def test_ids_of_hard_texts_equal_those_of_llama_cpp(load, split):
    tokenizer = load(pre=split, add_bos_token=None)
    found = [tokenizer.encode(text) for text in recorded()["texts"]]
    assert dict(zip(recorded()["texts"], found, strict=True)) == dict(
        zip(recorded()["texts"], recorded()["ids"][split], strict=True)
    )


@pytest.mark.parametrize(("name", "same"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), (None, "default")])
def test_other_names_of_a_split(load, name, same):
    tokenizer = load(pre=name, add_bos_token=None)
    assert [tokenizer.encode(text) for text in recorded()["texts"]] == recorded()["ids"][same]


@pytest.fixture(scope="module", params=["phi3", "qwen2"])
def family(request, tmp_path_factory):
    data = other_family(request.param)
    return data, load_tokenizer(write_gguf(tmp_path_factory.mktemp(request.param) / "model.gguf", data["metadata"]))


def test_ids_of_other_families_equal_those_of_llama_cpp(family):
    data, tokenizer = family
    found = [tokenizer.encode(text) for text in data["texts"]]
    assert dict(zip(data["texts"], found, strict=True)) == dict(zip(data["texts"], data["ids"], strict=True))


def test_streams_of_other_families_give_the_text_whole(family):
    data, tokenizer = family
    for text in data["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = Detokenizer(tokenizer)
        assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)
        if "<" not in text and "▁" not in text:  # written control tokens swallow spaces, or put one behind
            assert tokenizer.decode(ids) == text


def test_a_vocabulary_of_composed_characters_composes_text(family, load):
    data, tokenizer = family
    composed, decomposed = "naïve caf\u00e9", "nai\u0308ve cafe\u0301"
    same = tokenizer.encode(decomposed) == tokenizer.encode(composed)
    assert same == ("qwen2" in data["metadata"].get("tokenizer.ggml.pre"))


def test_answers_end_where_the_family_ends_them(family):
    data, tokenizer = family
    tokens = data["metadata"]["tokenizer.ggml.tokens"]
    ends = {tokens[i] for i in tokenizer.eos_token_ids}
    assert ends == {"<|endoftext|>", "<|end|>" if "<|end|>" in tokens else "<|im_end|>"}


def test_an_inner_message_of_an_answer_does_not_end_it(load_small):
    names = ["<|end|>", "<|return|>", "<|call|>", "a", "b", "ab"]
    assert load_small(tokens=names, eos_token_id=1).eos_token_ids == (1, 2)
    assert load_small(tokens=["<|end|>", "x", "<|call|>", "a", "b", "ab"], eos_token_id=1).eos_token_ids == (1, 0, 2)
    # Some files call an end user-defined: it is one, and text that is not to be trusted does not make it.
    tokenizer = load_small(tokens=["<|im_end|>", *"xyabc"[:4], "ab"], token_type=[4, 1, 1, 1, 1, 1], eos_token_id=1)
    assert tokenizer.eos_token_ids == (1, 0)
    assert tokenizer.encode("ab<|im_end|>") == [5, 0]
    assert 0 not in tokenizer.encode("ab<|im_end|>", parse_special=False)
    # What is written like an end and is an ordinary token is none.
    assert load_small(tokens=names, token_type=[1] * 6, eos_token_id=1).eos_token_ids == (1,)


def test_spaces_in_front_only_where_the_file_asks(load_small):
    names = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b"]
    sentencepiece = dict(model="llama", tokens=names, token_type=[2, 3, 3, 1, 1, 1, 1], merges=None, eos_token_id=None)
    sentencepiece |= dict(
        unknown_token_id=None, bos_token_id=None, add_space_prefix=None, scores=[0.0, 0.0, 0.0, -3.0, -2.0, -1.0, -4.0]
    )
    tokenizer = load_small(**sentencepiece, add_bos_token=None)
    assert tokenizer.encode("a a") == [1, 5, 5] and tokenizer.decode([5, 5]) == "a a"
    assert tokenizer.encode("a</s>a") == [1, 5, 2, 5]
    assert tokenizer.encode("a</s>a", parse_special=False, add_special_tokens=False)[:1] == [5]
    assert 2 not in tokenizer.encode("a</s>a", parse_special=False)
    bare = load_small(**sentencepiece | dict(add_bos_token=None, add_space_prefix=False))
    assert bare.encode("a a") == [1, 4, 5] and bare.decode([5, 5]) == " a a"
    assert load_small(**sentencepiece, add_bos_token=False).encode("a") == [5]
    assert tokenizer.eos_token_ids == (2,) and tokenizer.bos_token_id == 1


def test_what_the_file_says_about_special_tokens(smollm2):
    assert smollm2.eos_token_ids == (2, 0)  # that of the file, and the end of a document by its name
    assert smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert smollm2.encode("x")[0] != 1


def test_every_end_token_counts(load_small):
    tokenizer = load_small(eot_token_id=0, eom_token_id=2, eos_token_ids=[5, 2])
    assert tokenizer.eos_token_ids == (2, 0, 5)


def test_begin_and_end_tokens_are_added_when_the_file_says_so(load_small):
    assert load_small(add_bos_token=True, add_eos_token=True).encode("ab") == [1, 5, 2]
    assert load_small(add_bos_token=True).encode("ab", add_special_tokens=False) == [5]
    assert load_small(pre="llama-bpe", add_bos_token=None).encode("ab") == [1, 5]
    assert load_small(pre="llama-bpe", add_bos_token=False).encode("ab") == [5]


def test_user_defined_tokens_are_found_in_text_but_are_not_special(load_small):
    tokenizer = load_small(
        tokens=["<|endoftext|>", "<a b>", "<|im_end|>", "a", "b", "ab"], token_type=[3, 4, 3, 1, 1, 1]
    )
    assert tokenizer.encode("ab<a b>ab") == [5, 1, 5]
    assert tokenizer.decode([2, 1, 2], skip_special_tokens=True) == "<a b>"


def test_an_added_token_is_text_not_byte_level_characters(load_small):
    tokenizer = load_small(
        tokens=["<|endoftext|>", "naïve", "<|im_end|>", "a", "b", "ab"], token_type=[3, 4, 3, 1, 1, 1]
    )
    assert tokenizer.decode(tokenizer.encode("abnaïve")) == "abnaïve"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(model=None), ValueError, "no tokenizer.ggml.model"),
        (dict(model="bert"), NotImplementedError, "'gpt2' or 'llama'.*got 'bert'.*Hugging Face"),
        (dict(model=7), ValueError, "tokenizer.ggml.model: expected a string"),
        (dict(pre="falcon"), NotImplementedError, "expected tokenizer.ggml.pre to be one of gpt-2, .*got 'falcon'"),
        (dict(model="llama", scores=None), ValueError, "tokenizer.ggml.scores: expected a list of float, got None"),
        (dict(model="llama", scores=[0.0] * 5), ValueError, "one score for each of 6 tokens, got 5"),
        (dict(model="llama", scores=[0.0] * 5 + [float("nan")]), ValueError, "expected finite scores .*NaN"),
        (dict(eot_token_id=6), ValueError, "expected ids of ends below 6, got 6"),
        (dict(model="llama", scores=[0.0] * 6, tokens=[*"abcde", "x" * 300]), ValueError, "at most 256 .*of 300"),
        (dict(model="llama", scores=[0.0] * 6, unknown_token_id=6), ValueError, "unk_token: expected an id below 6"),
        (dict(tokens=None), ValueError, "tokenizer.ggml.tokens: expected a list of str, got None"),
        (dict(tokens=[1, 2]), ValueError, "tokenizer.ggml.tokens: expected a list of str"),
        (dict(merges=None), ValueError, "tokenizer.ggml.merges: expected a list of str"),
        (dict(token_type=None), ValueError, "tokenizer.ggml.token_type: expected a list of int"),
        (dict(token_type=[3, 3, 3, 1, 1]), ValueError, "one token_type for each of 6 tokens, got 5"),
        (dict(tokens=["x", "y", "z", "a", "b", "a"]), ValueError, "expected each token once, got 1 of them again"),
        (dict(merges=["a b c"]), ValueError, "merges of two tokens into a third, got 'a b c'"),
        (dict(merges=["ab"]), ValueError, "merges of two tokens into a third"),
        (dict(merges=["b a"]), ValueError, "merges of two tokens into a third"),
        (dict(eos_token_id=6), ValueError, "eos_token: expected an id below 6, got 6"),
        (dict(bos_token_id=None, add_bos_token=True), ValueError, "gives no id for it"),
        (dict(bos_token_id=None, add_bos_token=None, pre="llama-bpe"), ValueError, "gives no id for it"),
        (dict(add_bos_token="yes"), ValueError, "add_bos_token: expected true or false"),
        ({"tokenizer.chat_template": 5}, ValueError, "chat_template: expected a string"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_files_that_cannot_be_used(load_small, changes, error, message):
    assert load_small().encode("ab") == [5]
    with pytest.raises(error, match=message):
        load_small(**changes)


@pytest.mark.slow
def test_the_real_file():
    tokenizer = load_tokenizer("smollm2-135m")
    assert [tokenizer.encode(prompt["text"]) for prompt in prompts()] == [prompt["ids"] for prompt in prompts()]
    assert [tokenizer.encode(text) for text in recorded()["texts"]] == recorded()["ids"]["smollm"]
    assert tokenizer.eos_token_ids == (2, 0)
