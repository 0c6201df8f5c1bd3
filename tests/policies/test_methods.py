"""Every method of the registry, by what any of them must keep: rows, edges, unused memory, compiling, determinism."""

import dataclasses
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax import cli
from quest_jax.models.config import LlamaConfig
from quest_jax.policies import registry
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method
from tests.imports import ROOT

# What methods are fitted to that depend on the model.
CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=32, n_layers=32, n_heads=2, n_kv_heads=2, head_dim=16,
    max_positions=4096,
)  # fmt: skip
PAGE, KV_HEADS, WIDTH, CAPACITY, CHUNK, BUDGET = 8, 2, 16, 256, 24, 48
LENGTHS = (0, PAGE - 1, PAGE, PAGE + 1, BUDGET, BUDGET + 1, 200, CAPACITY)
CASES = [(name, phase) for name, method in registry.methods().items() for phase in method.phases]


def policy_of(name, budget):
    """Without dense layers: there are no more layers here than it takes."""
    policy = registry.find(name).make(budget)
    fields = {field.name for field in dataclasses.fields(policy)}
    return dataclasses.replace(policy, **{name: 0 for name in ("dense_layers",) if name in fields}).fitted(CONFIG)


def layers_of(policy):
    """One, or where layers differ as many as it takes to one that reads what another has chosen."""
    return 1 if policy.at(0, 4) == policy.at(3, 4) else 4


@functools.cache
def draw(group, seed=0):
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), CAPACITY)
    q = 2 * rng.standard_normal((*shape, KV_HEADS * group, WIDTH))
    k, v = rng.standard_normal((2, *shape, KV_HEADS, WIDTH))
    k[:, :, 0] += 0.05 * rng.standard_normal((len(LENGTHS), CAPACITY, WIDTH)).cumsum(axis=1)  # neighbours are alike
    return tuple(x.astype(np.float32) for x in (q, k, v))


def new_tokens(lengths, phase):
    """How many of each row's tokens the step under test brings."""
    return np.minimum(lengths, CHUNK if phase == "prefill" else 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def fill(keeper, layers, q, k, v, lengths):
    """The state of a dense prompt, in a cache whose memory held NaN, with what ``keeper`` keeps beside it."""
    state = quest_jax.init_attention(
        layers, KV_HEADS, WIDTH, batch=len(q), capacity=CAPACITY, page_size=PAGE, policy=keeper, n_heads=q.shape[2]
    )  # fmt: skip
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.cache.kv, state.cache.meta))
    state = state.replace(cache=state.cache.replace(kv=poisoned[0], meta=poisoned[1]))
    return through_layers(q, k, v, quest_jax.extend(state, lengths))[1]


def through_layers(q, k, v, state):
    """Every layer the same tokens; the output of the last."""
    out = None
    for layer in range(len(state.cache.kv)):
        out, state = quest_jax.attend(layer, q, k, v, state)
    return out, state


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(policy, phase, state, q, k, v, new):
    """Brings the last ``new`` tokens by the policy; returns the output, the state, and what the policy lists."""
    by = dict(policy=policy) if phase == "decode" else dict(prefill_policy=policy)
    out, state = through_layers(q, k, v, quest_jax.extend(state.replace(**by), new))
    last = len(state.cache.kv) - 1
    role, view = policy.at(last, last + 1), state.view(last)
    return out, state, None if role.is_dense(last, view) else role.choose(q, view, None), role.covers(view)


def run_by(policy, phase, group, lengths):
    q, k, v = draw(group)
    lengths = np.asarray(lengths)
    new = new_tokens(lengths, phase)
    keeper = policy if policy.keeps_more or policy.carries else quest_jax.Dense()
    state = fill(keeper, layers_of(policy), q, k, v, jnp.asarray(lengths - new))
    width = CHUNK if phase == "prefill" else 1
    at = np.minimum((lengths - new)[:, None] + np.arange(width), CAPACITY - 1)[..., None, None]
    return step(policy, phase, state, *(np.take_along_axis(x, at, axis=1) for x in (q, k, v)), jnp.asarray(new))


