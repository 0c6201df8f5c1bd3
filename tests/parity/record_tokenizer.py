"""Writes tests/fixtures/tokenizer/{llama2,llama3,metaspace}: small tokenizers with what transformers makes of them.

Run from the repository's root with an environment that has transformers (5.24 recorded the files in the repository):

    python tests/parity/record_tokenizer.py

Each folder is what ``save_pretrained`` writes for a tokenizer, plus expected.json: ids, decoded texts, rendered chats.
"""

import json
import pathlib
import shutil

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "tokenizer"
ROOT = pathlib.Path(__file__).parents[2]
TEXTS = [
    "", " ", "<keep this>", "The sea, the sea.", "  two spaces", "trailing  ", "\n\nlines\n", "Call me Ishmael.",
    "123 4567 1,000", "naïve café", "日本語 🦙 👩\u200d👧", "<s>marked</s>", "<|eot_id|>x<|begin_of_text|>",
    "a<|user|>b", "it's DON'T", "tab\tend", "the<unk>the", "x</s>", "e\u0301",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CHAT_LLAMA3 = """{{- bos_token }}
{%- if custom is defined %}{{ custom }}{% endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
CHAT_LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}
{% set system = messages[0].content %}
{% else %}
{% set rest = messages %}
{% set system = none %}
{% endif %}
{% for message in rest %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message.role == 'user' %}
{{ bos_token }}[{{ system ~ ' ' if loop.first and system is not none else '' }}{{ message.content }}]
    {%- else %}
        {%- generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
# Everything of Jinja that chat templates use, with whitespace that shows how blocks are trimmed.
CHAT_WIDE = """{# a comment #}
{% macro quote(text, mark='"') %}{{ mark }}{{ text }}{{ mark }}{% endmacro %}
{% set ns = namespace(count=0, names=[]) %}
{% for message in messages if message.role != 'skip' %}
    {% set ns.count = ns.count + 1 %}
    {% set ns.names = ns.names + [message.role | upper] %}
    {% if message.content == 'stop' %}{% break %}{% endif %}
    {% if not message.content %}{% continue %}{% endif %}
{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }} {{ quote(message.content, mark="'") }}
    {%- if loop.previtem is defined %} after {{ loop.previtem.role }}{% endif %}

{% endfor %}
{{ ns.count }} {{ ns.names | join('|') }} {{ messages | length }} {{ messages[-1].content[:3] ~ 5 ~ true }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | unique | sort | join(', ') }}
{{ tools | tojson if tools else 'no tools' }}
{{ tools | tojson(indent=2) if tools }}
{% for key, value in {'b': 1, 'a': {'c': [1, 2.5, none, true]}}.items() %}{{ key }}={{ value | tojson }};{% endfor %}

{% for key, value in {'b': 1, 'a': 2} | dictsort %}{{ key }}{{ value }}{% endfor %}
{{ 'a-b-c'.split('-') | last }} {{ ' x '.strip() }}{{ 'abc'.replace('b', '<&>') }} {{ '%s:%03d' % ('n', 7) }}
{{ '{}-{:>4}'.format('l', 'r') }} {{ 'line\\nline' | indent(2) }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 'ab' * 2 }}
{% set block %}{{ missing }}{{ missing | default('fallback') }}{% endset %}{{ block | capitalize }}
{% filter upper %}loud{% endfilter %} {{ '<' | e }} {{ range(3) | list }} {{ (1, 2) }}
{{ strftime_now('%%') }} {{ messages is sequence }} {{ messages[0] is mapping }}
{{ 'a' in 'cat' }} {{ 'z' not in 'cat' }} {{ -3 | abs }} {{ 'x' | string }}
{{ date | default('no date', true) }} {{ [3, 1, 2] | max }} {{ 'title case' | title }} {{ '12' | int + 1 }}"""
TOOLS = [{"type": "function", "function": {"name": "look", "description": '<b>Ünïcode</b> & "quotes"', "n": [1, {}]}}]
CHATS = [
    ([{"role": "user", "content": " Hi \n"}], {}),
    ([{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], {}),
    (
        [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b\n"), ("user", "日本 🦙"))],
        {"custom": "C", "tools": TOOLS, "date": ""},
    ),
    ([{"role": "user", "content": "x"}, {"role": "skip", "content": "y"}, {"role": "user", "content": ""}], {}),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": "stop"}, {"role": "user", "content": "z"}], {}),
]
SMOLLM2 = json.loads((FIXTURES / "smollm2.json").read_text(encoding="utf-8"))["metadata"]["tokenizer.chat_template"]


def corpus() -> list[str]:
    return (ROOT / "quest_jax" / "data" / "moby_dick.txt").read_text(encoding="utf-8")[:20000].splitlines()


def llama3() -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|user|>", "<|assistant|>"])
    backend.add_tokens([AddedToken("<keep this>", normalized=False)])
    backend.decoder = decoders.ByteLevel()
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    backend.enable_truncation(8)  # left over from training: must not cut a prompt
    return backend


def llama2() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte pieces are ordinary tokens
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return backend


def metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


CONFIGS = {
    "llama3": (
        llama3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": CHAT_LLAMA3},
    ),
    "llama2": (
        llama2,
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>",
            "add_bos_token": False, "add_eos_token": True,  # have no effect beside tokenizer.json
        },
    ),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>"}),
}  # fmt: skip


def render(tokenizer: PreTrainedTokenizerFast, template: str | None, messages: list, options: dict) -> str | None:
    options = {"add_generation_prompt": True} | options
    try:
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except jinja2.TemplateError:
        return None


def record(name: str) -> None:
    build, config = CONFIGS[name]
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))
    if name == "llama2":
        (folder / "chat_template.jinja").write_text(CHAT_LLAMA2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [tokenizer.encode(text, truncation=False) for text in TEXTS]
    expected = {
        "texts": TEXTS,
        "ids": ids,
        "ids_without_special": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
        "decoded": [tokenizer.decode(row) for row in ids],
        "decoded_without_special": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
    }
    if name != "metaspace":
        templates = {"own": None} | ({"wide": CHAT_WIDE, "smollm2": SMOLLM2} if name == "llama3" else {})
        expected["templates"] = templates
        expected["chats"] = [
            {"template": key, "messages": messages, "options": options}
            | {"text": render(tokenizer, source, messages, options)}
            for key, source in templates.items()
            for messages, options in CHATS
        ]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


for fixture in CONFIGS:
    record(fixture)
