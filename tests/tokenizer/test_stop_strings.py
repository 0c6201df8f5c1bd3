"""Stop strings: the result does not depend on how the text is cut, and nothing of a stop string is ever shown."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quest_jax.tokenizer import StopStrings

LETTERS = st.text("ab", max_size=5)


def first_end(text, stop):
    """By definition: the text before the stop string that is complete first, the longest of those that end there."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("ab", max_size=8), max_size=6), st.lists(LETTERS.filter(bool), max_size=4))
def test_any_cut_gives_what_the_definition_gives(chunks, stop):
    text, matched = first_end("".join(chunks), stop)
    matcher, shown = StopStrings(stop), ""
    for chunk in chunks:
        piece, stopped = matcher.push(chunk)
        shown += piece
        assert text.startswith(shown)
        assert stopped == (matcher.matched is not None)
    assert matcher.matched == matched
    assert shown + matcher.flush() == text


@given(st.text("ab", max_size=20), st.lists(LETTERS.filter(bool), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stop):
    matcher = StopStrings(stop)
    shown, stopped = matcher.push(text)
    held = text[len(shown) :]
    if not stopped:
        possible = [n for n in range(len(text) + 1) if any(string.startswith(text[n:]) for string in stop)]
        assert held == text[min(possible) :]


def test_a_stop_string_over_several_pieces():
    matcher = StopStrings(["\nUser:", "###"])
    assert matcher.push("Paris.\n") == ("Paris.", False)
    assert matcher.push("Us") == ("", False)
    assert matcher.push("ual. ##") == ("\nUsual. ", False)
    assert matcher.push("# more") == ("", True)
    assert matcher.matched == "###"
    assert matcher.push("and more") == ("", True)
    assert matcher.flush() == ""


def test_held_text_comes_at_the_end_and_the_matcher_can_be_used_again():
    matcher = StopStrings("abc")
    assert matcher.push("xab") == ("x", False)
    assert matcher.flush() == "ab"
    assert matcher.push("c") == ("c", False)
    assert matcher.push("abc") == ("", True)
    matcher.flush()
    assert matcher.matched is None
    assert matcher.push("x") == ("x", False)


def test_without_stop_strings_everything_passes():
    matcher = StopStrings()
    assert matcher.push("anything 🦙") == ("anything 🦙", False)
    assert matcher.flush() == ""


def test_one_string_is_not_a_list_of_letters():
    assert StopStrings("ab").push("a-b-ab!") == ("a-b-", True)


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ([""], ValueError, "stop: expected non-empty strings"),
        ("", ValueError, "stop: expected non-empty strings"),
        ([5], TypeError, "stop: expected strings, got 5"),
        (["a", None], TypeError, "stop: expected strings, got None"),
        ([b"a"], TypeError, "stop: expected strings, got b'a'"),
    ],
)
def test_stop_strings_that_cannot_be_used(stop, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(StopStrings.__init__)(object.__new__(StopStrings), stop)
