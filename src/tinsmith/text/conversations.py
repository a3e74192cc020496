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

ASSISTANT = "assistant"
MESSAGE_COST = 4096  # characters that a template copies in the time that a message of none takes it
_SPLIT = "end the conversation at that turn, or send token ids"

Message = Mapping[str, object]


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

    def max_characters(self, num_tokens: int) -> int:
        """A text of more characters has more tokens than that."""
        return num_tokens * self._longest_token

    def encode(self, text: str) -> list[int]:
        """As it is: nothing is added, and control tokens are read as such."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """For readers: without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """What asks the assistant for its next turn. Its former turns are tokenized apart where the template renders them as it asked for
        them. Raises ValidationFailed."""
        self._check_contents(messages)
        text = self._chat().render(messages, add_generation_prompt=True)
        tokens: list[int] = []
        for segment, _ in _segments(text, self._turns(messages, text, is_prompt=True)):
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
        for segment, is_turn in _segments(text, self._turns(messages, text, is_prompt=False)):
            part = self._encode_after(tokens, segment)
            tokens += part
            is_trained += [is_turn] * len(part)
            if len(tokens) > max_context + 1:
                raise InputTokensExceeded(
                    f"messages: {len(tokens)} tokens or more exceed the context of {max_context}; shorten the conversation"
                )
        return Rendered(tokens, is_trained)

    def _check_contents(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            found = self._control.search(str(message["content"]))
            if found is not None:
                raise ValidationFailed(
                    f"messages[{index}]: holds {found.group()!r}, a control token of the base model; remove it, or send token ids"
                )

    def _encode_after(self, tokens: list[int], segment: str) -> list[int]:
        return self._tokenizer.encode_on(segment) if tokens else self._tokenizer.encode(segment)

    def _turns(self, messages: Sequence[Message], text: str, *, is_prompt: bool) -> Iterator[tuple[int, int]]:
        """Where the assistant's turns stand in the text, in order. A prompt leaves out a turn that stands there differently."""
        end = 0
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            is_whole = not is_prompt and index == len(messages) - 1
            try:
                start, end = self._turn(messages[: index + 1], text, end, is_whole=is_whole)
            except ValidationFailed:
                if is_prompt:
                    continue
                raise
            yield start, end

    def _turn(self, messages: Sequence[Message], text: str, begin: int, *, is_whole: bool) -> tuple[int, int]:
        """Of the last of the messages, at or after `begin`. is_whole: they render as the text, so that is not done again."""
        template = self._chat()
        index = len(messages) - 1
        asked = template.render(messages[:-1], add_generation_prompt=True)
        answered = text if is_whole else template.render(messages, add_generation_prompt=False)
        if not answered.startswith(asked) or len(asked) < begin:
            raise ValidationFailed(
                f"messages[{index}]: the base model's chat template renders this turn differently from its prompt; send token ids"
            )
        if not text.startswith(answered):
            raise ValidationFailed(f"messages[{index}]: the base model's chat template changes this turn once others follow; {_SPLIT}")
        return len(asked), len(answered)

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise ValidationFailed("messages: the base model has no chat template; send texts or token ids")
        return self._template


def _segments(text: str, turns: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """The text in pieces, in order, and whether each is one of the turns."""
    at = 0
    for start, end in turns:
        yield text[at:start], False
        yield text[start:end], True
        at = end
    yield text[at:], False
