"""The token streams of this process: what samplers post about a request, until the answers that carry it have ended.

Knows tokens and offsets; nothing of HTTP, samplers or the store. A chunk may come twice, late or never, so it counts only where it
continues what was heard. The stored result is the truth, and fills what is missing at the end.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinsmith import telemetry
from tinsmith.protocol.native_answers import SequenceResult, StreamFrame
from tinsmith.state.inbox import Message, StreamChunk

ITEM_S = 60.0
GRACE_S = 2.0  # of a sample whose connection broke: the typed client asks again within a second


@dataclass(slots=True)
class _Heard:
    """One sequence: its tokens from the first on, without a gap, and how many of them were sent."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_sent: int = 0

    def extend(self, chunk: StreamChunk) -> None:
        known = len(self.tokens) - chunk.offset
        if 0 <= known < len(chunk.tokens):
            self.tokens += chunk.tokens[known:]
            self.logprobs += chunk.logprobs[known:]


class Stream:
    """One answer that carries a sample: what it has heard, and what of that it has sent."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._heard: dict[int, _Heard] = {}
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """True once woken since the last `wait` that said so; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def wake(self) -> None:
        self._event.set()

    def hear(self, chunk: StreamChunk) -> None:
        """Keep what continues a sequence. Wakes in any case: the sample is alive."""
        self._heard.setdefault(chunk.sequence, _Heard()).extend(chunk)
        self.wake()

    def join(self, sibling: "Stream") -> None:
        """Begin with what another answer of the same sample has heard."""
        self._heard = {sequence: _Heard(list(heard.tokens), list(heard.logprobs)) for sequence, heard in sibling._heard.items()}
        self.wake()

    def take(self) -> list[StreamFrame]:
        """A delta for each sequence that has something unsent."""
        frames: list[StreamFrame] = []
        for sequence, heard in sorted(self._heard.items()):
            frames += _delta(sequence, heard.num_sent, heard.tokens, heard.logprobs)
            heard.num_sent = len(heard.tokens)
        return frames

    def rest(self, sequences: Sequence[SequenceResult]) -> list[StreamFrame]:
        """What the result has beyond the deltas that were sent. Where a sample that ran again drew another token, from there on."""
        frames: list[StreamFrame] = []
        for index, result in enumerate(sequences):
            heard = self._heard.get(index, _Heard())
            sent = heard.tokens[: heard.num_sent]
            offset = next((at for at, pair in enumerate(zip(sent, result.tokens, strict=False)) if pair[0] != pair[1]), len(sent))
            frames += _delta(index, offset, result.tokens, result.logprobs)
        return frames


class Streams:
    """The open streams, by request id. `item_s`: how long one may hear nothing of its sample. `grace_s`: how long a sample is kept whose
    last stream lost its connection."""

    def __init__(self, item_s: float = ITEM_S, grace_s: float = GRACE_S) -> None:
        self.item_s = item_s
        self.grace_s = grace_s
        self._open: defaultdict[str, list[Stream]] = defaultdict(list)
        self._owned: set[str] = set()

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    @contextlib.contextmanager
    def open(self, rid: str) -> Iterator[Stream]:
        """A stream that hears from now on, and what its siblings have heard before."""
        stream = Stream(rid)
        if rid in self._open:
            stream.join(self._open[rid][0])
        self._open[rid].append(stream)
        self._tell()
        try:
            yield stream
        finally:
            self._open[rid].remove(stream)
            if not self._open[rid]:
                del self._open[rid]
                self._owned.discard(rid)
            self._tell()

    def own(self, rid: str) -> None:
        """The sample was submitted here, for a stream that is open: it ends with the last one of its streams."""
        self._owned.add(rid)

    def is_ours(self, rid: str) -> bool:
        """Whether this process hears the sample's tokens and decides when nobody wants them."""
        return rid in self._owned

    def is_last(self, rid: str) -> bool:
        """Whether at most one stream of the sample is open here."""
        return len(self._open.get(rid, ())) <= 1

    def hear(self, message: Message) -> None:
        """Pass a message of this process's inbox on to the streams that it is about."""
        if isinstance(message, StreamChunk):
            for stream in self._open.get(message.rid, ()):
                stream.hear(message)

    def _tell(self) -> None:
        telemetry.gauge(telemetry.STREAMS_OPEN, self.num_open)


def _delta(sequence: int, offset: int, tokens: Sequence[int], logprobs: Sequence[float]) -> list[StreamFrame]:
    if len(tokens) <= offset:
        return []
    return [StreamFrame(type="delta", sequence=sequence, offset=offset, tokens=tuple(tokens[offset:]), logprobs=tuple(logprobs[offset:]))]
