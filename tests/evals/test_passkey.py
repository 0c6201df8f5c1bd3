"""The passkey protocol: what a case is made of, how answers are judged."""

import re

import pytest

from quest_jax import Quest, load, load_tokenizer
from quest_jax.evals import passkey
from tests.models_for_tests import tiny


class WordTokenizer:
    """One id per word or punctuation mark, one per digit: like a real tokenizer, it knows where words end."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(piece) for piece in re.findall(r"\d|[A-Za-z]+|[^\w\s]|\n", text)]


class PairTokenizer:
    """One id per two characters, so that every cut of the text changes the count."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(text[i]) for i in range(0, len(text), 2)]


@pytest.mark.parametrize("tokenizer", [WordTokenizer(), PairTokenizer()])
@pytest.mark.parametrize("n_tokens", [400, 2048, 4096])
def test_cases_come_near_the_length_asked_for(tokenizer, n_tokens):
    cases = passkey.make_cases(tokenizer, n_tokens, 20)
    assert len(cases) == 20
    assert max(case.n_tokens for case in cases) <= n_tokens + 8
    assert min(case.n_tokens for case in cases) >= n_tokens - 16


def test_depths_rise_in_equal_steps_and_the_key_stands_there():
    cases = passkey.make_cases(WordTokenizer(), 2048, 20)
    assert [case.depth for case in cases] == pytest.approx([0.05 * i for i in range(1, 21)])
    for case in cases:
        text = case.context + case.tail
        before, after = re.split(r"\nThe pass key is \d+\. Remember it\. \d+ is the pass key\.\n", text)
        n_before = len(before) - len(passkey.TASK) - 1
        n_after = len(after) - len(passkey.QUESTION) - 1
        assert n_before / (n_before + n_after) == pytest.approx(case.depth, abs=0.001)


def test_the_key_is_stated_twice_in_range_and_nowhere_else_is_a_digit():
    for case in passkey.make_cases(WordTokenizer(), 1024, 30, seed=3):
        assert 1 <= case.key <= 50_000
        assert re.findall(r"\d+", case.context + case.tail) == [str(case.key)] * 2


def test_the_last_400_characters_are_fed_apart():
    tokenizer = WordTokenizer()
    for case in passkey.make_cases(tokenizer, 1024, 7):
        assert len(case.tail) == 400
        assert case.tail.endswith("\nWhat is the pass key? The pass key is")
        assert case.context.startswith("There is an important info hidden")
        assert list(case.context_ids) == tokenizer.encode(case.context)
        assert list(case.tail_ids) == tokenizer.encode(case.tail, add_special_tokens=False)
        assert 0 not in case.tail_ids  # a begin-of-text token stands in front of the context only


def test_cases_depend_on_the_seed_alone():
    first, again, other = (passkey.make_cases(WordTokenizer(), 512, 10, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert [case.key for case in first] != [case.key for case in other]
    assert [case.depth for case in first] == [case.depth for case in other]


@pytest.mark.parametrize(("n_tokens", "n_cases", "says"), [
    (10, 5, "n_tokens: expected at least"),
    (0, 5, "n_tokens: expected at least"),
    (1024, 0, "n_cases: expected at least 1, got 0"),
])  # fmt: skip
def test_impossible_cases_are_refused(n_tokens, n_cases, says):
    with pytest.raises(ValueError, match=says):
        passkey.make_cases(WordTokenizer(), n_tokens, n_cases)


@pytest.mark.parametrize(("answer", "number"), [
    (" 43569.", 43569), ("the pass key is 7", 7), (" 12 13", 12), ("none", None), ("", None), (" 4 3569", 4),
])  # fmt: skip
def test_the_first_integer_counts(answer, number):
    assert passkey.first_integer(answer) == number


def test_retention_counts_what_dense_answers():
    dense = passkey.Outcome(("",) * 4, (True, True, False, True), 1.0)
    sparse = passkey.Outcome(("",) * 4, (True, False, True, True), 0.5)
    assert sparse.retention(dense) == pytest.approx(2 / 3)
    assert sparse.accuracy == 0.75
    assert sparse.retention(passkey.Outcome(("",) * 4, (False,) * 4, 1.0)) is None


class TinyTokenizer(PairTokenizer):
    """Ids below 97, and digits for answers."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [token % 97 for token in super().encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_every_policy_answers_every_case_from_the_same_contexts():
    cases = passkey.make_cases(TinyTokenizer(), 600, 5)
    seen = []
    policies = {"dense": None, "few": Quest(budget=64)}
    outcomes = passkey.run(tiny(), TinyTokenizer(), cases, policies, batch=2, progress=lambda *at: seen.append(at))
    assert {name: len(outcome.answers) for name, outcome in outcomes.items()} == dict.fromkeys(policies, 5)
    assert outcomes["few"].share_read < 0.8 < outcomes["dense"].share_read == 1.0
    assert all(len(answer.split()) == passkey.ANSWER_TOKENS for answer in outcomes["few"].answers)
    assert seen == [(2, 10), (4, 10), (6, 10), (8, 10), (9, 10), (10, 10)]
    # Which cases share a batch changes nothing.
    turned = passkey.run(tiny(), TinyTokenizer(), cases[::-1], {"few": Quest(budget=64)}, batch=2)
    assert turned["few"].answers == outcomes["few"].answers[::-1]


@pytest.mark.parametrize("wrong", [{"cases": []}, {"policies": {}}, {"batch": 0}])
def test_nothing_to_ask_is_refused(wrong):
    right = {"cases": passkey.make_cases(TinyTokenizer(), 600, 1), "policies": {"dense": None}, "batch": 1}
    call = right | wrong
    with pytest.raises(ValueError, match="expected cases, policies and a batch"):
        passkey.run(tiny(), TinyTokenizer(), call["cases"], call["policies"], batch=call["batch"])


@pytest.mark.slow(seconds=200)
@pytest.mark.parametrize("n_tokens", [4096, 2048])
def test_half_the_budget_keeps_nine_of_ten_answers_of_the_real_model(n_tokens):
    tokenizer, params = load_tokenizer("smollm2-135m"), load("smollm2-135m")
    cases = passkey.make_cases(tokenizer, n_tokens, 20)
    policies = {"dense": None, "half": Quest(budget=n_tokens // 2)}
    outcomes = passkey.run(params, tokenizer, cases, policies, batch=5)
    assert outcomes["dense"].accuracy >= 0.9, outcomes["dense"]
    assert outcomes["half"].retention(outcomes["dense"]) >= 0.9, outcomes["half"]
    assert outcomes["half"].share_read < 0.75
