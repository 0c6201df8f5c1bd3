"""The passkey protocol: what a case is made of, and what the real model finds."""

import re

import pytest

from quest_jax import Dense, Quest, load, load_tokenizer
from quest_jax.evals import contexts, report, retention
from quest_jax.evals.tasks import passkey, registry
from tests.evals.fake_tokenizers import WordTokenizer


def cases(n_tokens=1024, n_cases=7, seed=0):
    return registry.find("passkey").make(WordTokenizer(), n_tokens, n_cases, seed)


def test_depths_rise_in_equal_steps_and_the_key_stands_there():
    samples = cases(2048, 20)
    assert [one.depth for one in samples] == pytest.approx([0.05 * i for i in range(1, 21)])
    for one in samples:
        before, after = re.split(
            r"\nThe pass key is \d+\. Remember it\. \d+ is the pass key\.\n", one.context + one.question
        )
        n_before = len(before) - len(passkey.TASK) - 1
        n_after = len(after) - len(passkey.QUESTION) - 1
        assert n_before / (n_before + n_after) == pytest.approx(one.depth, abs=0.001)


def test_the_key_is_stated_twice_in_range_and_nowhere_else_is_a_digit():
    for one in cases(n_cases=30, seed=3):
        assert 1 <= int(one.answers[0]) <= 50_000
        assert re.findall(r"\d+", one.context + one.question) == [*one.answers] * 2


def test_the_last_400_characters_are_fed_apart():
    for one in cases():
        assert len(one.question) == 400
        assert one.question.endswith("\nWhat is the pass key? The pass key is")
        assert one.context.startswith("There is an important info hidden")


# At every tenth of the depth; `quest-jax eval passkey --cases 20` asks at every twentieth, and at other lengths.
@pytest.mark.slow(seconds=300)
def test_half_the_budget_keeps_nine_of_ten_answers_of_the_real_model():
    n_tokens = 4096
    tokenizer, params = load_tokenizer("smollm2-135m"), load("smollm2-135m")
    asked = contexts.gather(tokenizer, registry.find("passkey").make(tokenizer, n_tokens, 10))
    policies = {"full": Dense(), "quest half": Quest(n_tokens // 2)}
    full, half = report.rows(retention.run(params, tokenizer, asked, policies, batch=5))
    assert full.right["sparse"].mean >= 0.9, full
    assert half.kept["sparse"] is not None and half.kept["sparse"].mean >= 0.9, half
    assert half.share < 0.75
