"""Conversations to tokens, by a model's own chat template, with the knowledge of which tokens are the assistant's.

Knows tokenizers and templates; nothing of losses, commands or HTTP. Training looks at the assistant's turns alone. A turn's text is what
the template adds to the prompt that asks for it, so a rendered conversation must begin with every such prompt. A turn is tokenized apart
from what is before it, as a sampler draws it apart from its prompt: the tokens before a turn are exactly those of its prompt, and those
that are trained can be drawn after it, the marker of the turn's end among them. All calls block: run them in a thread.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.text.chat import ChatTemplate
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.text.tool_calls import HERMES, ToolFormat, format_of, has_calls, spelled_out

ASSISTANT = "assistant"
MESSAGE_COST = 4096  # characters that a template copies in the time that a message of none takes it
_SPLIT = "end the conversation at that turn, or send token ids"

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """`is_trained[t]`: token t is of an assistant's turn."""

    tokens: list[int]
    is_trained: list[bool]

    @property
    def inputs(self) -> list[int]:
        """What a model reads to predict `targets`."""
        return self.tokens[:-1]

    @property
    def targets(self) -> list[int]:
        """Target t follows input t."""
        return self.tokens[1:]

    @property
    def weights(self) -> list[float]:
        """1 where the target is of an assistant's turn, else 0."""
        return [float(is_trained) for is_trained in self.is_trained[1:]]


def rendered_characters(messages: Iterable[tuple[str, int]]) -> int:
    """The work of `supervise` or `prompt`, in characters, for messages of these roles and sizes of content: one rendering of all, and for
    each assistant's turn one of what is before it and one that ends with it. It grows with the square of the number of turns."""
    total, prefix = 0, MESSAGE_COST
    for role, size in messages:
        before, prefix = prefix, prefix + MESSAGE_COST + size
        if role == ASSISTANT:
            total += before + prefix
    return total + prefix


class Conversations:
    """Over one base model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._longest_token = tokenizer.longest_token()
        # The longest first, so that a refusal names the whole token. Without any, a pattern that nothing matches.
        control = sorted(tokenizer.control_tokens(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) if control else r"(?!)")

    @classmethod
    def from_dir(cls, path: str | Path) -> "Conversations | None":
        """Of a model's directory; None where it has no tokenizer."""
        try:
            tokenizer = Tokenizer.from_dir(path)
        except FileNotFoundError:
            return None
        return cls(tokenizer, ChatTemplate.from_dir(path))

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def tool_format(self) -> ToolFormat:
        """In which the model writes its calls."""
        template = self._template
        return format_of(template.source) if template is not None and template.takes_tools else HERMES

    def max_characters(self, num_tokens: int) -> int:
        """A text of more characters has more tokens than that."""
        return num_tokens * self._longest_token

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Control tokens are read as such. Nothing is added, unless the caller asks for what the tokenizer puts around a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: list[int]) -> str:
        """For readers: without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """What asks the assistant for its next turn. Its former turns are tokenized apart where the template renders them as it asked for
        them. `tools` are told by the template, or, where it knows none, by a system message. Raises ValidationFailed."""
        self._check_contents(messages)
        self._check_contents(tools, "tools")
        if not self._chat().takes_tools and (tools or has_calls(messages)):
            messages, tools = spelled_out(messages, tools), ()
        text = self._render(messages, tools, add_generation_prompt=True)
        tokens: list[int] = []
        for segment, _ in _segments(text, self._turns(messages, text, tools, is_prompt=True)):
            tokens += self._encode_after(tokens, segment)
        return tokens

    def supervise(self, messages: Sequence[Message], max_context: int) -> Rendered:
        """The whole conversation. Raises InputTokensExceeded as soon as more than `max_context` inputs come of it; ValidationFailed where
        a content holds a control token, where the template refuses the messages, or renders a turn differently from the prompt that asks
        for it."""
        self._check_contents(messages)
        text = self._chat().render(messages, add_generation_prompt=False)
        tokens: list[int] = []
        is_trained: list[bool] = []
        for segment, is_turn in _segments(text, self._turns(messages, text, (), is_prompt=False)):
            part = self._encode_after(tokens, segment)
            tokens += part
            is_trained += [is_turn] * len(part)
            if len(tokens) > max_context + 1:
                raise InputTokensExceeded(
                    f"messages: {len(tokens)} tokens or more exceed the context of {max_context}; shorten the conversation"
                )
        return Rendered(tokens, is_trained)

    def _check_contents(self, parts: Sequence[Mapping[str, object]], field: str = "messages") -> None:
        for index, part in enumerate(parts):
            found = next((found for text in _texts(part) if (found := self._control.search(text)) is not None), None)
            if found is not None:
                raise ValidationFailed(
                    f"{field}[{index}]: holds {found.group()!r}, a control token of the base model; remove it, or send token ids"
                )

    def _encode_after(self, tokens: list[int], segment: str) -> list[int]:
        return self._tokenizer.encode_on(segment) if tokens else self._tokenizer.encode(segment)

    def _turns(self, messages: Sequence[Message], text: str, tools: Tools, *, is_prompt: bool) -> Iterator[tuple[int, int]]:
        """Where the assistant's turns stand in the text, in order. A prompt leaves out a turn that stands there differently."""
        end = 0
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            is_whole = not is_prompt and index == len(messages) - 1
            try:
                start, end = self._turn(messages[: index + 1], text, end, tools, is_whole=is_whole)
            except ValidationFailed:
                if is_prompt:
                    continue
                raise
            yield start, end

    def _turn(self, messages: Sequence[Message], text: str, begin: int, tools: Tools, *, is_whole: bool) -> tuple[int, int]:
        """Of the last of the messages, at or after `begin`. is_whole: they render as the text, so that is not done again."""
        index = len(messages) - 1
        asked = self._render(messages[:-1], tools, add_generation_prompt=True)
        answered = text if is_whole else self._render(messages, tools, add_generation_prompt=False)
        if not answered.startswith(asked) or len(asked) < begin:
            raise ValidationFailed(
                f"messages[{index}]: the base model's chat template renders this turn differently from its prompt; send token ids"
            )
        if not text.startswith(answered):
            raise ValidationFailed(f"messages[{index}]: the base model's chat template changes this turn once others follow; {_SPLIT}")
        return len(asked), len(answered)

    def _render(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool) -> str:
        return self._chat().render(messages, add_generation_prompt=add_generation_prompt, tools=tools or None)

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise ValidationFailed("messages: the base model has no chat template; send texts or token ids")
        return self._template


def _texts(tree: object) -> Iterator[str]:
    """Everything that a template may write, whatever it is nested in."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield str(key)
            yield from _texts(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _texts(part)


def _segments(text: str, turns: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """The text in pieces, in order, and whether each is one of the turns."""
    at = 0
    for start, end in turns:
        yield text[at:start], False
        yield text[start:end], True
        at = end
    yield text[at:], False
