"""A fact hidden in the shipped prose."""

import pytest

from quest_jax.evals.needle import INSTRUCTION, Fact, hide, shipped_text, split_sentences


def count_words(text: str) -> int:
    return len(text.split())


def test_the_shipped_text_is_plain_prose():
    text = shipped_text()
    assert 40_000 < len(text) < 60_000
    assert text.startswith("CHAPTER 35. The Mast-Head.\nIt was during")
    assert text.endswith("I say again he has no face.\n")


def test_sentences_keep_every_word():
    text = shipped_text()
    sentences = split_sentences(text)
    assert " ".join(sentences).split() == text.split()
    assert len(sentences) > 300
    assert split_sentences('He said "Stop!" Then he left. Why?\nNo 3.5 here.') == [
        'He said "Stop!"', "Then he left.", "Why?", "No 3.5 here.",
    ]  # fmt: skip


@pytest.mark.parametrize("n_tokens", [200, 1000, 4000])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_document_has_the_fact_once_at_its_depth(n_tokens, depth):
    fact = Fact()
    document = hide(fact, shipped_text(), n_tokens, depth, count_words)
    assert n_tokens - 200 <= count_words(document) <= n_tokens
    instruction, body = document.split("\n")
    assert instruction == INSTRUCTION
    before, after = body.split(fact.statement)
    sentences = len(split_sentences(before)), len(split_sentences(after))
    assert sentences[0] == pytest.approx(sum(sentences) * depth, abs=1.5)  # a paragraph may end without a full stop


def test_the_question_begins_the_answer_in_the_words_of_the_fact():
    fact = Fact("favorite fruit of the wizard", "papaya")
    assert fact.question.endswith('The favorite fruit of the wizard is "')
    assert fact.statement.count("papaya") == 2


@pytest.mark.parametrize(("answer", "found"), [
    ('accordion".', True), ("Accordion", True), ("an accordion, I think", True),
    ("accordions", False), ("concordion", False), ("", False),
])  # fmt: skip
def test_an_answer_is_searched_for_the_whole_word(answer, found):
    assert Fact().found_in(answer) is found


@pytest.mark.parametrize(("fact", "n_tokens", "depth", "says"), [
    (Fact(), 1000, 1.5, r"depth: expected a fraction in \[0, 1\], got 1.5"),
    (Fact(), 10, 0.5, "tokens: expected .* got 10"),
    (Fact(), 10**6, 0.5, "tokens: expected .* got 1000000"),
    (Fact(answer="whale"), 1000, 0.5, "already holds the answer 'whale'"),
])  # fmt: skip
def test_impossible_documents_are_refused(fact, n_tokens, depth, says):
    with pytest.raises(ValueError, match=says):
        hide(fact, shipped_text(), n_tokens, depth, count_words)
