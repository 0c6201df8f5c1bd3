"""Tokenizers of a few lines: one that knows words, one that cuts anywhere."""

import re


class WordTokenizer:
    """One id per word or punctuation mark, one per digit, after a begin-of-text token; white space belongs to none."""

    def __init__(self):
        self.seen = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.seen += len(text)
        return [0] * add_special_tokens + [len(piece) for piece in re.findall(r"\d|[A-Za-z]+|[^\w\s]|\n", text)]


class PairTokenizer:
    """One id per two UTF-8 bytes, so that every cut of the text changes the count, and may cut a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        data = text.encode()
        pairs = [int.from_bytes(data[i : i + 2].ljust(2, b"\xff")) for i in range(0, len(data), 2)]
        return [0] * add_special_tokens + pairs

    def decode(self, ids: list[int]) -> str:
        return b"".join(token.to_bytes(2) for token in ids).removesuffix(b"\xff").decode(errors="replace")
