"""Streaming: the pieces join to the whole, are never taken back, and cost the same at the end as at the start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quest_jax.tokenizer import Detokenizer, load_tokenizer
from quest_jax.tokenizer.pieces import Pieces
from tests.tokenizer.vocabulary import FIXTURES, recorded


def stream(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@given(st.data())
def test_pieces_join_to_the_decoded_text_and_are_never_taken_back(any_tokenizer, data):
    # Ids in random order: halves of characters, control tokens, byte pieces, ids without a token.
    low = st.integers(0, min(any_tokenizer.vocab_size, 600))
    known = st.sampled_from(sorted(int(i) for i in recorded()["tokens"]))
    ids = data.draw(st.lists(low | known if any_tokenizer.vocab_size > 600 else low, max_size=30))
    skip = data.draw(st.booleans())
    pushed, rest = stream(any_tokenizer, ids, skip_special_tokens=skip)
    text = any_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pushed) + rest == text
    for n in range(len(ids)):
        assert any_tokenizer.decode(ids[:n], skip_special_tokens=skip).startswith("".join(pushed[:n]))


TEXT = "🦙 👩\u200d👩\u200d👧\u200d👦 🇫🇷 日本語, e\u0301 — naïve <|im_end|>"


@pytest.mark.parametrize("name", ["smollm2", "llama3", "llama2"])
def test_characters_that_take_several_tokens_come_whole(name, smollm2):
    tokenizer = smollm2 if name == "smollm2" else load_tokenizer(FIXTURES / "tokenizer" / name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pushed, rest = stream(tokenizer, ids)
    assert ("".join(pushed), rest) == (TEXT, "")
    assert all("\ufffd" not in piece for piece in pushed)
    assert pushed.count("") >= 3


@pytest.mark.parametrize(
    "text",
    [
        "👨\u200d👩\u200d👧\u200d👦👩🏽\u200d🚀🧑🏿\u200d🤝\u200d🧑🏻",
        "🇫🇷🇯🇵🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f🏳️\u200d🌈",
        "汉字漢字かなカナ한글𠮷𪚥，。「」",
        "1️⃣❤️\u200d🔥é\u0301ก็ நி",
    ],
    ids=["families", "flags", "CJK", "marks"],
)
@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_byte_level_tokens_stream_code_point_by_code_point(name, text, smollm2):
    """A small byte-level vocabulary has a token a byte for these, so nearly every token ends within a character."""
    tokenizer = smollm2 if name == "smollm2" else load_tokenizer(FIXTURES / "tokenizer" / name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pushed, rest = stream(tokenizer, ids)
    assert ("".join(pushed), rest) == (text, "")
    assert len(ids) > len(text) and "\ufffd" not in "".join(pushed)
    for n in range(len(ids)):  # wherever it stops, what was streamed is the start of the text
        assert text.startswith("".join(pushed[:n]))


def test_an_unfinished_character_is_held_until_the_end(smollm2):
    llama = smollm2.encode("🦙")
    pushed, rest = stream(smollm2, llama[:-1])
    assert "".join(pushed) == ""
    assert rest == "\ufffd"


def test_a_character_that_cannot_be_completed_is_replaced_once_that_is_certain(smollm2):
    detokenizer = Detokenizer(smollm2)
    llama = smollm2.encode("🦙")
    assert detokenizer.push(llama[0]) == ""
    assert detokenizer.push(504) == "\ufffdThe"
    assert detokenizer.flush() == ""


def test_the_leading_space_is_removed_once_as_when_decoding():
    tokenizer = load_tokenizer(FIXTURES / "tokenizer" / "llama2")
    ids = tokenizer.encode(" a  b", add_special_tokens=False)
    pushed, _ = stream(tokenizer, ids)
    assert "".join(pushed) == " a  b" == tokenizer.decode(ids)


def test_a_flushed_detokenizer_starts_anew(smollm2):
    detokenizer = Detokenizer(smollm2)
    detokenizer.push(smollm2.encode("🦙")[0])
    detokenizer.flush()
    assert detokenizer.push(504) == "The"


def test_every_token_is_looked_at_once(smollm2, monkeypatch):
    seen = []
    original = Pieces.bytes_of
    monkeypatch.setattr(Pieces, "bytes_of", lambda self, *args: seen.append(args) or original(self, *args))
    stream(smollm2, [504] * 500)
    assert len(seen) == 500


@pytest.mark.parametrize(("token_id", "error"), [(-1, ValueError), (True, TypeError)])
def test_ids_that_cannot_be_pushed(smollm2, token_id, error):
    with pytest.raises(error, match="token id"):
        Detokenizer(smollm2).push(token_id)
