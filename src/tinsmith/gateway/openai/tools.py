"""Tools under /v1: calls of former turns as a chat template reads them, and the calls in what a model has drawn.

The form of a call is the model's own (`text.tool_calls`). Calls are told whole, once the sequence has ended.
"""

import json
import uuid
from typing import NoReturn

from tinsmith.gateway.openai import answers
from tinsmith.gateway.openai.bodies import ToolBody, ToolCallBody
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.text.tool_calls import ToolFormat


def signature(tool: ToolBody) -> dict[str, object]:
    """As templates read it."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def former_call(call: ToolCallBody, field: str) -> dict[str, object]:
    """As templates read it: the arguments are an object. Raises ValidationFailed."""
    try:
        arguments = json.loads(call.function.arguments, parse_constant=_refuse)
        json.dumps(arguments, ensure_ascii=False).encode()  # a template writes them so; JSON can spell halves of a character
    except (ValueError, RecursionError) as error:
        raise ValidationFailed(f"{field}.function.arguments: no JSON; send the arguments as the model wrote them") from error
    if not isinstance(arguments, dict):
        raise ValidationFailed(f"{field}.function.arguments: no JSON object; send one")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


class CallReader:
    """Divides the text of one choice into content, told as it comes, and calls. Without a format all is content."""

    def __init__(self, form: ToolFormat | None) -> None:
        self._form = form
        self._text = ""
        self._num_told = 0

    def push(self, text: str) -> str:
        """The content that the text makes certain."""
        if self._form is None:
            return text
        self._text += text
        end = self._form.begin(self._text, self._num_told)
        piece = self._text[self._num_told : end]
        self._num_told = end
        return piece

    def end(self) -> tuple[str, list[answers.ToolCall]]:
        """The rest of the content, and the calls."""
        if self._form is None:
            return "", []
        parsed = self._form.parse(self._text)
        return parsed.content[self._num_told :], [
            answers.ToolCall(
                id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=answers.Function(name=call.name, arguments=call.arguments)
            )
            for call in parsed.calls
        ]
