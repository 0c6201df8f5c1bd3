"""Text to token ids and back, and prompts from chat messages."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np
import tokenizers

from quest_jax.tokenizer.chat import render_template
from quest_jax.tokenizer.pieces import Pieces


class Tokenizer:
    """What :func:`quest_jax.load_tokenizer` returns.

    Attributes:
      eos_token_ids: ids that end an answer, as the model's files name them.
      bos_token_id: id of the begin-of-text token, or None. Whether ``encode`` puts it in front is for the model's
        files to say.
      special_tokens: texts of the named special tokens, such as ``eos_token``; templates read them.
      chat_template: Jinja source, or None.
      pieces: the bytes behind each id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        # tokenizer.json may carry the padding and the maximum length of the training set-up.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.pieces = Pieces(backend)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token; the model's embedding may have more rows."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of ``text``; an empty text may have none.

        Args:
          text: any text; kept as it is, including leading and trailing whitespace.
          add_special_tokens: put a begin-of-text token in front, and whatever else the model's files ask for. SmolLM2
            asks for nothing, Llama 3 for ``<|begin_of_text|>``. Pass False for the continuation of a text.
          parse_special: read control tokens written in the text, such as ``<|im_end|>``, as these tokens. Pass False
            for text from outside, which could otherwise end its own message.

        Raises:
          TypeError: not a string.
          ValueError: half of a surrogate pair, which has no UTF-8.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {type(text).__name__}; encode a list one string at a time.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: expected text that has a UTF-8 form, got {text[error.start]!r} at character {error.start}; "
                "read files with errors='replace'."
            ) from error
        backend = self._backend if parse_special else self._literal_backend
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Sequence[SupportsIndex] | np.ndarray | jax.Array, *, skip_special_tokens: bool = False
    ) -> str:
        """The text of some token ids.

        Bytes that are not UTF-8 become U+FFFD, and so does an id without a token (an embedding may have more rows than
        there are tokens). Nothing is tidied up: ``decode(encode(text, add_special_tokens=False))`` is ``text`` for a
        byte-level vocabulary, but for characters that the vocabulary's files compose first (Qwen2).

        Args:
          ids: [T] token ids.
          skip_special_tokens: leave out control tokens such as ``<|im_end|>``.

        Raises:
          TypeError, ValueError: not a flat sequence of integers, or a negative id.
        """
        items: Any = np.asarray(ids).tolist() if isinstance(ids, np.ndarray | jax.Array) else ids
        if not isinstance(items, list | tuple | range):
            raise TypeError(f"ids: expected a sequence of token ids, got {type(items).__name__}.")
        kept = [check_id(item) for item in items]
        if skip_special_tokens:
            kept = [token_id for token_id in kept if token_id not in self.pieces.special_ids]
        return self.pieces.join(kept).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation, as the model's chat template writes it.

        Encode it with :meth:`encode_chat`, not with ``encode``: templates write the begin-of-text token themselves.
        Control tokens in a message are not removed: check text from outside for ``special_tokens`` first.

        Args:
          messages: dicts with ``role`` and ``content``, both strings, and further keys as the template knows them.
          add_generation_prompt: end with the start of the assistant's answer.
          chat_template: Jinja source to use instead of the model's own.
          **kwargs: further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
          TypeError: messages of another form.
          ValueError: no template, or the template fails, objects to the messages, or asks for more time, memory or
            access than a template needs; see :mod:`quest_jax.tokenizer.chat`.

        Example:
          ``tokenizer.render_chat([{"role": "user", "content": "Hi"}])``
        """
        source = self.chat_template if chat_template is None else chat_template
        if source is None:
            raise ValueError(
                "This tokenizer has no chat template: its model may not be trained for chat. Pass chat_template=..., "
                "or encode a plain prompt."
            )
        # tools and documents: templates ask whether they are none, which an undefined name is not.
        variables = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        return render_template(source, messages, variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """The ids of :meth:`render_chat` with the same arguments."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy that takes control tokens for ordinary text; the switch is a state of the whole tokenizer."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy


def check_id(token_id: Any) -> int:
    """The id as a Python integer.

    Raises:
      TypeError: not an integer.
      ValueError: negative.
    """
    if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
        raise TypeError(f"token id: expected an integer, got {repr(token_id)[:80]}; pass one flat row of ids.")
    value = operator.index(token_id)
    if value < 0:
        raise ValueError(
            f"token id: expected at least 0, got {value}; -1 marks the end of a generated row, so decode "
            "tokens[row, :lengths[row]]."
        )
    return value
