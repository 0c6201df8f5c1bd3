"""SmolLM2-135M end to end against recorded answers of transformers in float32."""

import json
import pathlib

import numpy as np
import pytest

import quest_jax

pytestmark = pytest.mark.slow
ORACLE = json.loads(
    (pathlib.Path(__file__).parent / "fixtures/oracle/SmolLM2-135M-Instruct.Q4_1.json").read_text(encoding="utf-8")
)
PROMPTS = ORACLE["prompts"]
OPTIONS = dict(capacity=512, max_new_tokens=32)


@pytest.fixture(scope="module")
def params():
    return quest_jax.load("smollm2-135m")


def agrees(tokens, prompt) -> bool:
    """Equal to the recording, up to the first step whose two best logits lay within 0.02."""
    for token, expected, margin in zip(tokens, prompt["greedy_ids"], prompt["greedy_margins"], strict=False):
        if margin <= 0.02:
            return True
        if token != expected:
            return False
    return True


@pytest.mark.parametrize("budget", [None, 512])
def test_greedy_answers_are_those_of_transformers(params, budget):
    for prompt in PROMPTS:
        out = quest_jax.generate(params, [prompt["ids"]], budget=budget, **OPTIONS)
        tokens = out.tokens[0, : int(out.lengths[0])].tolist()
        assert len(prompt["greedy_ids"]) >= 8 and agrees(tokens, prompt), prompt["name"]


def test_a_ragged_batch_answers_as_its_rows_alone(params):
    out = quest_jax.generate(params, [prompt["ids"] for prompt in PROMPTS], budget=512, **OPTIONS)
    for row, prompt in enumerate(PROMPTS):
        assert agrees(out.tokens[row, : int(out.lengths[row])].tolist(), prompt), prompt["name"]


@pytest.mark.parametrize("chunk", [33, 100])
def test_prefill_logits_are_those_of_transformers(params, chunk):
    for prompt in (PROMPTS[0], PROMPTS[-1]):
        logits = np.asarray(quest_jax.prefill(params, [prompt["ids"]], capacity=512, chunk=chunk).logits[0])
        np.testing.assert_allclose(logits[prompt["top5_ids"]], prompt["top5_logits"], atol=2e-3)
        assert np.argsort(-logits)[:5].tolist() == prompt["top5_ids"]


def test_streamed_text_is_the_generated_text(params):
    tokenizer = quest_jax.load_tokenizer("smollm2-135m")
    prompt = PROMPTS[0]
    chunks = list(quest_jax.stream(params, [prompt["ids"]], tokenizer=tokenizer, budget=512, **OPTIONS))
    text = "".join(chunk.text for chunk in chunks)
    assert text + "<|im_end|>" == prompt["greedy_text"]
    assert [chunk.token for chunk in chunks if chunk.token >= 0] == prompt["greedy_ids"]


def test_stop_strings_end_the_answer(params):
    tokenizer = quest_jax.load_tokenizer("smollm2-135m")
    options = dict(tokenizer=tokenizer, stop=["answer"], **OPTIONS)
    out = quest_jax.generate(params, [PROMPTS[0]["ids"], PROMPTS[1]["ids"]], **options)
    text = tokenizer.decode(out.tokens[0, : int(out.lengths[0])].tolist())
    assert text.endswith(" answer") and text.count("answer") == 1
    streamed = "".join(chunk.text for chunk in quest_jax.stream(params, [PROMPTS[0]["ids"]], **options))
    assert streamed + "answer" == text
