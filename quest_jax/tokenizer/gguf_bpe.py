"""Builds the two kinds of byte-pair encoding that GGUF files hold."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens, as the format numbers them; 1 is an ordinary one, 5 an unused one."""
NAMED = (UNKNOWN, CONTROL, USER_DEFINED)
"""Those that are found in text before anything is merged."""

_SPACE = "▁"  # SentencePiece's
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST, _REST_AND_SLASHES = (rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|{_SPACES}" for slash in ("", "/"))
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"


class Split(NamedTuple):
    """How a byte-level vocabulary splits text before it merges anything.

    Attributes:
      expressions: applied one after the other; what none of them matches stays whole.
      whole_words: a part that is in the vocabulary is taken as it is, whatever the merges would make of it.
      begins: the begin-of-text token stands in front where the file does not say.
      composed: text is brought into Unicode's composed form (NFC) first.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


SPLITS = {
    "gpt-2": Split((_GPT2,)),
    "smollm": Split((r"\p{N}", _GPT2)),
    "llama-bpe": Split((_LLAMA3,), whole_words=True, begins=True),
    "smaug-bpe": Split((_LLAMA3,), whole_words=True),
    "dbrx": Split((_LLAMA3,)),
    "qwen2": Split((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}",), composed=True),
    "gpt-4o": Split((rf"{_CASED}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST_AND_SLASHES}",)),
    "tekken": Split((rf"{_CASED}|\p{{N}}|{_REST_AND_SLASHES}",), whole_words=True, begins=True),
    "default": Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""By the value of ``tokenizer.ggml.pre``: what the model's ``tokenizer.json`` does, and for ``default`` what llama.cpp
does. ``smaug-bpe`` is SmolLM3's, ``dbrx`` Phi-4's, ``gpt-4o`` that of GPT-OSS and Phi-4-mini, ``tekken`` that of the
later Mistral models."""
SPLITS |= {
    new: SPLITS[known]
    for new, known in {
        "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "megrez": "qwen2",
    }.items()
}  # fmt: skip


def build_byte_level(tokens: Sequence[str], merges: list[tuple[str, str]], split: Split) -> tokenizers.Tokenizer:
    """Byte-level BPE: parts of text become bytes, each written as a character, and are merged in the file's order."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def build_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: str | None, *, space_in_front: bool
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours that make a token, those of the highest score are merged first.

    Characters without a token become tokens of their bytes. ``space_in_front`` puts a space before every text, and
    before what follows a control token.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_by_score(vocabulary, types, scores)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    in_front = [normalizers.Prepend(_SPACE)] if space_in_front else []
    backend.normalizer = normalizers.Sequence([*in_front, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_in_front else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    vocabulary: dict[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token; named ones are found in text, not made from it."""
    made = [token for token, i in vocabulary.items() if types[i] not in (*NAMED, BYTE)]
    made.sort(key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
    known = set(made)
    return [
        (token[:cut], token[cut:])
        for token in made
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def add_named_tokens(
    backend: tokenizers.Tokenizer, tokens: Iterable[str], types: Iterable[int], spaces_after: frozenset[str]
) -> None:
    """Makes the backend find control, unknown and user-defined tokens in text before it splits or merges anything.

    ``spaces_after``: tokens that swallow the whitespace behind them.
    """
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=token in spaces_after)
            for token, kind in zip(tokens, types, strict=True)
            if kind in NAMED and token
        ]
    )
