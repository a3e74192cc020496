"""Token ids to text and back, over a `tokenizer.json`. Knows the `tokenizers` library alone: no model, no chat, no stop rule."""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3  # a character has at most 4 bytes, so at most 3 of them wait for the rest
_CONTEXT = 6  # tokens decoded again before the new ones: some decoders treat the first token of a text specially
_WINDOW = 24  # tokens after which the window slides


class Tokenizer:
    """Encodes and decodes. Special tokens are never added, and never dropped when decoding, unless the caller asks for it."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._fast.no_truncation()
        self._fast.no_padding()

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

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where in the text each stands: characters [start, end). Tokens that share a character overlap."""
        encoding = self._fast.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes that are no valid UTF-8 become U+FFFD; unknown ids are dropped."""
        return str(self._fast.decode(tokens, skip_special_tokens=skip_special_tokens))

    def stream(self) -> "TextStream":
        return TextStream(self)


class TextStream:
    """Decodes a growing sequence token by token; the pieces joined are the text of the whole.

    A character whose bytes are split over tokens appears with the token that completes it. Work a token is constant: only a short
    window of the newest tokens is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = ""  # what of the window's text has been handed out
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


def _without_incomplete_tail(text: str) -> str:
    """Drop at most three replacement characters at the end: they may stand for the first bytes of a character."""
    stem = text.rstrip(_REPLACEMENT)
    return text[: max(len(stem), len(text) - _MAX_HELD)]
