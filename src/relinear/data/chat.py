"""Handle conversations: recognise lists of messages, and render them with a tokenizer's chat template."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Conversation(str):
    """Represent a conversation as a string: its messages in JSON. The type tells it from plain text."""

    __slots__ = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages, in order."""
        return json.loads(self)


class TerminatedText(str):
    """Mark text that already ends with the end-of-text token, so that none is appended."""

    __slots__ = ()


def encodable(text: str) -> str:
    """Return ``text`` with lone surrogates (valid in JSON, but not in UTF-8) replaced by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, each ``{"role": ..., "content": ...}``."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def as_document(value: Any) -> str | None:
    """Return text unchanged, and messages (or a mapping with ``messages``) as a ``Conversation``; else None."""
    if isinstance(value, str):
        return value
    messages = value.get("messages") if isinstance(value, Mapping) else value
    if not is_conversation(messages):
        return None
    # A table has every key in every row; null stands for a key that a message lacks.
    cleaned = [{key: part for key, part in m.items() if part is not None or key == "content"} for m in messages]
    return Conversation(json.dumps(cleaned))


def render_conversations(tokenizer: Any, documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents, with each conversation rendered by the tokenizer's chat template.

    Raises:
        ValueError: if there is a conversation and the tokenizer has no template, or the template rejects it.
    """
    for document in documents:
        yield _rendered(tokenizer, document) if isinstance(document, Conversation) else document


def _rendered(tokenizer: Any, conversation: Conversation) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template for the conversations in the data; use "
            "that of a chat model, or a column of text"
        )
    try:
        text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    except Exception as error:  # a template may raise any exception
        raise ValueError(f"the tokenizer's chat template refuses {conversation[:200]}: {error}") from error
    end = tokenizer.eos_token
    return TerminatedText(text) if end and text.rstrip().endswith(end) else text
