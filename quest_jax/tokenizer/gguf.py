"""The tokenizer inside a GGUF file, for byte-level BPE vocabularies ("gpt2" in the file)."""

import os
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from quest_jax.tokenizer.tokenizer import Tokenizer
from quest_jax.weights.fields import Fields
from quest_jax.weights.gguf import read_metadata

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of the format
_WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# What each value of tokenizer.ggml.pre splits text by, one expression after the other, as llama.cpp defines them.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_WORD,),
    "smollm": (r"\p{N}", _WORD),
    "llama-bpe": (_LLAMA3,),
    "default": (r"[\p{P}$+<=>^~|]+", _WORD, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_NAMED_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Builds the tokenizer a GGUF file describes.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not GGUF, damaged, without a tokenizer, or with one that contradicts itself.
      NotImplementedError: another kind of vocabulary, or a way of splitting text that is not one of those above.
    """
    metadata = read_metadata(path)
    fields = Fields(metadata, str(path))
    kind = fields.text("tokenizer.ggml.model", None)
    if kind is None:
        raise ValueError(f"{path}: expected a tokenizer in the file, got no tokenizer.ggml.model; pass another file.")
    if kind != "gpt2":
        raise NotImplementedError(
            f"{path}: expected a byte-level BPE vocabulary (tokenizer.ggml.model 'gpt2'), got {kind!r}; "
            "load the tokenizer from the model's Hugging Face directory instead."
        )
    split = fields.text("tokenizer.ggml.pre", "default")
    split = _ALIASES.get(split, split)
    if split not in _SPLITS:
        raise NotImplementedError(
            f"{path}: expected tokenizer.ggml.pre to be one of {', '.join([*_SPLITS, *_ALIASES])}, got {split!r}; "
            "load the tokenizer from the model's Hugging Face directory instead."
        )
    tokens, types, merges = _read_vocabulary(metadata, path)
    ids = _read_named_ids(fields, len(tokens), path)
    backend = _build_bpe(tokens, types, merges, split)
    in_front = ["bos_token"] if fields.flag("tokenizer.ggml.add_bos_token", split == "llama-bpe") else []
    behind = ["eos_token"] if fields.flag("tokenizer.ggml.add_eos_token", False) else []
    if not ids.keys() >= {*in_front, *behind}:
        raise ValueError(f"{path}: a begin or end token is to be added to every text, but the file gives no id for it.")
    _surround(backend, [tokens[ids[name]] for name in in_front], [tokens[ids[name]] for name in behind])
    return Tokenizer(
        backend,
        eos_token_ids=[token_id for key in _ENDS for token_id in fields.ids(f"tokenizer.ggml.{key}") or ()],
        bos_token_id=ids.get("bos_token"),
        special_tokens={name: tokens[token_id] for name, token_id in ids.items()},
        chat_template=fields.text("tokenizer.chat_template", None),
    )


def _read_vocabulary(metadata: dict[str, Any], path: Any) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    tokens, lines = (_read_list(metadata, f"tokenizer.ggml.{name}", str, path) for name in ("tokens", "merges"))
    types = _read_list(metadata, "tokenizer.ggml.token_type", int, path)
    if len(types) != len(tokens):
        raise ValueError(f"{path}: expected one token_type for each of {len(tokens)} tokens, got {len(types)}.")
    known = set(tokens)
    if len(known) != len(tokens):
        raise ValueError(f"{path}: expected each token once, got {len(tokens) - len(known)} of them again.")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= known:
            raise ValueError(f"{path}: expected merges of two tokens into a third, got {line!r:.80}.")
        merges.append((left, right))
    return tokens, types, merges


def _read_list(metadata: dict[str, Any], key: str, kind: type, path: Any) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{path}: {key}: expected a list of {kind.__name__}, got {repr(value)[:80]}.")
    return value


def _read_named_ids(fields: Fields, n_tokens: int, path: Any) -> dict[str, int]:
    ids = {name: fields.integer(f"tokenizer.ggml.{key}_token_id", None) for key, name in _NAMED_IDS.items()}
    for name, token_id in ids.items():
        if token_id is not None and token_id >= n_tokens:
            raise ValueError(f"{path}: {name}: expected an id below {n_tokens}, got {token_id}.")
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _build_bpe(tokens: list[str], types: list[int], merges: list[tuple[str, str]], split: str) -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is in the vocabulary as it is, whatever the merges would make of it.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[split]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
        ]
    )
    return backend


def _surround(backend: tokenizers.Tokenizer, in_front: list[str], behind: list[str]) -> None:
    """Makes ``encode`` put special tokens before and after every text."""
    names = [*in_front, *behind]
    backend.post_processor = processors.TemplateProcessing(
        single=[*in_front, "$A", *behind],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )
