"""The examples run, and do what they say."""

import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_a_model_of_your_own():
    example = runpy.run_path(str(ROOT / "colab/own_model.py"))
    model = example["Decoder"]()
    prompt = jax.random.randint(jax.random.key(1), (1, 300), 0, example["VOCAB"])
    weights = model.init(jax.random.key(0), prompt, None, lambda layer, q, k, v, state: (q, state))
    dense, _ = example["generate"](model, weights, prompt, 12, None)
    whole, _ = example["generate"](model, weights, prompt, 12, 512)
    sparse, reads = example["generate"](model, weights, prompt, 12, 64)

    # The same without any cache: causal attention over the whole text, anew for every token.
    def plain(layer, q, k, v, state):
        k, v = (np.repeat(x, example["HEADS"] // example["KV_HEADS"], axis=2) for x in (k, v))
        scores = np.einsum("bthd,blhd->bhtl", q, k) / example["WIDTH"] ** 0.5
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("bhtl,blhd->bthd", weights / weights.sum(axis=-1, keepdims=True), v)
        return out.astype(np.float32), state

    tokens = np.asarray(prompt)
    for _ in range(12):
        token, _ = model.apply(weights, tokens, None, plain)
        tokens = np.concatenate([tokens, token], axis=1)
    assert dense == whole == tokens[0, 300:].tolist()
    assert len(sparse) == 12 and reads.read[:, 0].tolist() == [2 * 20, 2 * 4, 2 * 4]
    assert len((ROOT / "colab/own_model.py").read_text().splitlines()) <= 40


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.slow
def test_the_readme_runs(capsys):
    """Every Python block of the README, in order and in one namespace; the values in its comments are checked there."""
    namespace: dict = {}
    blocks = readme_blocks()
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].tokens.tolist()[0][0] == 7042  # " Paris"
    answers = namespace["serve"](["The capital of France is", "def fibonacci(n):"], max_new_tokens=8)
    assert answers[0].startswith(" Paris") and len(answers[1]) > 5
