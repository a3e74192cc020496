"""Token ids to text and back, over a `tokenizer.json`. Knows the `tokenizers` library alone: no model, no chat, no stop rule."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3  # a character has at most 4 bytes, so at most 3 of them wait for the rest
_CONTEXT = 6  # tokens decoded again before the new ones: some decoders treat the first token of a text specially
_WINDOW = 24  # tokens after which the window slides
_ANCHOR = "\n"  # stands for what is before a text; no tokenizer puts it into one token with a mark of a beginning


class Tokenizer:
    """Encodes and decodes. Special tokens are never added, and never dropped when decoding, unless the caller asks for it."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._fast.no_truncation()
        self._fast.no_padding()
        self._marks_beginnings = self._fast.encode("a", add_special_tokens=False).tokens != ["a"]

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read `path`/tokenizer.json. Raises FileNotFoundError if there is none."""
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; a base model's directory needs a tokenizer.json")
        return cls(FastTokenizer.from_file(str(file)))

    @property
    def vocab_size(self) -> int:
        """Ids known, added ones included."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def longest_token(self) -> int:
        """Characters that one token stands for at most."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)

    def control_tokens(self) -> tuple[str, ...]:
        """Texts that become one special token wherever they stand, such as the mark of a turn's end; sorted."""
        return tuple(sorted(token.content for token in self._fast.get_added_tokens_decoder().values() if token.special))

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """The tokens that readers of a text do not see, with what they stand for."""
        return {number: token.content for number, token in self._fast.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_on(self, text: str) -> list[int]:
        """A text that goes on from another: without the mark that some tokenizers put before the first word of a text."""
        if not self._marks_beginnings:
            return self.encode(text)
        lead, whole = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
        return whole[len(lead) :] if whole[: len(lead)] == lead else self.encode(text)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes that are no valid UTF-8 become U+FFFD; unknown ids are dropped."""
        return str(self._fast.decode(tokens, skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """What one token adds to a text that it goes on from, special ones included."""
        lead = self.encode(_ANCHOR) if self._marks_beginnings else []
        return self.decode([*lead, token])[len(self.decode(lead)) :]

    def stream(self, after: Sequence[int] = ()) -> "TextStream":
        """`after`: the tokens that the sequence goes on from. The first word of a text loses its mark of a beginning; one that goes on
        keeps its space."""
        return TextStream(self, after)


class TextStream:
    """Decodes a growing sequence token by token; the pieces joined are the text of the whole.

    A character whose bytes are split over tokens appears with the token that completes it. Work a token is constant: only a short
    window of the newest tokens is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = list(after[-_CONTEXT:])
        self._emitted = _without_incomplete_tail(tokenizer.decode(self._window))  # what of the window's text has been handed out
        self.is_complete = True  # False while the newest bytes may be the first of a character

    def push(self, token: int) -> str:
        """The text that `token` makes final; empty while a character is incomplete."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        final = _without_incomplete_tail(text)
        self.is_complete = final == text
        piece = final[len(self._emitted) :]
        self._emitted = max(final, self._emitted, key=len)
        if len(self._window) >= _WINDOW and self.is_complete:
            self._window = self._window[-_CONTEXT:]
            self._emitted = self._tokenizer.decode(self._window)
        return piece

    def rest(self) -> str:
        """Of a sequence that has ended: the bytes of a character that never became whole, as U+FFFD."""
        return self._tokenizer.decode(self._window)[len(self._emitted) :]


def _without_incomplete_tail(text: str) -> str:
    """Drop at most three replacement characters at the end: they may stand for the first bytes of a character."""
    stem = text.rstrip(_REPLACEMENT)
    return text[: max(len(stem), len(text) - _MAX_HELD)]
