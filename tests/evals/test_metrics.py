"""Answers judged by hand, and by slower ways of the same judgement."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quest_jax.evals import metrics
from quest_jax.evals.metrics import score


@pytest.mark.parametrize(("metric", "answer", "answers", "expected"), [
    ("all_of", " 17, 23 and 99.", ("17", "23", "42", "99"), 3 / 4),
    ("all_of", "ABC def", ("abc", "DEF"), 1.0),
    ("all_of", "", ("17",), 0.0),
    ("any_of", "It is Paris, I think", ("London", "paris"), 1.0),
    ("any_of", "Rome", ("London", "Paris"), 0.0),
    ("whole_word", ' Accordion".', ("accordion",), 1.0),
    ("whole_word", "accordions", ("accordion",), 0.0),
    ("whole_word", "room 345.", ("345",), 1.0),
    ("whole_word", "room 3450", ("345",), 0.0),
    ("whole_word", "a+b", ("a+b",), 1.0),  # no pattern
    ("first_integer", " 43569. 7", ("43569",), 1.0),
    ("first_integer", " 7 43569", ("43569",), 0.0),
    ("first_integer", " 043569", ("43569",), 1.0),
    ("first_integer", "none", ("43569",), 0.0),
    ("first_integer", "5", ("many",), 0.0),
    # prediction cat sat mat on hat (5), answer: dog sat on mat (4); shared 3: 2 * 3 / 9
    ("f1", "The cat sat, a mat; on the hat!", ("The dog sat on the mat.",), 6 / 9),
    ("f1", "sat sat", ("sat",), 2 / 3),  # each word as often as it is there
    ("f1", "Yes", ("no", "yes."), 1.0),  # the best answer
    ("f1", "the", ("a",), 0.0),  # nothing but articles
    ("f1", "red\nQuestion: who", ("red",), 0.5),
    ("f1_first_line", "\n\nred\nQuestion: who", ("red",), 1.0),
    ("f1_first_line", "blue\nred", ("red",), 0.0),
    # the police killed the gunman / police kill the gunman: police the gunman, 3 of 5 and of 4
    ("rouge_l", "The police killed the gunman.", ("police kill the gunman",), 6 / 9),
    ("rouge_l", "the gunman kill police", ("police kill the gunman",), 4 / 8),  # the order counts
    ("rouge_l", "x", ("y", "x"), 1.0),
    ("rouge_l", "", ("y",), 0.0),
])  # fmt: skip
def test_judged_by_hand(metric, answer, answers, expected):
    assert score(metric, answer, answers) == pytest.approx(expected)


def longest_common_subsequence(one, other):
    """By definition: every subsequence of the shorter, the longest first."""

    def within(part):
        rest = iter(other)
        return all(item in rest for item in part)

    lengths = range(len(one), -1, -1)
    return next(n for n in lengths if any(within(part) for part in itertools.combinations(one, n)))


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=12))
def test_the_longest_common_subsequence_is_that_of_its_definition(one, other):
    assert metrics.common_length(one, other) == longest_common_subsequence(one, other)


def test_long_texts_take_no_time():
    words = [str(i % 97) for i in range(20_000)]
    assert metrics.common_length(words, words) == 20_000


@given(st.sampled_from(metrics.NAMES), st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_every_text_has_a_score(metric, answer, answers):
    assert 0 <= score(metric, answer, answers) <= 1


@pytest.mark.parametrize("metric", metrics.NAMES)
def test_the_right_answer_is_right_and_another_wrong(metric):
    assert score(metric, "43569", ("43569",)) == 1
    assert score(metric, "12", ("43569",)) == 0
    assert score(metric, "9" * 10_000, ("43569",)) == 0  # more digits than Python reads


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="expected one of all_of, any_of, .*rouge_l, got 'bleu'"):
        score("bleu", "", ("x",))
    for metric in metrics.NAMES:
        with pytest.raises(ValueError, match="answers: expected at least one"):
            score(metric, "x", ())
