"""Text from tokens as they come, never a character that changes later."""

import codecs
from typing import SupportsIndex

from quest_jax.tokenizer.pieces import leading_spaces
from quest_jax.tokenizer.tokenizer import Tokenizer, check_id


class Detokenizer:
    """Decodes a stream of token ids; the work per token does not grow with the number of tokens before it.

    A token may end within a character, as most emoji and many Chinese characters take several tokens. Its bytes are
    then held back until the character is complete. The texts of all :meth:`push` calls and of the final :meth:`flush`
    join to exactly ``tokenizer.decode(ids)``.

    Example:
      ``[stream.push(i) for i in tokenizer.encode("Hi 🦙!")]`` is ``["Hi", " ", "", "🦙", "!"]`` for SmolLM2.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False):
        self._pieces = tokenizer.pieces
        self._skipped = self._pieces.special_ids if skip_special_tokens else frozenset()
        self._start()

    def push(self, token_id: SupportsIndex) -> str:
        """Takes the next token and returns the text that is now certain, often one word, sometimes nothing.

        Raises:
          TypeError, ValueError: not an integer, or a negative one.
        """
        value = check_id(token_id)
        if value in self._skipped:
            return ""
        data = self._pieces.bytes_of(value, self._first)
        self._first = False
        spaces = leading_spaces(data, self._to_strip)
        self._to_strip = self._to_strip - spaces if spaces == len(data) else 0
        return self._decoder.decode(data[spaces:])

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for a character that was never completed. Ready for another text."""
        text = self._decoder.decode(b"", final=True)
        self._start()
        return text

    def _start(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first, self._to_strip = True, self._pieces.strip_left
