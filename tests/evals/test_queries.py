"""The test of the rule that picks queries: its prompts, its rules, and what it finds on a real model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import load, load_tokenizer
from quest_jax.evals import queries


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


@pytest.mark.slow
def test_prompts_hold_three_facts_and_say_where_the_answer_stands(tokenizer):
    prompts = queries.make_prompts(tokenizer, 1024)
    for prompt, fact in zip(prompts, queries.FACTS, strict=True):
        assert 900 < len(prompt.ids) <= 1024
        text = tokenizer.decode(prompt.ids)
        assert all(text.count(other.answer) == 2 for other in queries.FACTS) and text.endswith(fact.question)
        spelled = tokenizer.decode([prompt.ids[at] for at in prompt.answer])
        assert spelled.replace('"', "").replace(" ", "") == fact.answer * 2
    for wrong in (639, 100_000):
        with pytest.raises(ValueError, match=rf"tokens: expected 640 to \d+ after the first 0 sentences.* got {wrong}"):
            queries.make_prompts(tokenizer, wrong)
    with pytest.raises(ValueError, match="less than the .* tokens before the last chunk, got 1000"):
        queries.run(load("smollm2-135m"), prompts, (256, 1000))


def test_rules_pick_what_they_say():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 4, 8)), jnp.float32)
    key = jax.random.key(0)
    picks = {rule: np.asarray(queries._picks(rule, q, 8, key))[0] for rule in queries.RULES}
    assert picks["all"].tolist() == [list(range(32))] * 4
    assert picks["last"].tolist() == [list(range(24, 32))] * 4
    assert picks["strided"].tolist() == [list(range(0, 32, 4))] * 4
    for head in range(4):
        mean = q[0, :, head].mean(axis=0)
        cosine = np.asarray(q[0, :, head] @ mean / np.linalg.norm(q[0, :, head], axis=1))
        order = np.argsort(cosine)
        assert picks["far"][head].tolist() == order[:8].tolist()
        assert picks["near"][head].tolist() == order[::-1][:8].tolist()
        assert len(set(picks["random"][head].tolist())) == 8
    assert picks["random"][0].tolist() != picks["random"][1].tolist()


@pytest.mark.slow
def test_the_far_queries_find_what_is_asked_for(tokenizer):
    found = queries.run(load("smollm2-135m"), queries.make_prompts(tokenizer, 2048), (256,))
    share = {rule: by_budget[256] for rule, by_budget in found.items()}
    assert share["far"] > share["random"] + 0.1 and share["far"] > share["near"] + 0.2, share
