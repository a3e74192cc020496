"""Posts tokens of running samples to those who watch them: beside the decoding, and never in its way.

What comes while a post is under way waits, merged, for the next one, so a slow store costs fewer and larger posts. With the store away
nothing piles up beyond the samples' own tokens: those of a sample that has ended are forgotten, since its record has them.

The only clock: the pause after the store was away.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from tinsmith.protocol.errors import StateContention
from tinsmith.state.inbox import StreamChunk, encode
from tinsmith.state.lanes import Lanes

_PAUSE_S = 0.2  # after the first failure of the store, doubled by each further one
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)

_Waiting = dict[tuple[str, int], StreamChunk]  # by request id and sequence


class Courier:
    """One a replica; its methods belong to one event loop. `close` ends it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._waiting: dict[str, _Waiting] = {}  # by topic
        self._posting: asyncio.Task[None] | None = None

    def carry(self, topic: str, chunks: Sequence[StreamChunk]) -> None:
        """Post the chunks soon. An exception of an earlier post that is no outage is raised here: it is a defect of this server."""
        waiting = self._waiting.setdefault(topic, {})
        for chunk in chunks:
            _merge(waiting, chunk)
        if self._posting is not None and self._posting.done():
            self._posting.result()
            self._posting = None
        if self._posting is None:
            self._posting = asyncio.create_task(self._post())

    def forget(self, rid: str) -> None:
        """Drop what waits of a sample that has ended."""
        for topic, waiting in list(self._waiting.items()):
            for key in [key for key in waiting if key[0] == rid]:
                del waiting[key]
            if not waiting:
                del self._waiting[topic]

    async def close(self) -> None:
        """Drop what waits."""
        if self._posting is not None:
            self._posting.cancel()
            with suppress(asyncio.CancelledError):
                await self._posting

    async def _post(self) -> None:
        pause_s = _PAUSE_S
        while self._waiting:
            topic, sent = next(iter(self._waiting.items()))
            del self._waiting[topic]
            try:
                await self._lanes.post(topic, [encode(chunk) for chunk in sent.values()])
            except StateContention as error:
                _log.warning("tokens of streams wait for the store (%s)", error)
                self._put_back(topic, sent)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _PAUSE_S

    def _put_back(self, topic: str, sent: _Waiting) -> None:
        newer = self._waiting.get(topic, {})
        for chunk in newer.values():
            _merge(sent, chunk)
        self._waiting[topic] = sent


def _merge(waiting: _Waiting, chunk: StreamChunk) -> None:
    """Append the chunk to what waits of its sequence; a sample that runs again begins anew, and its tokens are the same."""
    key = (chunk.rid, chunk.sequence)
    held = waiting.get(key)
    if held is not None and held.offset + len(held.tokens) == chunk.offset:
        held.tokens.extend(chunk.tokens)
        held.logprobs.extend(chunk.logprobs)
    else:
        waiting[key] = chunk.model_copy(update={"tokens": list(chunk.tokens), "logprobs": list(chunk.logprobs)})
