"""Calls of tools in the text that a model writes, in the form that its chat template teaches. Knows text alone: no tokens, no HTTP.

    Hermes, Qwen      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once a call or once with a list of calls
    Mistral           [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    Llama 3           {"name": ..., "parameters": {...}}, the whole text, with or without <|python_tag|> before it

Text that only looks like a call, for its JSON is broken or names no function, is content: nothing that a model wrote is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a model said beside its calls, and the calls in order. The content begins as the text does, up to its first call."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolFormat(Protocol):
    """`marks`: texts that begin a call; where one is a special token of a model, it must be kept in the text that is parsed."""

    @property
    def marks(self) -> tuple[str, ...]: ...

    def begin(self, text: str, start: int) -> int:
        """From `start` on: where a call begins, or may begin once the text goes on; the text's length where none does."""
        ...

    def parse(self, text: str) -> Parsed: ...


class _Marked:
    """Calls between marks, or from one mark to the end where nothing closes them."""

    def __init__(self, mark: str, close: str | None) -> None:
        self.marks = (mark,)
        self._close = close

    def begin(self, text: str, start: int) -> int:
        (mark,) = self.marks
        at = text.find(mark, start)
        return at if at >= 0 else len(text) - _overlap(text[start:], mark)

    def parse(self, text: str) -> Parsed:
        (mark,) = self.marks
        said, *rest = text.split(mark)
        calls: list[ToolCall] = []
        for part in rest:
            body, after = (part, "") if self._close is None else _divided(part, self._close)
            found = _calls_of(body, "arguments")
            if found is None:
                return Parsed(text, ())
            calls += found
            said += after
        return Parsed(said, tuple(calls))


class _Bare:
    """The text as a whole is one call."""

    marks = ("<|python_tag|>",)

    def begin(self, text: str, start: int) -> int:
        (mark,) = self.marks
        head = text.lstrip()[: len(mark)]
        return start if head.startswith(("{", mark)) or mark.startswith(head) else len(text)

    def parse(self, text: str) -> Parsed:
        found = _calls_of(text.strip().removeprefix(self.marks[0]), "parameters")
        return Parsed(text, ()) if found is None else Parsed("", tuple(found))


HERMES: ToolFormat = _Marked("<tool_call>", "</tool_call>")
MISTRAL: ToolFormat = _Marked("[TOOL_CALLS]", None)
LLAMA: ToolFormat = _Bare()


def format_of(template: str) -> ToolFormat:
    """By the marks in the source of a chat template. A template that shows none teaches no form; the most common one is then asked for."""
    if MISTRAL.marks[0] in template:
        return MISTRAL
    if HERMES.marks[0] not in template and '"parameters"' in template:
        return LLAMA
    return HERMES


def spelled_out(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The conversation for a template that knows no tools: they are described in the first system message, calls and results are written
    into contents, in the Hermes form and under roles that every template knows."""
    told = [_spelled_out(message) for message in messages]
    if not tools:
        return told
    if told and told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{_described(tools)}"}, *told[1:]]
    return [{"role": "system", "content": _described(tools)}, *told]


def has_calls(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether a template that knows no tools would drop something of them."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _spelled_out(message: Mapping[str, object]) -> dict[str, object]:
    content = str(message["content"])
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    written = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls] if isinstance(calls, list) else []
    return {"role": message["role"], "content": "\n".join([content, *written] if content else written)}


def _described(tools: Sequence[Mapping[str, object]]) -> str:
    """What the Hermes family is told of its tools, in few words."""
    return "\n".join(
        [
            "You can call these functions, one JSON signature a line:",
            "<tools>",
            *map(_json, tools),
            "</tools>",
            "To call one, answer with its name and arguments as JSON:",
            '<tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call>',
        ]
    )


def _json(tree: object) -> str:
    return json.dumps(tree, ensure_ascii=False)


def _calls_of(body: str, arguments: str) -> list[ToolCall] | None:
    """None where the text is no call."""
    try:
        tree = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):  # a model may write any number of brackets
        return None
    calls = [_call(part, arguments) for part in (tree if isinstance(tree, list) else [tree])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call(tree: object, arguments: str) -> ToolCall | None:
    if not isinstance(tree, dict):
        return None
    name, given = tree.get("name"), tree.get(arguments, {})
    if not isinstance(name, str) or not name or not _is_text(name) or not isinstance(given, dict):
        return None
    written = _json(given)
    return ToolCall(name, written if _is_text(written) else json.dumps(given))


def _is_text(text: str) -> bool:
    """JSON can spell halves of a character, which no encoding can write."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _divided(part: str, close: str) -> tuple[str, str]:
    """The call and what follows its end. A model that stops before the closing mark has closed it."""
    body, _, after = part.partition(close)
    return body, after


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of the text with which the mark begins."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
