"""Writes tests/fixtures/templates: chat templates of the families, and conversations as transformers renders them.

Most templates are those the models ship, as the Apache-2.0 package TRL carries them; those of Llama 2, Mistral and
SmolLM3 are written here, after the models' prompt formats. Run from the repository's root, with transformers (5.24
recorded):

    pip download --no-deps trl==1.16.0
    python tests/parity/record_templates.py trl-1.16.0-py3-none-any.whl
"""

import datetime
import json
import pathlib
import sys
import zipfile

import jinja2
from own_templates import LLAMA2, MISTRAL, SMOLLM3
from transformers.utils import chat_template_utils

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "templates"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
OWN = "written for these tests after the prompt format of the model; licence of this repository"
# name: (file in TRL, or source), begin token, end token, whose it is
FAMILIES = {
    "llama2": (LLAMA2, "<s>", "</s>", OWN),
    "llama3_1": ("llama3_1", "<|begin_of_text|>", "<|eot_id|>", "Llama 3.1, Llama 3.1 Community License"),
    "llama3_2": ("llama3_2", "<|begin_of_text|>", "<|eot_id|>", "Llama 3.2, Llama 3.2 Community License"),
    "mistral": (MISTRAL, "<s>", "</s>", OWN),
    "qwen2_5": ("qwen2_5", None, "<|im_end|>", "Qwen2.5, Apache-2.0"),
    "qwen3": ("qwen3", None, "<|im_end|>", "Qwen3, Apache-2.0"),
    "smollm3": (SMOLLM3, None, "<|im_end|>", OWN),
    "phi3": ("phi3", "<s>", "<|endoftext|>", "Phi-3, MIT"),
    "gemma3": ("gemma3", "<bos>", "<eos>", "Gemma 3, Gemma Terms of Use"),
    "gpt_oss": ("gptoss", "<|startoftext|>", "<|return|>", "gpt-oss, Apache-2.0"),
}


def function(name: str, description: str, properties: dict, required: list) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CITY = {"city": {"type": "string", "description": 'A <city>, "quoted" & Zürich'}}
UNIT = {"unit": {"type": "string", "enum": ["celsius", "kelvin"], "default": "celsius"}}
MANY = {"days": {"type": "array", "items": {"type": "integer"}}, "exact": {"type": "boolean", "nullable": True}}
TOOLS = [
    function("weather", "The weather of a city.", CITY | UNIT, ["city"]),
    function("forecast", "Some days.\nOf one city.", CITY | MANY, ["city", "days"]),
]
BARE = [function("now", "The time.", {}, [])]
SYSTEM = {"role": "system", "content": "Be terse. 简短 🙂"}
USER = {"role": "user", "content": "  Why is the sky blue?\n"}
ANSWER = {"role": "assistant", "content": "\n\nRayleigh scattering.  "}
AGAIN = {"role": "user", "content": "And <b>red</b> & 'green' at 🌅? <|im_end|> {{ x }}"}
THOUGHT = {"role": "assistant", "content": "<think>\nLight, air.\n</think>\n\nScattering."}
REASONED = {"role": "assistant", "content": "Scattering.", "reasoning_content": "\nLight, air.\n"}
ASK = {"role": "user", "content": "Weather in Zürich?"}
ARGUMENTS = {"city": "Zürich", "unit": "kelvin"}


def call(arguments: object, name: str = "weather", **keys: object) -> dict:
    tool_call = {"id": "abcdef123", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [tool_call], **keys}


