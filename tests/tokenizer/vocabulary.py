"""SmolLM2's tokenizer without its model: GGUF files of the tokens the tests need, at the ids they have in the model."""

import functools
import json
import pathlib
from typing import Any

import gguf

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


@functools.cache
def recorded() -> dict[str, Any]:
    """The content of smollm2.json; not to be changed."""
    return json.loads((FIXTURES / "tokenizer" / "smollm2.json").read_text(encoding="utf-8"))


@functools.cache
def prompts() -> list[dict[str, Any]]:
    """Reference prompts: ``name``, ``text``, ``ids``, ``greedy_ids``, ``greedy_text``."""
    path = FIXTURES / "oracle" / "SmolLM2-135M-Instruct.Q4_1.json"
    return json.loads(path.read_text(encoding="utf-8"))["prompts"]


def metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of the file; ``changes`` by the last part of the key, None to leave one out."""
    data = recorded()
    tokens = [data["tokens"].get(str(i), f"[unused {i}]") for i in range(data["vocab_size"])]
    types = [data["types"].get(str(i), 1 if str(i) in data["tokens"] else 5) for i in range(data["vocab_size"])]
    return _merge({"tokens": tokens, "token_type": types, "merges": data["merges"]} | changes)


def small_metadata(**changes: Any) -> dict[str, Any]:
    """The same of a vocabulary of three control tokens, two letters and their pair; quick to write."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]
    return _merge({"tokens": tokens, "token_type": [3, 3, 3, 1, 1, 1], "merges": ["a b"]} | changes)


def _merge(changes: dict[str, Any]) -> dict[str, Any]:
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in recorded()["metadata"].items()} | changes
    prefixed = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return {key: value for key, value in prefixed.items() if value is not None}


def write_gguf(path: pathlib.Path, values: dict[str, Any]) -> pathlib.Path:
    """Writes a GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, "llama")
    write_values(writer, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_values(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Adds metadata, each value in the type it has."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


@functools.cache
def other_family(name: str) -> dict[str, Any]:
    """The content of phi3.json or qwen2.json, with its ``metadata`` filled up to what a file holds."""
    data = json.loads((FIXTURES / "tokenizer" / f"{name}.json").read_text(encoding="utf-8"))
    ids = [str(i) for i in range(data["vocab_size"])]
    lists = {
        "tokens": [data["tokens"].get(i, f"[unused {i}]") for i in ids],
        "token_type": [data["types"].get(i, 1 if i in data["tokens"] else 5) for i in ids],
        "scores": [data["scores"].get(i, -1e6) for i in ids] if "scores" in data else None,
        "merges": data.get("merges"),
    }
    filled = {f"tokenizer.ggml.{key}": value for key, value in lists.items() if value is not None}
    return data | {"metadata": data["metadata"] | filled}
