"""The chat templates of the families render as transformers renders them, on recorded conversations."""

import datetime
import json

import pytest

from quest_jax.tokenizer import template_functions
from quest_jax.tokenizer.chat import render_template
from tests.tokenizer.vocabulary import FIXTURES

RECORDED = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((FIXTURES / "templates").glob("*.json"))
}
CHATS = [
    pytest.param(name, chat, id=f"{name}-{i}") for name in RECORDED for i, chat in enumerate(RECORDED[name]["chats"])
]


@pytest.fixture(autouse=True)
def recorded_time(monkeypatch):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat("2026-01-02T03:04:05")

    monkeypatch.setattr(template_functions.datetime, "datetime", Clock)


def render(name: str, messages: list, options: dict) -> str:
    variables = {"tools": None, "documents": None, "add_generation_prompt": True}
    return render_template(RECORDED[name]["template"], messages, variables | RECORDED[name]["special_tokens"] | options)


def test_every_family_is_recorded_with_its_source():
    assert {*RECORDED} == {
        "gemma3", "gpt_oss", "llama2", "llama3_1", "llama3_2", "mistral", "phi3", "qwen2_5", "qwen3", "smollm3",
    }  # fmt: skip
    for name, recorded in RECORDED.items():
        assert recorded["now"] == "2026-01-02T03:04:05"
        assert "licen" in recorded["source"].lower() or "Apache-2.0" in recorded["source"]
        assert (FIXTURES / "templates" / f"{name}.json").stat().st_size < 60_000
        assert sum("text" in chat for chat in recorded["chats"]) > 10


@pytest.mark.parametrize(("name", "chat"), CHATS)
def test_renders_as_in_transformers(name, chat):
    if "text" in chat:
        assert render(name, chat["messages"], chat["options"]) == chat["text"]
    else:
        with pytest.raises(ValueError, match="The chat template stopped with") as caught:
            render(name, chat["messages"], chat["options"])
        assert chat["error"].rstrip(".") in str(caught.value)


def test_thinking_is_switched():
    question = [{"role": "user", "content": "Hi"}]
    for name in ("qwen3", "smollm3"):
        thinks, answers = (render(name, question, {"enable_thinking": on}) for on in (True, False))
        assert answers.endswith("<think>\n\n</think>\n\n" if name == "qwen3" else "<think>\n\n</think>\n")
        assert not thinks.endswith("</think>\n\n") and thinks.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_found_under_each_of_their_names(key):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", key: "A greeting."}]
    for name in ("qwen3", "gpt_oss"):
        assert "A greeting." in render(name, messages, {"add_generation_prompt": False})
    assert messages[1].keys() == {"role", "content", key}


@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_call_of_tools_needs_no_words(content):
    tool_call = {"function": {"name": "now", "arguments": {}}}
    messages = [{"role": "user", "content": "Time?"}, {"role": "assistant", "tool_calls": [tool_call], **content}]
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in render("qwen3", messages, {})
