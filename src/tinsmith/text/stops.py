"""When a sample ends: the stop rules of a request, applied to one token after the other.

The rule for stop strings: the sampled tokens are returned up to and including the token that completes the string, even where that token
carries text beyond it. Tokens are never split or dropped, so tokens and log-probs stay aligned one to one, and a trainer sees exactly
the tokens that were drawn. Only sampled text counts: a string that began in the prompt does not match.
"""

from collections.abc import Collection

from tinsmith.text.tokenizer import Tokenizer

Stop = tuple[str, ...] | tuple[int, ...] | None


class StopMatcher:
    """The stop state of one sequence.

    stop None: an end-of-sequence token stops. Empty: nothing stops, the end of sequence neither. Token ids or strings: any of them
    stops, and so does an end-of-sequence token.
    """

    def __init__(self, stop: Stop, eos_token_ids: Collection[int], tokenizer: Tokenizer | None) -> None:
        """`tokenizer` is needed for strings only; ValueError without it."""
        self._ids = _stop_ids(stop, eos_token_ids)
        self._strings = tuple(text for text in stop or () if isinstance(text, str))
        if any(not text for text in self._strings):
            raise ValueError("an empty stop string would stop before the first token")
        self._firsts = frozenset(text[0] for text in self._strings)
        self._tail = ""
        self._pieces: list[tuple[int, bool]] = []  # of each token: characters that it made final, and whether none is incomplete
        self._kept = max((len(text) for text in self._strings), default=1) - 1
        self._stream = None
        if self._strings:
            if tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            self._stream = tokenizer.stream()

    def push(self, token: int) -> bool:
        """Take the next sampled token; True if the sequence ends with it."""
        if token in self._ids:
            return True
        if self._stream is None:
            return False
        piece = self._stream.push(token)
        self._pieces.append((len(piece), self._stream.is_complete))
        text = self._tail + piece
        if any(string in text for string in self._strings):
            return True
        self._tail = text[max(0, len(text) - self._kept) :]
        return False

    def num_undecided(self) -> int:
        """How many of the newest tokens may turn out to begin a stop string: those whose text is the beginning of one, or is incomplete."""
        rest = self._num_undecided_characters()
        undecided = 0
        for size, is_complete in reversed(self._pieces):
            if rest <= 0 and is_complete:
                break
            rest -= size
            undecided += 1
        return undecided

    def _num_undecided_characters(self) -> int:
        for start, character in enumerate(self._tail):
            if character in self._firsts and any(string.startswith(self._tail[start:]) for string in self._strings):
                return len(self._tail) - start
        return 0


def _stop_ids(stop: Stop, eos_token_ids: Collection[int]) -> frozenset[int]:
    if stop is None:
        return frozenset(eos_token_ids)
    if not stop:
        return frozenset()
    return frozenset(eos_token_ids) | {token for token in stop if isinstance(token, int)}
