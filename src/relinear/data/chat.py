"""Conversations: lists of messages, which a tokenizer's chat template turns into text."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Conversation(str):
    """Represent a conversation: a string of its messages as JSON, of a type of its own."""

    __slots__ = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages, in order."""
        return json.loads(self)


class Closed(str):
    """Mark text that already ends as its tokenizer ends a document, so that nothing is appended."""

    __slots__ = ()


def encodable(text: str) -> str:
    """Return ``text`` with lone surrogates, which JSON may hold and no UTF-8 text has, as question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, ``{"role": ..., "content": ...}`` each."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def as_document(value: Any) -> str | None:
    """Return text unchanged, messages (or a mapping with ``messages``) as a ``Conversation``; None for all else."""
    if isinstance(value, str):
        return value
    messages = value.get("messages") if isinstance(value, Mapping) else value
    if not is_conversation(messages):
        return None
    # Tables have every key in every row, as null where a message has none.
    cleaned = [{key: part for key, part in m.items() if part is not None or key == "content"} for m in messages]
    return Conversation(json.dumps(cleaned))


def render_conversations(tokenizer: Any, documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents, each conversation as the text that the tokenizer's chat template makes of it.

    Raises:
        ValueError: if there is a conversation and the tokenizer has no template, or the template refuses it.
    """
    for document in documents:
        yield _rendered(tokenizer, document) if isinstance(document, Conversation) else document


def _rendered(tokenizer: Any, conversation: Conversation) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template for the conversations in the data; give "
            "that of a chat model, or a column of text"
        )
    try:
        text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the tokenizer's chat template refuses {conversation[:200]}: {error}") from error
    end = tokenizer.eos_token
    return Closed(text) if end and text.rstrip().endswith(end) else text
