"""Conversations to tokens, by a model's own chat template, with the knowledge of which tokens are the assistant's.

Knows tokenizers and templates; nothing of losses, commands or HTTP. Training looks at the assistant's turns alone. A turn's text is what
the template adds to the prompt that asks for it, so a rendered conversation must begin with every such prompt: then the tokens that are
trained are those that a sampler would have to draw, the marker of the turn's end among them. All calls block: run them in a thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.text.chat import ChatTemplate
from tinsmith.text.tokenizer import Tokenizer

ASSISTANT = "assistant"
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


class Conversations:
    """Over one base model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

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

    def encode(self, text: str) -> list[int]:
        """As it is: nothing is added."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """For readers: without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """What asks the assistant for its next turn. Raises ValidationFailed."""
        return self._tokenizer.encode(self._chat().render(messages, add_generation_prompt=True))

    def supervise(self, messages: Sequence[Message], max_context: int) -> Rendered:
        """The whole conversation. Raises InputTokensExceeded where more than `max_context` inputs come of it; ValidationFailed where
        the template refuses it, or renders a turn differently from the prompt that asks for it."""
        text = self._chat().render(messages, add_generation_prompt=False)
        tokens, spans = self._tokenizer.encode_spans(text)
        # Before the turns are looked for, which takes a rendering each.
        if len(tokens) > max_context + 1:
            raise InputTokensExceeded(f"messages: {len(tokens)} tokens exceed the context of {max_context}; shorten the conversation")
        turns = list(self._turns(messages, text))
        return Rendered(tokens, list(_overlaps(spans, turns)))

    def _turns(self, messages: Sequence[Message], text: str) -> Iterator[tuple[int, int]]:
        """Where the assistant's turns stand in the text, in order."""
        template = self._chat()
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            asked = template.render(messages[:index], add_generation_prompt=True)
            answered = template.render(messages[: index + 1], add_generation_prompt=False)
            if not answered.startswith(asked):
                raise ValidationFailed(
                    f"messages[{index}]: the base model's chat template renders this turn differently from its prompt; send token ids"
                )
            if not text.startswith(answered):
                raise ValidationFailed(f"messages[{index}]: the base model's chat template changes this turn once others follow; {_SPLIT}")
            yield len(asked), len(answered)

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise ValidationFailed("messages: the base model has no chat template; send texts or token ids")
        return self._template


def _overlaps(spans: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """For each span, whether it has a character in common with one of the turns; both are in order."""
    remaining = iter(turns)
    turn = next(remaining, None)
    for start, end in spans:
        while turn is not None and turn[1] <= start:
            turn = next(remaining, None)
        yield turn is not None and start < turn[1] and turn[0] < end
