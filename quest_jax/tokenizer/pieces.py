"""From token ids to bytes, one id at a time: what decoding and streaming share."""

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

UNKNOWN = "\ufffd".encode()
"""Stands for an id without a token, such as the padded last rows of an embedding."""
_END_OF_IDS = 1 << 32  # of the integer type the library takes
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, or a sequence of Replace, ByteFallback, Fuse and Strip (left)"


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that stand for the bytes in a byte-level vocabulary, as GPT-2 numbered them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def leading_spaces(data: bytes, limit: int) -> int:
    """How many spaces, at most ``limit``, ``data`` starts with."""
    return len(data[:limit]) - len(data[:limit].lstrip(b" "))


class Pieces:
    """The bytes behind each token id, under the decoder of a ``tokenizers.Tokenizer``.

    Decoding is then joining bytes, so it can be done one token at a time: ``bytes_of(a, True) + bytes_of(b, False)``,
    less up to ``strip_left`` leading spaces, read as UTF-8, is the text of ``[a, b]``.

    Attributes:
      strip_left: how many leading spaces the decoder removes from a text.
      special_ids: ids of control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.strip_left = 0
        self._backend = backend
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = self._byte_pieces = False
        self._space: str | None = None  # the character that stands for a space
        self._space_at_start = True
        self._separator = b""
        self._read_decoder(backend.decoder)
        self._alphabet = _byte_alphabet()

    def bytes_of(self, token_id: int, first: bool) -> bytes:
        """The bytes of one token; ``first`` for the first of a text."""
        if self._byte_level and token_id in self._added:
            return self._added[token_id]  # literal text, not byte-level characters
        token = self._backend.id_to_token(token_id) if token_id < _END_OF_IDS else None
        if token is None:
            return UNKNOWN if first else self._separator + UNKNOWN
        if self._byte_level:
            if all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._space is not None:
            token = token.replace(self._space, "" if first and not self._space_at_start else " ")
        if self._byte_pieces and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes((int(match[1], 16),))
        return token.encode() if first else self._separator + token.encode()

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of a whole text."""
        data = b"".join(self.bytes_of(token_id, first=i == 0) for i, token_id in enumerate(token_ids))
        return data[leading_spaces(data, self.strip_left) :]

    def _read_decoder(self, decoder: Any) -> None:
        if decoder is None:
            self._separator = b" "
            return
        outer = json.loads(decoder.__getstate__())
        fused = False
        for step in outer["decoders"] if outer["type"] == "Sequence" else [outer]:
            match step:
                case {"type": "ByteLevel"} if not (self._replacements or self._byte_pieces or self._space):
                    self._byte_level = fused = True
                case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme} if not fused:
                    self._space, self._space_at_start = space, scheme == "never"
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"} if not fused:
                    self._byte_pieces = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    self.strip_left = start
                case _:
                    raise NotImplementedError(
                        f"Token decoder: expected {_SUPPORTED}, got {json.dumps(step)[:120]}; "
                        "decode with the tokenizers library instead."
                    )
