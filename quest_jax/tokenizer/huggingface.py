"""The tokenizer of a Hugging Face directory: ``tokenizer.json`` and the small files beside it."""

import os
import pathlib
from typing import Any

import tokenizers

from quest_jax.tokenizer.tokenizer import Tokenizer
from quest_jax.weights.fields import Fields
from quest_jax.weights.strict_json import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TEMPLATE_BYTES = 1 << 20


def load_huggingface_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer of a directory as ``save_pretrained`` writes it.

    ``tokenizer.json`` is needed; as in transformers 5 it alone decides whether a begin token is put in front of a text.
    Read when they are there: ``tokenizer_config.json`` and ``special_tokens_map.json`` (names of special tokens, chat
    template), ``chat_template.jinja`` (wins over the config), and ``generation_config.json`` or ``config.json`` (ids
    that end an answer, to which the ``eos_token`` is added).

    Raises:
      FileNotFoundError: no ``tokenizer.json``.
      ValueError: a damaged file, or one with other contents than expected.
      NotImplementedError: a kind of decoder that cannot be streamed.
    """
    directory = pathlib.Path(directory)
    backend = _read_backend(directory / "tokenizer.json")
    config = _read_optional(directory / "tokenizer_config.json")
    where = f"{directory / 'tokenizer_config.json'}"
    special_tokens = _read_special_tokens(_read_optional(directory / "special_tokens_map.json") | config, where)
    ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    # Those that are only named as special would otherwise not be found in text.
    backend.add_special_tokens([token for name, token in special_tokens.items() if ids[name] is not None])
    eos = [*_read_eos_ids(directory), ids.get("eos_token")]
    return Tokenizer(
        backend,
        eos_token_ids=[token_id for token_id in eos if token_id is not None],
        bos_token_id=ids.get("bos_token"),
        special_tokens=special_tokens,
        chat_template=_read_template(directory, config, where),
    )


def _read_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file. A tokenizer elsewhere is read by its own path (generate: --tokenizer). A "
            "tokenizer.model alone is not read: convert it once with transformers, "
            "AutoTokenizer.from_pretrained(path).save_pretrained(path)."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{path}: expected a tokenizer of the tokenizers library, got: {error}.") from error


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_special_tokens(config: dict[str, Any], where: str) -> dict[str, str]:
    tokens = {}
    for name in _NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str):
            raise ValueError(f"{where}: {name}: expected a string or an object with content, got {value!r:.80}.")
        tokens[name] = content
    return tokens


def _read_eos_ids(directory: pathlib.Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = Fields(_read_optional(directory / name), f"{directory / name}").ids("eos_token_id")
        if ids is not None:
            return ids
    return ()


def _read_template(directory: pathlib.Path, config: dict[str, Any], where: str) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        with open(path, "rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise ValueError(f"{path}: expected a template of at most {_MAX_TEMPLATE_BYTES} bytes, got a larger one.")
        try:
            return data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text, got {error}.") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise ValueError(f"{where}: chat_template: expected a string or a list of named strings, got {template!r:.80}.")
