"""Every method on every context: what asking and feeding by hand gives, once, whatever was shared and interrupted."""

import numpy as np
import pytest

from quest_jax import Dense, Quest, QuoKA, feed_tokens, generate, prefill
from quest_jax.evals import contexts, retention
from quest_jax.evals.ask import ask
from quest_jax.evals.samples import Sample
from quest_jax.evals.store import Store, source
from quest_jax.policies import registry
from quest_jax.policies.h2o import H2O
from tests.models_for_tests import CONFIG, tiny

pytestmark = pytest.mark.slow


class NumberTokenizer:
    """Texts are numbers with blanks between them."""

    def encode(self, text, *, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def numbers(seed, count):
    return " ".join(map(str, np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)))


def draw(answers=("1", "2", "3", "4", "5")):
    texts = [numbers(0, 90), numbers(1, 70), numbers(2, 80)]
    samples = [
        Sample(texts[0], "5 9 8", (answers[0],), "any_of", 4),
        Sample(texts[1], "1 2 3 5", (answers[1],), "any_of", 4),
        Sample(texts[0], "7", (answers[2],), "any_of", 4),
        Sample(texts[2], "11 12", (answers[3],), "any_of", 3),
    ]
    found = contexts.gather(NumberTokenizer(), samples)
    following = [tuple(range(3, 11)), (4, 5, 6), (1, 2)]
    return [one._replace(following=text) for one, text in zip(found, following, strict=True)]


POLICIES = {"full": Dense(), "quest 32": Quest(32), "h2o 24": H2O(24)}


@pytest.fixture(scope="module")
def found():
    return retention.run(tiny(), NumberTokenizer(), draw(), POLICIES, modes=retention.MODES, batch=2)


def alone(policy, context):
    return prefill(tiny(), [list(context.ids)], policy=policy, capacity=160, eos_token_ids=())


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_those_of_each_question_alone(found, name):
    strict, read = [], []
    for context in draw():
        for one in context.asked:
            state = alone(POLICIES[name], context)
            strict.append(ask(tiny(), state, [one.ids], one.sample.n_new).tokens[0].tolist())
            whole = prefill(
                tiny(), [[*context.ids, *one.ids[:-1]]], policy=POLICIES[name], capacity=160, eos_token_ids=()
            )
            read.append(ask(tiny(), whole, [one.ids[-1:]], one.sample.n_new).tokens[0].tolist())
    decode = NumberTokenizer().decode
    assert found[name].answers == {"sparse": [*map(decode, strict)], "dense": [*map(decode, read)]}


def test_the_text_is_fed_by_the_method(found):
    context = draw()[0]
    for name in ("quest 32", "h2o 24"):
        state, nll = alone(POLICIES[name], context), []
        for token in context.following:
            logits = np.asarray(state.logits[0], np.float64)
            nll.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])
            state = feed_tokens(tiny(), state, [[token]])
        np.testing.assert_allclose(found[name].nll[0], nll[1:], rtol=1e-4, atol=1e-4)
    assert [len(row) for row in found["full"].nll] == [7, 2, 1]
    assert max(map(max, found["full"].kl)) < 1e-5 < max(map(max, found["quest 32"].kl))
    assert min(map(min, found["full"].agree)) == 1


def test_a_method_of_prefill_reads_context_and_question(found):
    policies = {"full": Dense(), "quoka 16": QuoKA(16, chunk=32)}
    read = retention.run(
        tiny(), NumberTokenizer(), draw(), policies, modes=("dense", "text"), batch=3, prefills=True
    )  # fmt: skip
    assert read["full"].answers["dense"] == found["full"].answers["dense"]
    assert max(map(max, read["full"].kl)) < 1e-5 < max(map(max, read["quoka 16"].kl))
    # Decoding is dense; what counts are the chunks of the contexts.
    alone = [
        generate(tiny(), [list(one.ids)], prefill_policy=policies["quoka 16"], max_new_tokens=1).stats.prefill
        for one in draw()
    ]
    assert read["quoka 16"].read == {"prompt": sum(int(one.bytes_read().sum()) for one in alone)}
    assert read["quoka 16"].dense == {"prompt": sum(int(one.bytes_dense().sum()) for one in alone)}
    assert read["full"].share == 1 != read["quoka 16"].share
    context = draw()[1]
    state = prefill(tiny(), [list(context.ids)], prefill_policy=policies["quoka 16"], capacity=160, eos_token_ids=())
    state = contexts.read_on(tiny(), state, [context.asked[0].ids[:-1]])
    assert state.lengths.tolist() == [70 + 3]
    answer = ask(tiny(), state, [context.asked[0].ids[-1:]], 4).tokens[0].tolist()
    assert read["quoka 16"].answers["dense"][2] == NumberTokenizer().decode(answer)