def run(name, phase, group, budget):
    out, *others = run_by(policy_of(name, budget), phase, group, LENGTHS)
    return np.asarray(out), *others


def attention(group, row, query, allowed):
    """[H, D] of one query over the tokens in ``allowed``, one set for each query head, in float64."""
    q, k, v = (x[row].astype(np.float64) for x in draw(group))
    out = np.zeros(q.shape[1:])
    for head, tokens in enumerate(allowed):
        seen = np.array(sorted(t for t in tokens if t <= query))
        scores = k[seen, head // group] @ q[query, head] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[seen, head // group]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_step_attends_to_what_the_method_lists(name, phase, group):
    policy, compiled = policy_of(name, BUDGET), step._cache_size()
    out, _, selection, covered = run(name, phase, group, BUDGET)
    assert np.isfinite(out).all() and not out[0].any()
    np.testing.assert_array_equal(out, run(name, phase, group, BUDGET)[0])
    shorter = [length // 2 for length in LENGTHS]
    assert np.isfinite(run_by(policy, phase, group, shorter)[0]).all()
    for row in (3, 6) if group == 3 else ():
        alone = [length if i == row else 0 for i, length in enumerate(LENGTHS)]
        np.testing.assert_allclose(run_by(policy, phase, group, alone)[0][row], out[row], atol=2e-6)
    assert step._cache_size() == compiled + 1, "one program, whatever the lengths"
    for row, length in enumerate(LENGTHS):
        first = length - new_tokens(length, phase)
        whole = registry.find(name).exact and length <= BUDGET  # more is cached of others: not dense by its shapes
        for query in range(first, length) if whole else ():
            want = attention(group, row, query, [range(length)] * KV_HEADS * group)
            np.testing.assert_allclose(out[row, query - first], want, atol=1e-5, err_msg=f"{row} {query}")
    assert (selection is None) == (name == "full"), "the last layer is one that lists what it reads"
    if selection is None:
        return
    plain = type(policy).beside is quest_jax.Policy.beside  # others attend to more than what they list
    pages, counts = np.asarray(selection.pages), np.asarray(selection.counts)
    unit, lists = policy.unit(PAGE), pages.shape[1]
    for row, length in enumerate(LENGTHS):
        new = new_tokens(length, phase)
        if covered is not None and covered[row]:
            continue
        live = [pages[row, one, : counts[row, one]] for one in range(lists)]
        assert all((np.diff(one) > 0).all() for one in live), "ascending, nothing twice"
        assert all(len(one) * unit <= max(BUDGET, 3 * unit) + new + 2 * unit for one in live)
        sets = [{t for page in one for t in range(page * unit, min(length, (page + 1) * unit))} for one in live]
        by_head = [sets[head * lists // (KV_HEADS * group)] for head in range(KV_HEADS * group)]
        for query in range(length - new, length) if plain else ():
            want = attention(group, row, query, by_head)
            np.testing.assert_allclose(out[row, query - length + new], want, atol=1e-5, err_msg=f"{row} {query}")


def test_the_table_of_the_readme_is_that_of_the_registry(capsys, tmp_path):
    readme, written = (ROOT / "README.md").read_text(encoding="utf-8"), tmp_path / "README.md"
    written.write_text(readme.replace("| `quest` |", "| `older` |"), encoding="utf-8")
    assert cli.main(["methods", "--write", str(written)]) == 0
    assert written.read_text(encoding="utf-8") == readme, "renew it: quest-jax methods --write README.md"
    written.write_text("no place", encoding="utf-8")
    assert cli.main(["methods", "--write", str(written)]) == 2
    assert "expected the lines <!-- methods:" in capsys.readouterr().err
    assert cli.main(["methods", "--markdown"]) == 0
    assert capsys.readouterr().out == registry.markdown()
    assert cli.main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(name[:6] in shown for name in registry.methods())


def test_a_method_is_a_file_of_its_own(tmp_path, monkeypatch):
    """As docs/adding_a_method.md has it, whose examples this runs: one file, and it is in the table."""
    text = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    for i, name in enumerate(("every_other", "keep_loud"), start=1):
        (tmp_path / f"{name}.py").write_text(text.split("```python\n")[i].split("```")[0], encoding="utf-8")
    monkeypatch.setattr(importlib.import_module("quest_jax.policies"), "__path__", [*_folder(), str(tmp_path)])
    registry.methods.cache_clear()
    try:
        assert "`every_other`" in registry.markdown() and "`keep_loud`" in registry.markdown()
        test_a_step_attends_to_what_the_method_lists("every_other", "decode", 3)
        test_a_step_attends_to_what_the_method_lists("keep_loud", "decode", 3)
        _, state, selection, _ = run("every_other", "decode", 3, 24)
        assert int(state.reads.read[0, -1]) == 24 * KV_HEADS
        assert np.asarray(selection.pages)[-1, 0].tolist() == list(range(CAPACITY - 47, CAPACITY, 2))
    finally:
        registry.methods.cache_clear()


def _folder():
    return list(importlib.import_module("quest_jax.policies").__path__)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected one of .*full.*quest.*got 'quset'"):
        registry.find("quset")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "from quest_jax.policies.full import METHODS as METHODS", ValueError,
            "full.py and mine.py both have a method 'full'; rename one",
        ),
        (
            "from quest_jax.policies.full import METHODS as ONE\nMETHODS = ONE[0]", ValueError,
            r"mine.py: expected METHODS to be a tuple of .*Method, such as \(Method\(...\),\), got Method",
        ),
        ("METHODS = (int,)", ValueError, "mine.py: expected METHODS to be a tuple of"),
        ("import no_such_thing", ImportError, "policies/mine.py: No module named 'no_such_thing'"),
    ],
)  # fmt: skip
def test_a_file_that_lists_no_methods_is_named(tmp_path, monkeypatch, text, error, message):
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(importlib.import_module("quest_jax.policies"), "__path__", [*_folder(), str(tmp_path)])
    monkeypatch.delitem(sys.modules, "quest_jax.policies.mine", raising=False)
    registry.methods.cache_clear()
    try:
        with pytest.raises(error, match=message):
            registry.methods()
    finally:
        monkeypatch.undo()
        registry.methods.cache_clear()
        sys.modules.pop("quest_jax.policies.mine", None)


@dataclasses.dataclass(frozen=True)
class Misshapen(ListPolicy):
    def score(self, q, view):
        return jnp.zeros((len(q), view.capacity))


def test_scores_of_another_shape_are_refused(as_a_user):
    state = quest_jax.init_attention(
        1, KV_HEADS, WIDTH, batch=3, capacity=64, page_size=PAGE, policy=Misshapen(32, dense_layers=0)
    )
    q, k = np.ones((3, 1, 4, WIDTH), np.float32), np.ones((3, 1, KV_HEADS, WIDTH), np.float32)
    with pytest.raises(ValueError, match=r"Misshapen: expected score to return \[3, 2, 64\], .* got \[3, 64\]"):
        quest_jax.attend(0, q, k, k, quest_jax.extend(state, np.ones(3, int)))


@pytest.mark.parametrize("name", registry.methods())
def test_what_evicts_says_so(name):
    assert (registry.find(name).kind == "evict") == (
        "decode" in registry.find(name).phases and getattr(registry.find(name).make(BUDGET), "drops", False)
    )


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": "Quest Box"}, "name in lower case"), ({"phases": ()}, "expected phases"),
    ({"phases": ("train",)}, "expected phases"), ({"phases": "decode"}, "expected phases"),
    ({"kind": "evicts"}, "expected kind select or evict, got 'evicts'"),
    ({"make": quest_jax.Quest(64)}, "expected make to be a class of policies, got Quest"),
    ({"reads": 1}, "expected reads and source in words, got 1"), ({"name": 1}, "name in lower case"),
])  # fmt: skip
def test_a_method_that_is_none_is_refused(as_a_user, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Method(**{"name": "x", "make": quest_jax.Quest, "phases": ("decode",), "reads": "", "source": ""} | changes)
