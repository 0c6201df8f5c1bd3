"""Chat templates: checked messages in, the text of a prompt out."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from quest_jax.tokenizer.sandbox import Sandbox
from quest_jax.tokenizer.work_limit import allowance

_MAX_TEMPLATE_CHARACTERS = 1 << 17  # the longest in use have about 30,000
_REASONING = ("reasoning_content", "thinking", "reasoning")  # as in transformers, the first one wins
# Whatever foreign code can raise. MemoryError is among them: deeply nested source makes Python's parser raise it.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RecursionError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip


def render_template(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Renders a chat template in a sandbox, with limits on its size, time and memory.

    Behaves like ``apply_chat_template`` of transformers: whitespace around blocks trimmed; ``raise_exception``,
    ``strftime_now``, ``break``, ``continue`` and a ``tojson`` without HTML escapes. See
    :mod:`quest_jax.tokenizer.sandbox` for what is refused.

    Args:
      source: the template.
      messages: ``{"role": ..., "content": ...}``, further keys as the template knows them. Beside ``tool_calls`` the
        content may be None or absent.
      variables: everything else the template may read. What is not of JSON's types is there by the name of its type
        only, such as ``<PosixPath>``.

    Raises:
      TypeError: the messages are not a list of dicts, or a role or content is no string.
      ValueError: no messages, a role or content is missing, or the template fails, does something refused, or objects
        to the messages.
    """
    if not isinstance(source, str):
        raise TypeError(f"chat_template: expected a Jinja template as a string, got {type(source).__name__}.")
    if len(source) > _MAX_TEMPLATE_CHARACTERS:
        raise ValueError(
            f"chat template: expected at most {_MAX_TEMPLATE_CHARACTERS} characters, got {len(source)}; "
            "pass a shorter one as chat_template=..."
        )
    values = {**variables, "messages": _check_messages(messages)}
    try:
        with allowance(values):
            return _compile(source).render(_plain(values))
    except _TEMPLATE_ERRORS as error:
        raise ValueError(
            f"The chat template stopped with {type(error).__name__}: {str(error).rstrip('.')}. Check the order and "
            "roles of the messages, or pass another template as chat_template=..."
        ) from error


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise TypeError(
            f"messages: expected a list of dicts with role and content, got {type(messages).__name__}; "
            'for one question pass [{"role": "user", "content": "..."}].'
        )
    if not messages:
        raise ValueError("messages: expected at least one message, got none.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{i}]: expected a dict with role and content, got {type(message).__name__}.")
        for key in ("role", "content"):
            if key == "content" and message.get("tool_calls") and message.get("content") is None:
                continue  # a call of tools may come without words
            if key not in message:
                raise ValueError(f"messages[{i}]: expected the keys role and content, got {sorted(map(str, message))}.")
            if not isinstance(message[key], str):
                raise TypeError(f"messages[{i}][{key!r}]: expected a string, got {type(message[key]).__name__}.")
        if not message["role"]:
            raise ValueError(f"messages[{i}]['role']: expected a role such as user or assistant, got ''.")
    return [_with_reasoning(dict(message)) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """What a model thought goes by three names; a template finds it under the two that templates read."""
    thoughts = [message[name] for name in _REASONING if message.get(name) is not None]
    return {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]} if thoughts else message


def _plain(value: Any) -> Any:
    """A copy of JSON's types alone: other objects have methods that no sandbox knows, such as a path's ``unlink``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, the characters without its methods
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return f"<{type(value).__name__}>"


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _sandbox().from_string(source)
