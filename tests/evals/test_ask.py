"""A question decoded by the policy: equal to feeding its tokens and generating, and it leaves the state usable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax import Dense, Quest, decode_step, feed_tokens, make_sampler, prefill, replace_policy
from quest_jax.evals.ask import _run, ask, follow, predict
from tests.models_for_tests import CONFIG, tiny

CONTEXTS = [
    np.random.default_rng(row).integers(0, CONFIG.vocab_size, size).tolist() for row, size in enumerate((90, 70))
]
QUESTIONS = [[5, 9, 8], [1, 2, 3, 5, 7, 6, 5]]


@pytest.fixture(scope="module")
def params():
    return tiny()


@pytest.fixture(scope="module")
def state(params):
    return prefill(params, CONTEXTS, capacity=200, eos_token_ids=())


@pytest.mark.parametrize("policy", [Dense(), Quest(budget=32)])
def test_equal_to_feeding_and_decoding_step_by_step(params, state, policy):
    asked = ask(params, replace_policy(state, policy=policy), QUESTIONS, 6)
    fed = feed_tokens(params, replace_policy(state, policy=policy), QUESTIONS)
    step = jax.jit(decode_step)
    tokens, reads = [], []
    for _ in range(6):
        fed, token = step(params, fed)
        tokens.append(np.asarray(token))
        reads.append(np.asarray(fed.attention.reads.read))
    np.testing.assert_array_equal(asked.tokens, np.stack(tokens, axis=1))
    # Row 1 has the longer question, so its answer ends with the last step.
    np.testing.assert_array_equal(asked.stats.pages_read[-6:, :, 1], np.stack(reads)[:, :, 1])
    assert asked.steps == 7 + 6 == len(asked.stats.pages_read)


def test_the_state_answers_again_and_the_same(params, state):
    sparse = replace_policy(state, policy=Quest(32))
    first, second = ask(params, sparse, QUESTIONS, 4), ask(params, sparse, QUESTIONS, 4)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert state.lengths.tolist() == [90, 70]


def test_the_reads_of_the_question_are_sparse_too(params, state):
    asked = ask(params, replace_policy(state, policy=Quest(32)), QUESTIONS, 4)
    assert asked.stats.sparse[:, 2:].all()
    assert not asked.stats.sparse[:, :2].any()  # the layers that stay dense


def test_questions_of_other_lengths_share_a_program(params, state):
    before = _run._cache_size()
    for questions in (QUESTIONS, [[1], [2, 3]], [list(range(32)), [4]]):
        ask(params, state, questions, 3)
    assert _run._cache_size() == before + 1


@pytest.mark.parametrize(("questions", "new", "says"), [
    ([[1]], 4, "expected 2 questions, one a row, got 1"),
    ([[1], []], 4, "at least one token"),
    ([[1], [97]], 4, r"ids in \[0, 97\)"),
    ([[1] * 300, [1]], 4, "capacity"),
    ([[1], [1]], 0, "max_new_tokens"),
])  # fmt: skip
def test_impossible_questions_are_refused(params, state, questions, new, says):
    with pytest.raises(ValueError, match=says):
        ask(params, state, questions, new)


@pytest.mark.parametrize("wrong", [{"sampler": make_sampler(1.0)}, {"eos": jnp.array([3])}])
def test_a_state_that_samples_or_stops_is_refused(params, state, wrong):
    with pytest.raises(ValueError, match="expected a greedy state without eos"):
        ask(params, state.replace(**wrong), QUESTIONS, 4)


TEXTS = [[5, 9, 8, 3], [1, 2, 3, 5, 7, 6, 5]]


@pytest.mark.slow
def test_a_text_is_measured_against_another_policys_logits(params, state):
    sparse = replace_policy(state, policy=Quest(32))
    exact, found = predict(params, state, TEXTS), predict(params, sparse, TEXTS)
    followed = follow(params, sparse, TEXTS, exact)
    for row, text in enumerate(TEXTS):
        fed = replace_policy(state, policy=Quest(32))
        # The other row is fed as well: its tokens do not matter here.
        for i, token in enumerate(text):
            np.testing.assert_allclose(found[i, row], fed.logits[row], atol=1e-4)
            if i > 0:
                p, q = (jax.nn.softmax(np.float64(x[i, row])) for x in (exact, found))
                np.testing.assert_allclose(followed.nll[i - 1, row], -np.log(q[token]), rtol=1e-4)
                np.testing.assert_allclose(followed.kl[i - 1, row], (p * np.log(p / q)).sum(), atol=1e-5)
                assert followed.agree[i - 1, row] == (p.argmax() == q.argmax())
            fed = feed_tokens(params, fed, [[token], [token]])
    assert np.isnan(followed.nll[3:, 0]).all() and np.isfinite(followed.nll[:, 1]).all()
    assert followed.stats.sparse[:, 2:].all() and len(followed.stats.pages_read) == 7
    assert followed.kl[:3].min() >= 0 and np.nanmax(followed.kl) > 1e-6
    same = follow(params, state, TEXTS, exact)
    np.testing.assert_allclose(np.nan_to_num(same.kl), 0, atol=1e-5)
    assert np.nanmin(same.agree) == 1


@pytest.mark.slow
def test_questions_and_texts_share_a_program_by_their_reference(params, state):
    reference = predict(params, state, TEXTS, room=40)
    assert reference.shape == (40, 2, CONFIG.vocab_size) and not np.asarray(reference[7:]).any()
    before = _run._cache_size()
    answers = ask(params, state, QUESTIONS, 6, reference=reference)
    follow(params, state, TEXTS, reference)
    assert _run._cache_size() == before + 1
    np.testing.assert_array_equal(answers.tokens, ask(params, state, QUESTIONS, 6).tokens)
    with pytest.raises(ValueError, match=r"at least 41 steps, got \(40, 2, 97\)"):
        ask(params, state, [[1], [2]], 40, reference=reference)
    with pytest.raises(ValueError, match="expected a reference of 2 rows"):
        follow(params, state, TEXTS, reference[:, :1])
