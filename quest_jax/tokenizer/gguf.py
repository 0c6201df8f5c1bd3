"""The tokenizer inside a GGUF file: byte-level BPE ("gpt2" in the file) and SentencePiece's BPE ("llama")."""

import math
import os
from typing import Any

import tokenizers
from tokenizers import processors

from quest_jax.tokenizer.gguf_bpe import (
    CONTROL,
    NAMED,
    SPLITS,
    USER_DEFINED,
    add_named_tokens,
    build_byte_level,
    build_sentencepiece,
)
from quest_jax.tokenizer.tokenizer import Tokenizer
from quest_jax.weights.fields import Fields
from quest_jax.weights.gguf import read_metadata

_NAMED_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
_LONGEST = 256  # SentencePiece's own limit is 16 unless asked otherwise
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
# Files name one end, and models have several: of a turn, of a message to a tool, of a document.
_ENDS_BY_NAME = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip
_INNER_END = "<|end|>"  # ends one of several messages of an answer, where these two are there:
_OUTER_ENDS = {"<|return|>", "<|call|>"}
# Phi-3 was trained without the line breaks that its template writes behind control tokens.
_NO_SPACES_AFTER = ("phi-3", "phi3")
_KEEPS_SPACES = {"<unk>", "<s>", "<|endoftext|>"}


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Builds the tokenizer a GGUF file describes.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not GGUF, damaged, without a tokenizer, or with one that contradicts itself.
      NotImplementedError: another kind of vocabulary, or a way of splitting text that is not known.
    """
    metadata = read_metadata(path)
    fields = Fields(metadata, str(path))
    kind = fields.text("tokenizer.ggml.model", None)
    if kind is None:
        raise ValueError(f"{path}: expected a tokenizer in the file, got no tokenizer.ggml.model; pass another file.")
    if kind not in ("gpt2", "llama"):
        raise NotImplementedError(
            f"{path}: expected a byte-level or SentencePiece BPE vocabulary (tokenizer.ggml.model 'gpt2' or 'llama'), "
            f"got {kind!r}; load the tokenizer from the model's Hugging Face directory instead."
        )
    tokens, types = _read_vocabulary(metadata, path)
    # Some files call them user-defined: text from outside could then end its own message.
    types = [
        CONTROL if i == USER_DEFINED and token in _ENDS_BY_NAME else i for token, i in zip(tokens, types, strict=True)
    ]
    ids = _read_named_ids(fields, len(tokens), _SENTENCEPIECE_IDS if kind == "llama" else {}, path)
    if kind == "llama":
        backend, begins = _read_sentencepiece(metadata, fields, tokens, types, ids, path), True
    else:
        backend, begins = _read_byte_level(metadata, fields, tokens, path)
    name = fields.text("general.name", None) or ""
    controls = {token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL}
    swallow = any(part in name.lower() for part in _NO_SPACES_AFTER)
    add_named_tokens(backend, tokens, types, frozenset({*tokens} - _KEEPS_SPACES if swallow else ()))
    in_front = ["bos_token"] if fields.flag("tokenizer.ggml.add_bos_token", begins) else []
    behind = ["eos_token"] if fields.flag("tokenizer.ggml.add_eos_token", False) else []
    if not ids.keys() >= {*in_front, *behind}:
        raise ValueError(f"{path}: a begin or end token is to be added to every text, but the file gives no id for it.")
    _surround(backend, [tokens[ids[name]] for name in in_front], [tokens[ids[name]] for name in behind])
    return Tokenizer(
        backend,
        eos_token_ids=_read_ends(fields, ids, tokens, controls),
        bos_token_id=ids.get("bos_token"),
        special_tokens={name: tokens[token_id] for name, token_id in ids.items()},
        chat_template=fields.text("tokenizer.chat_template", None),
    )


def _read_byte_level(
    metadata: dict[str, Any], fields: Fields, tokens: list[str], path: Any
) -> tuple[tokenizers.Tokenizer, bool]:
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise NotImplementedError(
            f"{path}: expected tokenizer.ggml.pre to be one of {', '.join(SPLITS)}, got {name!r}; "
            "load the tokenizer from the model's Hugging Face directory instead."
        )
    known = set(tokens)
    merges = []
    for line in _read_list(metadata, "tokenizer.ggml.merges", str, path):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= known:
            raise ValueError(f"{path}: expected merges of two tokens into a third, got {line!r:.80}.")
        merges.append((left, right))
    split = SPLITS[name]
    return build_byte_level(tokens, merges, split), split.begins


def _read_sentencepiece(
    metadata: dict[str, Any], fields: Fields, tokens: list[str], types: list[int], ids: dict[str, int], path: Any
) -> tokenizers.Tokenizer:
    scores = _read_list(metadata, "tokenizer.ggml.scores", float, path)
    if len(scores) != len(tokens):
        raise ValueError(f"{path}: expected one score for each of {len(tokens)} tokens, got {len(scores)}.")
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"{path}: expected finite scores of tokens, got NaN or infinity among them.")
    longest = max((token for token, kind in zip(tokens, types, strict=True) if kind not in NAMED), key=len, default="")
    if len(longest) > _LONGEST:  # all its parts are looked up
        raise ValueError(
            f"{path}: expected tokens of at most {_LONGEST} characters, got {longest!r:.60} of {len(longest)}."
        )
    unknown = tokens[ids["unk_token"]] if "unk_token" in ids else None
    space_in_front = fields.flag("tokenizer.ggml.add_space_prefix", True)
    return build_sentencepiece(tokens, types, scores, unknown, space_in_front=space_in_front)


def _read_ends(fields: Fields, ids: dict[str, int], tokens: list[str], controls: set[str]) -> list[int]:
    ends = [token_id for key in _ENDS for token_id in fields.ids(f"tokenizer.ggml.{key}") or ()]
    if ends and max(ends) >= len(tokens):
        raise fields.error("tokenizer.ggml", f"ids of ends below {len(tokens)}", max(ends))
    ends += [ids["eos_token"]] if "eos_token" in ids else []
    named = [
        name for name in _ENDS_BY_NAME if name in controls and not (name == _INNER_END and controls >= _OUTER_ENDS)
    ]
    return ends + [tokens.index(name) for name in named]


def _read_vocabulary(metadata: dict[str, Any], path: Any) -> tuple[list[str], list[int]]:
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str, path)
    types = _read_list(metadata, "tokenizer.ggml.token_type", int, path)
    if len(types) != len(tokens):
        raise ValueError(f"{path}: expected one token_type for each of {len(tokens)} tokens, got {len(types)}.")
    if repeated := len(tokens) - len(set(tokens)):
        raise ValueError(f"{path}: expected each token once, got {repeated} of them again.")
    return tokens, types


def _read_list(metadata: dict[str, Any], key: str, kind: type, path: Any) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{path}: {key}: expected a list of {kind.__name__}, got {repr(value)[:80]}.")
    return value


def _read_named_ids(fields: Fields, n_tokens: int, defaults: dict[str, int], path: Any) -> dict[str, int]:
    ids = {
        name: fields.integer(f"tokenizer.ggml.{key}_token_id", defaults.get(key)) for key, name in _NAMED_IDS.items()
    }
    for name, token_id in ids.items():
        if token_id is not None and token_id >= n_tokens:
            raise ValueError(f"{path}: {name}: expected an id below {n_tokens}, got {token_id}.")
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _surround(backend: tokenizers.Tokenizer, in_front: list[str], behind: list[str]) -> None:
    """Makes ``encode`` put special tokens before and after every text."""
    names = [*in_front, *behind]
    backend.post_processor = processors.TemplateProcessing(
        single=[*in_front, "$A", *behind],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )
