"""What methods keep of dense attention: the figures against NumPy, and the command."""

import json

import numpy as np
import pytest

import quest_jax
from quest_jax.evals import fidelity
from quest_jax.evals.capture import capture
from quest_jax.policies.h2o import H2O
from quest_jax.policies.oracle import Oracle
from quest_jax.policies.random_tokens import Random
from quest_jax.policies.sink_window import SinkWindow
from quest_jax.policies.sparq import SparQ
from tests.models_for_tests import deep

IDS, QUERIES, PAGE = [(7 * i * i + i) % 97 for i in range(300)], 12, 8


def measured(**policies):
    return fidelity.run(deep(), IDS, policies, queries=QUERIES, page_size=PAGE)


@pytest.mark.slow
def test_the_figures_of_a_window_are_those_of_numpy():
    params, policy = deep(), SinkWindow(40)
    found = measured(window=policy)["window"]
    captured = capture(params, IDS, PAGE)
    config = params.config
    layer = config.n_layers - 1
    keys, values = (np.asarray(x[0], np.float64) for x in fidelity._by_position(
        captured.state.cache.kv[layer], config.head_dim))  # fmt: skip
    queries = np.asarray(captured.queries[layer][0], np.float64)
    for head in range(config.n_heads):
        mass, recall, away, size = [], [], 0.0, 0.0
        for at in range(len(IDS) - QUERIES, len(IDS)):
            kv = head * config.n_kv_heads // config.n_heads
            scores = keys[: at + 1, kv] @ queries[at, head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            read = [*range(4), *range(at + 1 - 36, at + 1)]
            mass.append(weights[read].sum())
            recall.append(len(set(np.argsort(-weights)[:10].tolist()) & set(read)) / 10)
            exact = weights @ values[: at + 1, kv]
            away += ((weights[read] @ values[read, kv] / weights[read].sum() - exact) ** 2).sum()
            size += (exact**2).sum()
        assert found.mass[-1, head] == pytest.approx(np.mean(mass), abs=1e-5)
        assert found.recall[-1, head] == pytest.approx(np.mean(recall), abs=1e-5)
        assert found.error[-1, head] == pytest.approx(np.sqrt(away / size), abs=1e-4)
    lengths = np.arange(len(IDS) - QUERIES, len(IDS)) + 1
    assert found.share == pytest.approx(40 * QUERIES / lengths.sum())


@pytest.mark.slow
def test_what_a_sound_method_must_show():
    found = measured(full=quest_jax.Dense(), oracle=Oracle(40), blind=Random(40), quest=quest_jax.Quest(40),
                     h2o=H2O(40), sparq=SparQ(40), all=H2O(512))  # fmt: skip
    for name in ("full", "all"):
        assert found[name].mass.min() > 1 - 1e-5 and found[name].error.max() < 1e-4 and found[name].recall.min() == 1
    assert found["full"].share == 1
    for name in ("blind", "quest", "h2o"):
        assert found[name].mass.mean() < found["oracle"].mass.mean(), name
        assert 0 < found[name].share < 1
    assert found["oracle"].recall.mean() > 0.7 > found["blind"].recall.mean()
    # 5 of the 37 pages, and of every page its min and max: an eighth of its bytes.
    assert found["quest"].share == pytest.approx((5 + 37 / 8) / 37, rel=0.03)
    row = json.loads(json.dumps(fidelity.as_json(found)))["quest"]
    assert row["mass"] == pytest.approx(found["quest"].mass.mean())
    assert np.shape(row["error_by_layer_and_head"]) == (deep().config.n_layers - 2, deep().config.n_heads)


def test_lists_per_head_are_counted_once_where_a_group_reads_together():
    found = measured(shared=quest_jax.Quest(40), own=quest_jax.Quest(40, reduce="per_head"))
    assert found["shared"].union == pytest.approx(found["shared"].share, rel=0.02)
    # Three heads a group: their union is at most three lists, and at least one.
    scoring = 1 / PAGE
    lists = (found["own"].share - scoring) / 3
    assert lists < found["own"].union - scoring < 0.97 * 3 * lists


@pytest.mark.slow
def test_the_needle_counts_in_the_heads_that_look_at_it():
    start, end = 17, 22
    far, policies = SinkWindow(40), {"oracle": Oracle(40), "sink": SinkWindow(100, sink=60), "half": Oracle(150)}
    found = fidelity.run(
        deep(), IDS, {"far": far, **policies}, queries=QUERIES, page_size=PAGE, needle=(start, end)
    )  # fmt: skip
    assert found["far"].needle == 0 and found["sink"].needle == 1
    assert 0 < found["oracle"].needle < found["half"].needle <= 1
    assert measured(far=far)["far"].needle is None
    with pytest.raises(ValueError, match="expected a needle before the last 12 tokens, within 288"):
        fidelity.run(deep(), IDS, {"far": far}, queries=QUERIES, needle=(280, 290))


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="expected policies and 1 to 299 queries .* got 0 and 12"):
        measured()
    with pytest.raises(ValueError, match="got 1 and 300"):
        fidelity.run(deep(), IDS, {"full": quest_jax.Dense()}, queries=300)
    with pytest.raises(ValueError, match="at least one page"):
        measured(quest=quest_jax.Quest(4))
