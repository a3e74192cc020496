"""Requests under /v1 and the sampler that answers them by hand."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from tests.fakes.face import BASE, Face
from tinsmith.protocol import wire
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, StopReason, TopRow
from tinsmith.state.inbox import SampleAbort, StreamChunk, decode
from tinsmith.state.lanes import PoolEntry, Replica, Role, inbox_topic
from tinsmith.text.conversations import Conversations
from tinsmith.text.tokenizer import Tokenizer

SAMPLER = Replica(id="sampler", base=BASE, node="n", pid=1, started="0", role=Role.SAMPLER)
WAIT_S = 10
END = "<|im_end|>"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Name a colour."}]


@cache
def texts_of(path: str) -> Conversations:
    """Read once for all tests."""
    texts = Conversations.from_dir(path)
    assert texts is not None
    return texts


@dataclass
class Scene:
    face: Face
    cursors: dict[str, int]  # of the sampler, in its work topic

    @property
    def tokenizer(self) -> Tokenizer:
        return texts_of(self.face.services.base_models[BASE].path).tokenizer

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.face.http.post(f"/v1{path}", json={"model": BASE} | body)

    def begin(self, path: str, **body: object) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.post(path, **body))

    async def take(self) -> tuple[PoolEntry, Sample]:
        """The next sample, once it is queued."""
        await self.face.lanes.renew(SAMPLER)
        while not (entries := await self.face.lanes.pool_take(BASE, SAMPLER.id, 1, 1)):
            wake = await self.face.lanes.wait(self.cursors, WAIT_S)
            assert wake.events, "no sample was queued"
            self.cursors = dict(wake.cursors)
        (body,) = await self.face.lanes.bodies([(entries[0].rid, entries[0].digest)])
        assert body is not None
        sample = wire.decode_command(Sample.kind, body)
        assert isinstance(sample, Sample)
        return entries[0], sample

    async def settle(self, entry: PoolEntry, outcome: Outcome) -> None:
        await self.face.lanes.pool_settle(SAMPLER.id, [(entry, outcome)])

    async def asked(self, path: str, **body: object) -> Sample:
        """What the request queues; it is then failed."""
        asking = self.begin(path, **body)
        entry, sample = await self.take()
        await self.settle(entry, Outcome.failed(RuntimeError(), is_tainted=False))
        await asking
        return sample

    async def answer(self, path: str, *drawn: SampledSequence, cached: int = 0, **body: object) -> dict[str, Any]:
        """The answer to a request whose one sample comes to that."""
        asking = self.begin(path, **body)
        entry, _ = await self.take()
        await self.settle(entry, outcome(*drawn, cached=cached))
        response = await asking
        assert response.status_code == 200, response.text
        tree: dict[str, Any] = response.json()
        return tree

    async def events(self, path: str, *drawn: SampledSequence, pieces: Sequence[int] = (), **body: object) -> list[Any]:
        """The chunks of a stream: of the first sequence, so many tokens are told ahead of the result, piece by piece. None is `[DONE]`."""
        asking = self.begin(path, stream=True, **body)
        entry, _ = await self.take()
        offset = 0
        for size in pieces:
            self.hear(entry, offset, drawn[0].tokens[offset : offset + size], drawn[0].logprobs[offset : offset + size])
            offset += size
            for _ in range(5):
                await asyncio.sleep(0)
        await self.settle(entry, outcome(*drawn))
        return parsed(await asking)

    def hear(self, entry: PoolEntry, offset: int, tokens: list[int], logprobs: list[float]) -> None:
        chunk = StreamChunk(rid=entry.rid, sequence=0, offset=offset, tokens=tokens, logprobs=logprobs)
        self.face.services.streams.hear(chunk)

    async def aborts(self, timeout_s: float = WAIT_S) -> list[SampleAbort]:
        wake = await self.face.lanes.wait({inbox_topic(SAMPLER.id): 0}, timeout_s)
        return [message for text in wake.events.get(inbox_topic(SAMPLER.id), ()) if isinstance(message := decode(text), SampleAbort)]

    def drawn(self, text: str, reason: StopReason = StopReason.STOP, tops: list[TopRow | None] | None = None) -> SampledSequence:
        tokens = self.tokenizer.encode(text)
        return SampledSequence(tokens, [-1.0 - at for at in range(len(tokens))], reason, tops)


def outcome(*drawn: SampledSequence, cached: int = 0) -> Outcome:
    return Outcome(result=wire.encode_sample_output(SampleOutput(list(drawn), prompt_cache_hit_tokens=cached)))


def parsed(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    datas = [event.removeprefix("data: ") for event in events]
    return [None if data == "[DONE]" else json.loads(data) for data in datas]