TWO = call(ARGUMENTS, content="")
TWO = TWO | {"tool_calls": TWO["tool_calls"] + call({"city": "Bern", "days": [1, 2]}, "forecast")["tool_calls"]}
RESULT = {
    "role": "tool",
    "content": '{"kelvin": 281.5, "sky": "<clear>"}',
    "tool_call_id": "abcdef123",
    "name": "weather",
}
DEVELOPER = {"role": "developer", "content": "Rhyme."}
# messages, options beside add_generation_prompt=True
CHATS = [
    ([USER], {}),
    ([USER], {"add_generation_prompt": False}),
    ([SYSTEM, USER], {}),
    ([SYSTEM, USER, ANSWER, AGAIN], {}),
    ([USER, ANSWER], {"add_generation_prompt": False}),
    ([USER], {"enable_thinking": False}),
    ([SYSTEM, USER, THOUGHT, AGAIN], {"enable_thinking": True}),
    ([SYSTEM | {"content": "Be terse. /no_think"}, USER, REASONED, AGAIN, REASONED], {"add_generation_prompt": False}),
    ([USER, REASONED | {"thinking": "Air."}, AGAIN], {"enable_thinking": False}),
    ([ASK], {"tools": TOOLS}),
    ([SYSTEM, ASK], {"tools": BARE}),
    ([ASK, call(ARGUMENTS, content=""), RESULT], {"tools": TOOLS}),
    ([ASK, call(ARGUMENTS, content=None), RESULT, ANSWER, AGAIN], {"tools": TOOLS}),
    ([SYSTEM, ASK, call(ARGUMENTS, reasoning_content="Look it up."), RESULT], {"tools": TOOLS}),
    ([SYSTEM, ASK, TWO, RESULT, RESULT, ANSWER], {"tools": TOOLS, "add_generation_prompt": False}),
    ([ASK, call(json.dumps(ARGUMENTS), content="One moment."), RESULT], {"tools": TOOLS}),
    ([USER, USER], {}),
    ([ANSWER, USER], {}),
    ([SYSTEM], {}),
]
MORE = {
    "llama3_1": [
        ([USER], {"date_string": "1 Jan 2020", "builtin_tools": ["brave_search", "code_interpreter"]}),
        ([SYSTEM, ASK], {"tools": TOOLS, "tools_in_user_message": False}),
        ([ASK, call({"query": "x"}, "brave_search", content=""), RESULT], {"builtin_tools": ["brave_search"]}),
    ],
    "llama3_2": [([SYSTEM, ASK], {"custom_tools": TOOLS, "tools_in_user_message": False})],
    "mistral": [([ASK, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x"}}]}], {})],
    "smollm3": [([SYSTEM, ASK], {"xml_tools": TOOLS, "python_tools": ["def now(): ..."]})],
    "gpt_oss": [
        ([DEVELOPER, USER], {"reasoning_effort": "high", "builtin_tools": ["browser", "python"]}),
        ([USER], {"model_identity": "You are somebody."}),
        ([USER, {"role": "assistant", "thinking": "Light.", "content": "Air."}], {"add_generation_prompt": False}),
    ],
}  # fmt: skip


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(template: str, messages: list, options: dict) -> dict:
    options = {"add_generation_prompt": True} | options
    try:
        texts, _ = chat_template_utils.render_jinja_template([messages], chat_template=template, **options)
        return {"text": texts[0]}
    except (jinja2.TemplateError, TypeError) as error:
        return {"error": str(error)}


def record(name: str, wheel: zipfile.ZipFile) -> None:
    template, bos, eos, whose = FAMILIES[name]
    source = whose
    if whose != OWN:
        source = f"trl 1.16.0 (PyPI, Apache-2.0), trl/chat_templates/{template}.jinja, as shipped with {whose}"
        template = wheel.read(f"trl/chat_templates/{template}.jinja").decode()
    special = {"bos_token": bos, "eos_token": eos}
    special = {key: value for key, value in special.items() if value is not None}
    chats = [
        {"messages": messages, "options": options} | render(template, messages, special | options)
        for messages, options in CHATS + MORE.get(name, [])
    ]
    content = {
        "source": source,
        "now": NOW.isoformat(),
        "special_tokens": special,
        "template": template,
        "chats": chats,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    assert len(text.encode()) < 60_000, name
    (FIXTURES / f"{name}.json").write_text(text, encoding="utf-8")
    print(
        name,
        len(text.encode()),
        sum("text" in chat for chat in chats),
        [c["error"][:60] for c in chats if "error" in c],
    )


if __name__ == "__main__":
    chat_template_utils.datetime = Clock
    FIXTURES.mkdir(exist_ok=True)
    with zipfile.ZipFile(sys.argv[1]) as archive:
        for family in FAMILIES:
            record(family, archive)