def test_bytes_are_those_of_the_method_and_of_dense(found):
    assert found["full"].share == 1
    assert 0.3 < found["quest 32"].share < 1 and 0.3 < found["h2o 24"].share < 1
    assert found["quest 32"].dense == found["full"].dense


def test_scores_compare_with_the_answers(found):
    one, three, two, four = (text.split()[0] for text in found["quest 32"].answers["sparse"])  # by their contexts
    right = (one, two, three, four)
    again = retention.run(
        tiny(), NumberTokenizer(), [one._replace(following=()) for one in draw(right)], {"quest 32": Quest(32)}, batch=2
    )
    assert again["quest 32"].scores == {"sparse": [1.0] * 4}
    assert again["quest 32"].answers == {"sparse": found["quest 32"].answers["sparse"]}


def test_an_interrupted_run_goes_on_where_it_was(found, tmp_path):
    seen = []

    def stop(done, total):
        seen.append((done, total))
        if len(seen) == 3:
            raise KeyboardInterrupt

    given = dict(modes=retention.MODES, batch=2, settings={"task": "numbers"})
    policies = {name: POLICIES[name] for name in ("full", "quest 32", "h2o 24")}
    with pytest.raises(KeyboardInterrupt):
        retention.run(tiny(), NumberTokenizer(), draw(), policies, store=Store(tmp_path), progress=stop, **given)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 3
    seen.clear()
    again = retention.run(
        tiny(),
        NumberTokenizer(),
        draw(),
        policies,
        store=Store(tmp_path),
        progress=lambda *at: seen.append(at),
        **given,
    )
    assert seen == [(4, 6), (5, 6), (6, 6)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again["h2o 24"]._replace(seconds=0) == found["h2o 24"]._replace(seconds=0)
    assert retention.run(tiny(), NumberTokenizer(), draw(), policies, store=Store(tmp_path), **given) == again


@pytest.mark.parametrize("spoil", [
    lambda cell: cell["sparse"].pop("scores"), lambda cell: cell["sparse"].update(scores="x"),
    lambda cell: cell["sparse"]["scores"][0].pop(), lambda cell: cell["sparse"].update(read=1.5),
    lambda cell: cell["sparse"]["answers"].pop(),
])  # fmt: skip
def test_a_damaged_result_is_named(tmp_path, spoil):
    policies, given = {"full": Dense()}, dict(modes=("sparse",), batch=3)
    cell = {"answers": [["a", "b"], ["c"], ["d"]], "scores": [[1.0, 0.0], [1.0], [0.0]], "read": 1, "dense": 1}
    key = {"method": "full", "source": source(Dense), "contexts": [0, 3]}
    key |= {"page_size": 16, "modes": ["sparse"], "prefills": False}
    result = {"sparse": cell, "seconds": 1.0}
    Store(tmp_path).put(key, result)
    found = retention.run(tiny(), NumberTokenizer(), draw(), policies, store=Store(tmp_path), **given)
    assert found["full"].scores == {"sparse": [1.0, 0.0, 1.0, 0.0]}
    spoil(result)
    Store(tmp_path).put(key, result)
    path = next(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{path.name}: expected a result of an earlier run, got a damaged file"):
        retention.run(tiny(), NumberTokenizer(), draw(), policies, store=Store(tmp_path), **given)


def test_methods_that_remember_start_from_their_own_prompt_once_for_all_budgets():
    every = {f"{name} {b}": registry.find(name).make(b) for name in ("quest", "h2o", "tova", "quoka") for b in (32, 64)}
    assert contexts.groups(every) == [
        ["quest 32", "quest 64"], ["h2o 32", "h2o 64"], ["tova 32", "tova 64"], ["quoka 32", "quoka 64"],
    ]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), [
    ({"contexts": []}, "expected contexts, methods, modes and a batch"), ({"policies": {}}, "got 3, 0, 1 and 4"),
    ({"modes": ()}, "got 3, 1, 0 and 4"), ({"batch": 0}, "got 3, 1, 1 and 0"),
    ({"modes": ("text",), "contexts": [one._replace(following=()) for one in draw()]}, "at least 2 tokens of text"),
    ({"policies": {"quest": Quest(8)}}, "at least one page"),
])  # fmt: skip
def test_nothing_to_measure_is_refused(changes, says):
    given = dict(contexts=draw(), policies={"full": Dense()}, modes=("sparse",), batch=4) | changes
    with pytest.raises(ValueError, match=says):
        retention.run(
            tiny(), NumberTokenizer(), given["contexts"], given["policies"], modes=given["modes"], batch=given["batch"]
        )


def test_a_question_without_tokens_is_refused():
    with pytest.raises(ValueError, match="questions of at least one token"):
        contexts.gather(NumberTokenizer(), [Sample("1 2", "", ("1",), "any_of", 1)])
