"""Encoding and decoding: what a caller may give, and what comes back."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quest_jax.tokenizer import Tokenizer
from tests.tokenizer.vocabulary import recorded

KNOWN = sorted(int(i) for i in recorded()["tokens"])


@given(st.lists(st.sampled_from(KNOWN), max_size=40), st.booleans())
def test_decoding_equals_that_of_the_tokenizers_library(smollm2, ids, skip):
    assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(st.sampled_from("".join(recorded()["texts"]).replace("\x00", "")), max_size=30))
def test_decoding_inverts_encoding(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_control_tokens_in_text_can_be_taken_literally(smollm2):
    text = "a<|im_end|>b"
    assert 2 in smollm2.encode(text)
    literal = smollm2.encode(text, parse_special=False)
    assert not set(literal) & {0, 1, 2}
    assert smollm2.decode(literal) == text
    assert 2 in smollm2.encode(text)  # the switch is not left on


@pytest.mark.parametrize("convert", [list, tuple, np.array, jnp.array, lambda ids: np.array(ids, np.int32).tolist()])
def test_ids_come_in_many_forms(smollm2, convert):
    assert smollm2.decode(convert([504, 3575, 282, 4649, 314])) == "The capital of France is"
    assert smollm2.decode([]) == ""
    assert smollm2.decode([np.int32(504), jnp.int32(3575)]) == "The capital"


def test_an_id_without_a_token_is_visible(smollm2):
    assert smollm2.decode([504, 49152, 3575]) == "The\ufffd capital"
    assert smollm2.decode([10**12]) == "\ufffd"


def test_bytes_that_are_no_text_are_replaced_as_the_standard_says(smollm2):
    llama = smollm2.encode("🦙")
    assert len(llama) > 1
    assert smollm2.decode(llama[:1]) == "\ufffd"
    assert smollm2.decode([*llama[:1], 504]) == "\ufffdThe"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, TypeError, "text: expected a string, got NoneType"),
        (b"abc", TypeError, "text: expected a string, got bytes"),
        (["a", "b"], TypeError, "one string at a time"),
        ("a\ud800b", ValueError, r"got '\\ud800' at character 1"),
    ],
)
def test_texts_that_cannot_be_encoded(smollm2, text, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(Tokenizer.encode)(smollm2, text)  # without the type checks of the tests


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([-1], ValueError, "token id: expected at least 0, got -1"),
        (np.array([3, -1]), ValueError, "got -1"),
        ([1.5], TypeError, "token id: expected an integer, got 1.5"),
        (np.array([1.0]), TypeError, "expected an integer"),
        ([[1, 2]], TypeError, r"got \[1, 2\]; pass one flat row"),
        (np.array([[1, 2]]), TypeError, "one flat row"),
        (["a"], TypeError, "expected an integer"),
        ("12", TypeError, "ids: expected a sequence of token ids, got str"),
        (5, TypeError, "ids: expected a sequence of token ids, got int"),
        (np.array(5), TypeError, "ids: expected a sequence of token ids, got int"),
        (None, TypeError, "ids: expected a sequence"),
        ([True], TypeError, "expected an integer, got True"),
    ],
)
def test_ids_that_cannot_be_decoded(smollm2, ids, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(Tokenizer.decode)(smollm2, ids)
