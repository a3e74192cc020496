"""Bounds of text, checked before a template or a tokenizer sees any of it.

Text travels compressed, so a few hundred bytes may ask for minutes of work. Counting here takes less time than reading the request did,
and needs no turn in the queue of those whose text is rendered.
"""

from collections.abc import Sequence

from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge
from tinsmith.protocol.native import MAX_CHARACTERS, MAX_MESSAGES, MAX_RENDERED, ChatMessage, PassRequest, Sample
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.wire_bounds import check_count
from tinsmith.text.conversations import Conversations, rendered_characters

_SEVERAL = "send several commands"
_SHORTEN = "shorten it"


def check_data(body: PassRequest, base: BaseModelInfo, texts: Conversations) -> None:
    """Raises PayloadTooLarge, InputTokensExceeded, naming the field and the bound."""
    if body.conversations is not None:
        chats = [conversation.messages for conversation in body.conversations]
        check_count("conversations", sum(map(len, chats)), MAX_MESSAGES, "messages", _SEVERAL)
        _check_characters("conversations", [*map(_num_characters, chats)], base, texts)
        _check_rendered("conversations", chats, "send fewer in a command, or shorten long ones")
    elif body.texts is not None:
        _check_characters("texts", [*map(len, body.texts)], base, texts)


def check_prompt(body: Sample, base: BaseModelInfo, texts: Conversations) -> None:
    """Raises PayloadTooLarge, InputTokensExceeded, naming the field and the bound."""
    if body.messages is not None:
        _check_total("messages", _num_characters(body.messages), _SHORTEN)
        _check_one("messages", _num_characters(body.messages), base, texts)
        _check_rendered("messages", [body.messages], "shorten the conversation")
    elif body.text is not None:
        _check_total("text", len(body.text), _SHORTEN)
        _check_one("text", len(body.text), base, texts)


def _check_characters(field: str, sizes: Sequence[int], base: BaseModelInfo, texts: Conversations) -> None:
    _check_total(field, sum(sizes), _SEVERAL)
    for index, size in enumerate(sizes):
        _check_one(f"{field}[{index}]", size, base, texts)


def _check_total(field: str, size: int, remedy: str) -> None:
    if size > MAX_CHARACTERS:
        raise PayloadTooLarge(f"{field}: {size} characters, the bound is {MAX_CHARACTERS}; {remedy}")


def _check_one(field: str, size: int, base: BaseModelInfo, texts: Conversations) -> None:
    """The last token of a text to learn from is a target alone, so there may be one more than the context has."""
    bound = texts.max_characters(base.max_context + 1)
    if size > bound:
        raise InputTokensExceeded(f"{field}: {size} characters, a context of {base.max_context} tokens holds at most {bound}; {_SHORTEN}")


def _check_rendered(field: str, chats: Sequence[Sequence[ChatMessage]], remedy: str) -> None:
    size = sum(rendered_characters((message.role, len(message.content)) for message in messages) for messages in chats)
    if size > MAX_RENDERED:
        raise PayloadTooLarge(
            f"{field}: rendering each assistant's turn and what is before it takes {size} characters, the bound is {MAX_RENDERED}; {remedy}"
        )


def _num_characters(messages: Sequence[ChatMessage]) -> int:
    return sum(len(message.content) for message in messages)
