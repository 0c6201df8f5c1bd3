"""Chat prompts: as transformers renders them, and messages that are not messages."""

import inspect
import json

import pytest

from quest_jax.tokenizer import load_tokenizer
from quest_jax.tokenizer.chat import render_template
from tests.tokenizer.vocabulary import FIXTURES, prompts

USER = [{"role": "user", "content": "Hi"}]


def recorded_chats():
    for name in ("llama2", "llama3"):
        path = FIXTURES / "tokenizer" / name / "expected.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        for i, chat in enumerate(values["chats"]):
            template = values["templates"][chat["template"]]
            yield pytest.param(name, template, chat, id=f"{name}-{chat['template']}-{i}")


@pytest.mark.parametrize(("name", "template", "chat"), list(recorded_chats()))
def test_chats_render_as_in_transformers(name, template, chat):
    tokenizer = load_tokenizer(FIXTURES / "tokenizer" / name)
    if chat["text"] is None:  # the template refuses these messages
        with pytest.raises(ValueError, match="roles must alternate"):
            tokenizer.render_chat(chat["messages"], chat_template=template, **chat["options"])
    else:
        found = tokenizer.render_chat(chat["messages"], chat_template=template, **chat["options"])
        assert found == chat["text"]


def test_the_reference_chats(smollm2):
    by_name = {prompt["name"]: prompt for prompt in prompts()}
    question = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]
    assert smollm2.render_chat(question) == by_name["chat"]["text"]
    assert smollm2.encode_chat(question) == by_name["chat"]["ids"]
    question = [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "List three primary colors."},
    ]
    assert smollm2.encode_chat(question) == by_name["chat_system"]["ids"]


def test_the_begin_token_comes_once():
    tokenizer = load_tokenizer(FIXTURES / "tokenizer" / "llama3")
    ids = tokenizer.encode_chat(USER)
    assert ids.count(400) == 1
    assert tokenizer.encode(tokenizer.render_chat(USER)).count(400) == 2


def test_without_the_start_of_an_answer(smollm2):
    assert smollm2.render_chat(USER, add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    assert smollm2.encode_chat(USER, add_generation_prompt=False)[-2:] == [2, 198]


def test_no_template(smollm2):
    tokenizer = load_tokenizer(FIXTURES / "tokenizer" / "metaspace")
    with pytest.raises(ValueError, match="no chat template.*Pass chat_template"):
        tokenizer.render_chat(USER)
    assert tokenizer.render_chat(USER, chat_template="{{ bos_token }}{{ messages[0].content }}") == "<s>Hi"


def test_messages_are_not_changed_and_may_hold_more(smollm2):
    messages = [{"role": "user", "content": "Hi", "name": "Ann"}]
    template = "{% set m = messages[0] %}{{ m.name }}:{{ m.content }}:{{ tools is none }}:{{ level }}"
    assert smollm2.render_chat(messages, chat_template=template, level=3) == "Ann:Hi:True:3"
    assert messages == [{"role": "user", "content": "Hi", "name": "Ann"}]


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "messages: expected at least one message"),
        ("Hi", TypeError, "messages: expected a list of dicts.*got str; for one question pass"),
        (None, TypeError, "messages: expected a list of dicts.*got NoneType"),
        (USER[0], TypeError, "messages: expected a list of dicts.*got dict"),
        (["Hi"], TypeError, r"messages\[0\]: expected a dict with role and content, got str"),
        ([*USER, None], TypeError, r"messages\[1\]: expected a dict"),
        ([{"content": "Hi"}], ValueError, r"messages\[0\]: expected the keys role and content, got \['content'\]"),
        ([{"role": "user"}], ValueError, r"messages\[0\]: expected the keys role and content, got \['role'\]"),
        ([{"role": "user", "text": "Hi"}], ValueError, "expected the keys role and content"),
        (
            [{"role": "user", "content": None}],
            TypeError,
            r"messages\[0\]\['content'\]: expected a string, got NoneType",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "content.*expected a string, got list"),
        ([{"role": 1, "content": "Hi"}], TypeError, r"messages\[0\]\['role'\]: expected a string, got int"),
        ([{"role": "", "content": "Hi"}], ValueError, "expected a role such as user"),
    ],
)
def test_messages_that_cannot_be_rendered(smollm2, messages, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(render_template)(smollm2.chat_template, messages, {})


def test_a_template_that_is_no_text():
    with pytest.raises(TypeError, match="chat_template: expected a Jinja template as a string, got int"):
        inspect.unwrap(render_template)(5, USER, {})


@pytest.mark.parametrize("content", ["{{ 7 * 7 }}", "{% for x in y %}", "{# comment #}", "<b>&amp;</b>\n  "])
def test_content_is_never_read_as_a_template(smollm2, content):
    rendered = smollm2.render_chat([{"role": "user", "content": content}])
    assert f"<|im_start|>user\n{content}<|im_end|>" in rendered
