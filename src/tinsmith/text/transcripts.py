"""What a reader sees of one sampled sequence: its text, as it grows. Knows tokens and text; no model, no request, no answer.

Special tokens are not part of it, and nothing of a stop string or of what follows one. A piece is told once it is final: text that may
still turn out to begin a stop string waits. The pieces joined are the same however the tokens came.
"""

from collections.abc import Collection, Sequence

from tinsmith.text.tokenizer import Tokenizer


class Transcript:
    def __init__(self, tokenizer: Tokenizer, stops: Collection[str] = (), *, after: Sequence[int] = (), kept: Collection[str] = ()) -> None:
        """`after`: the prompt, whose end decides how a first word is spaced. `kept`: special tokens that belong to the text all the same,
        such as the mark of a tool call. No stop is empty."""
        self._stream = tokenizer.stream(after)
        self._hidden = frozenset(number for number, text in tokenizer.special_ids.items() if text not in kept)
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # may begin a stop string
        self._num_told = 0
        self.is_stopped = False

    @property
    def size(self) -> int:
        """Characters so far, those that are held back included: where the text of the next token begins."""
        return self._num_told + len(self._held)

    def push(self, token: int) -> str:
        """The text that the token makes final."""
        piece = self._push(token)
        self._num_told += len(piece)
        return piece

    def end(self) -> str:
        """What was held back, of a sequence that has ended."""
        piece = self._cut(self._held + self._stream.rest())
        self._held = ""
        self._num_told += len(piece)
        return piece

    def _push(self, token: int) -> str:
        if token in self._hidden:  # what it stands for lies between: no stop string goes on after it
            piece, self._held = self._held, ""
            return piece
        text = self._cut(self._held + self._stream.push(token))
        self._held = "" if self.is_stopped else text[len(text) - self._num_undecided(text) :]
        return text[: len(text) - len(self._held)]

    def _cut(self, text: str) -> str:
        """Up to the first stop string."""
        if self.is_stopped:
            return ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        return text[: min(found)] if found else text

    def _num_undecided(self, text: str) -> int:
        """Characters at the end with which a stop string may begin."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
