"""sample_stream over the memory store: a sampler that the test moves by hand, one line a frame."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.fakes.face import BASE, Face, open_face
from tinsmith import telemetry
from tinsmith.gateway.native import streams
from tinsmith.gateway.streams import Streams
from tinsmith.protocol import native, wire
from tinsmith.protocol.errors import InternalError, StateContention
from tinsmith.protocol.futures import FutureRecord, Outcome, State
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, StopReason
from tinsmith.state.inbox import SampleAbort, StreamChunk, decode
from tinsmith.state.lanes import PoolEntry, Replica, Role, inbox_topic, work_topic

SAMPLER = Replica(id="sampler", base=BASE, node="n", pid=1, started="0", role=Role.SAMPLER)
PATH = native.PREFIX + native.SampleStream.path
WAIT_S = 5


@dataclass
class Scene:
    """A stream's server, and the sampler that a test plays."""

    face: Face
    sampler_id: str
    cursors: dict[str, int]  # of the sampler, in its work topic

    async def ask(self, **changes: object) -> httpx.Response:
        body: dict[str, object] = {"sampler_id": self.sampler_id, "seq_id": 1, "prompt_ids": [5, 6], "sampling": {"max_tokens": 4}}
        return await self.face.http.post(PATH, json=body | changes)

    def begin(self, **changes: object) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.ask(**changes))

    async def frames(self, asked: "asyncio.Task[httpx.Response]") -> list[dict[str, Any]]:
        async with asyncio.timeout(WAIT_S):
            response = await asked
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    async def take(self) -> PoolEntry:
        """The sample, once it is queued."""
        await self.face.lanes.renew(SAMPLER)
        while not (entries := await self.face.lanes.pool_take(BASE, SAMPLER.id, 1, 1_000_000)):
            wake = await self.face.lanes.wait(self.cursors, WAIT_S)
            assert wake.events, "no sample was queued"
            self.cursors = dict(wake.cursors)
        return entries[0]

    async def settle(self, entry: PoolEntry, outcome: Outcome) -> None:
        await self.face.lanes.pool_settle(SAMPLER.id, [(entry, outcome)])

    async def record(self, rid: str) -> FutureRecord | None:
        return await self.face.lanes.look("local", rid)

    def hear(self, rid: str, offset: int, *tokens: int) -> None:
        chunk = StreamChunk(rid=rid, sequence=0, offset=offset, tokens=list(tokens), logprobs=[-1.0] * len(tokens))
        self.face.services.streams.hear(chunk)

    async def inbox(self, timeout_s: float = 0.01) -> list[SampleAbort]:
        """The orders to the sampler, the first of which may still come."""
        wake = await self.face.lanes.wait({inbox_topic(SAMPLER.id): 0}, timeout_s)
        return [message for text in wake.events.get(inbox_topic(SAMPLER.id), ()) if isinstance(message := decode(text), SampleAbort)]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with open_face() as face:
        await face.lanes.renew(SAMPLER)
        yield await scene_on(face)


async def scene_on(face: Face) -> Scene:
    body = {"session_id": await face.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler_id = (await face.ok("/create_sampling_session", body))["sampling_session_id"]
    return Scene(face, sampler_id, await face.lanes.tail([work_topic(BASE)]))


def answer(*tokens: int) -> Outcome:
    sequence = SampledSequence(list(tokens), [-1.0] * len(tokens), StopReason.LENGTH)
    return Outcome(result=wire.encode_sample_output(SampleOutput([sequence])))


def tokens_of(frames: list[dict[str, Any]]) -> list[int]:
    told: list[int] = []
    for frame in frames:
        if frame["type"] == "delta":
            assert frame["offset"] == len(told), "in order, no token twice"
            told += frame["tokens"]
    return told


async def test_a_stream_tells_its_start_its_tokens_and_the_whole_result(scene: Scene) -> None:
    asked = scene.begin()
    entry = await scene.take()
    assert entry.reply_to == inbox_topic(scene.face.services.process_id)
    scene.hear(entry.rid, 0, 7)
    scene.hear(entry.rid, 0, 7, 8)
    await asyncio.sleep(0)
    await scene.settle(entry, answer(7, 8, 9, 1))
    frames = await scene.frames(asked)
    assert frames[0] == {"type": "start", "request_id": entry.rid}
    assert tokens_of(frames) == [7, 8, 9, 1]
    assert frames[-1]["type"] == "done"
    assert frames[-1]["result"]["sequences"][0]["tokens"] == [7, 8, 9, 1]
    assert frames[-1]["result"]["sequences"][0]["stop_reason"] == "length"
    assert [frame["type"] for frame in frames].count("done") == 1
    assert await scene.inbox() == []
    assert scene.face.services.streams.num_open == scene.face.services.polls.num_waiting == 0


async def test_tokens_that_were_never_heard_come_from_the_result(scene: Scene) -> None:
    asked = scene.begin()
    entry = await scene.take()
    scene.hear(entry.rid, 0, 7)
    await asyncio.sleep(0)
    scene.hear(entry.rid, 2, 9)
    await scene.settle(entry, answer(7, 8, 9, 1))
    assert tokens_of(await scene.frames(asked)) == [7, 8, 9, 1]


@pytest.mark.proves("R63")
async def test_a_sample_that_fails_ends_its_stream_with_an_error_frame(scene: Scene) -> None:
    asked = scene.begin()
    entry = await scene.take()
    scene.hear(entry.rid, 0, 7)
    await scene.settle(entry, Outcome.failed(RuntimeError("a kernel failed"), is_tainted=False))
    frames = await scene.frames(asked)
    error = frames[-1]["error"]
    assert frames[-1]["type"] == "error"
    assert (error["reason"], error["error_code"], error["category"]) == (InternalError.reason.value, 500, "server")
    assert error["request_id"] == entry.rid
    assert error["traceback"] is None
    assert "a kernel failed" not in json.dumps(frames)


@pytest.mark.proves("R63")
async def test_without_a_living_sampler_a_stream_is_one_structured_503_frame_and_nothing_is_enqueued() -> None:
    async with open_face() as face:
        scene = await scene_on(face)
        await face.lanes.renew(replace(SAMPLER, role=Role.TRAINER))
        frames = await scene.frames(scene.begin())
        (frame,) = frames
        assert frame["type"] == "error"
        assert (frame["error"]["error_code"], frame["error"]["reason"]) == (503, "backend_gate_unavailable")
        assert await scene.record(frame["request_id"]) is None
        await face.lanes.renew(SAMPLER)
        assert await face.lanes.pool_take(BASE, SAMPLER.id, 9, 1_000_000) == []


async def test_a_repeat_of_a_sample_that_has_run_streams_its_result(scene: Scene) -> None:
    first = scene.begin()
    entry = await scene.take()
    await scene.settle(entry, answer(7, 8, 9, 1))
    await scene.frames(first)
    await scene.face.lanes.bury(SAMPLER.id)
    frames = await scene.frames(scene.begin())
    assert [frame["type"] for frame in frames] == ["start", "delta", "done"], "no sampler is needed for it"
    assert tokens_of(frames) == [7, 8, 9, 1]


async def test_a_repeat_that_says_something_else_is_refused(scene: Scene) -> None:
    first = scene.begin()
    entry = await scene.take()
    refused = await scene.ask(prompt_ids=[5])
    assert (refused.status_code, refused.json()["reason"]) == (400, "request_rejected")
    assert scene.face.services.streams.num_open == 1
    await scene.settle(entry, answer(7))
    await scene.frames(first)


async def test_a_refused_request_is_answered_as_everywhere_and_leaves_nothing_open(scene: Scene) -> None:
    refused = await scene.ask(sampling={"temperature": -1})
    assert refused.status_code == 422
    assert refused.json()["details"]
    assert (await scene.ask(colour="red")).status_code == 422
    assert (await scene.ask(sampler_id="unknown")).status_code == 404
    assert scene.face.services.streams.num_open == scene.face.services.polls.num_waiting == 0


async def test_an_engine_that_does_not_stream_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    original = streams.sampling_engine
    monkeypatch.setattr(
        streams, "sampling_engine", lambda services, base: ("mute", replace(original(services, base)[1], has_streams=False))
    )
    refused = await scene.ask()
    assert (refused.status_code, refused.json()["reason"]) == (501, "endpoint_unavailable")
    assert "use /sample" in refused.json()["error"]


# --- bounds and ends


@pytest.fixture
async def impatient() -> AsyncIterator[Callable[[float, float], Any]]:
    """Makes a scene with the bounds (total, item)."""
    opened = []

    async def make(total_s: float, item_s: float) -> Scene:
        context = open_face(execution={"long_poll_s": 1, "timeout_s": total_s})
        face = await context.__aenter__()
        opened.append(context)
        await face.lanes.renew(SAMPLER)
        object.__setattr__(face.services, "streams", Streams(item_s))
        return await scene_on(face)

    yield make
    for context in opened:
        await context.__aexit__(None, None, None)


@pytest.mark.proves("R61")
@pytest.mark.parametrize(("total_s", "item_s", "names"), [(0.1, 60, "0.1 s"), (60, 0.1, "no token within 0.1 s")], ids=["total", "item"])
async def test_a_stream_ends_with_a_504_frame_at_either_bound_and_its_sample_is_aborted(
    impatient: Callable[[float, float], Any], total_s: float, item_s: float, names: str
) -> None:
    scene = await impatient(total_s, item_s)
    asked = scene.begin()
    entry = await scene.take()
    frames = await scene.frames(asked)
    assert frames[-1]["type"] == "error"
    assert (frames[-1]["error"]["error_code"], frames[-1]["error"]["reason"]) == (504, "execution_timeout")
    assert names in frames[-1]["error"]["error"]
    assert await scene.inbox() == [SampleAbort(rid=entry.rid)]


@pytest.mark.proves("R61")
async def test_each_token_renews_the_bound_of_an_item_and_none_renews_the_total(impatient: Callable[[float, float], Any]) -> None:
    scene = await impatient(1.2, 0.8)
    asked = scene.begin()
    entry = await scene.take()
    began = asyncio.get_running_loop().time()
    offset = 0
    while not asked.done():
        scene.hear(entry.rid, offset, 7)
        offset += 1
        await asyncio.sleep(0.05)
    frames = await scene.frames(asked)
    assert "did not end within 1.2 s" in frames[-1]["error"]["error"]
    assert asyncio.get_running_loop().time() - began < 5
    assert len(tokens_of(frames)) >= 5


@pytest.mark.proves("R62")
async def test_a_sample_that_never_started_is_cancelled_with_its_stream(impatient: Callable[[float, float], Any]) -> None:
    scene = await impatient(60, 0.05)
    frames = await scene.frames(scene.begin())
    record = await scene.record(frames[0]["request_id"])
    assert record is not None
    assert record.state is State.CANCELLED
    assert await scene.inbox() == []


@pytest.mark.proves("R62")
async def test_a_repeat_that_ends_early_leaves_the_sample_to_the_one_that_submitted_it(scene: Scene) -> None:
    first = scene.begin()
    entry = await scene.take()
    scene.hear(entry.rid, 0, 7)
    scene.face.services.streams.grace_s = 0
    with opened(2) as are_both_open:
        repeat = scene.begin()
        await are_both_open()
    await cut(repeat)
    assert await scene.inbox() == []
    await scene.settle(entry, answer(7, 8))
    assert tokens_of(await scene.frames(first)) == [7, 8]


@pytest.mark.proves("R62")
async def test_a_caller_that_goes_away_ends_the_stream_and_aborts_the_sample(scene: Scene) -> None:
    asked = scene.begin()
    entry = await scene.take()
    scene.face.services.streams.grace_s = 0.05
    await cut(asked)
    assert await scene.inbox(WAIT_S) == [SampleAbort(rid=entry.rid)]
    assert scene.face.services.streams.num_open == scene.face.services.polls.num_waiting == 0


@pytest.mark.proves("R62")
async def test_a_caller_that_comes_back_within_the_grace_follows_its_sample_from_the_first_token_on(scene: Scene) -> None:
    first = scene.begin()
    entry = await scene.take()
    scene.hear(entry.rid, 0, 7)
    await asyncio.sleep(0)
    scene.face.services.streams.grace_s = 0.3
    await cut(first)
    scene.hear(entry.rid, 1, 8)
    with opened(2) as are_both_open:
        again = scene.begin()
        await are_both_open()
    assert await scene.inbox(0.5) == [], "the grace is over"
    assert scene.face.services.streams.num_open == 1
    await scene.settle(entry, answer(7, 8, 9))
    assert tokens_of(await scene.frames(again)) == [7, 8, 9]
    assert scene.face.services.streams.num_open == scene.face.services.polls.num_waiting == 0


@pytest.mark.proves("R62")
async def test_a_caller_whose_answer_never_came_finds_its_sample_unstarted_and_not_cancelled(scene: Scene) -> None:
    scene.face.services.streams.grace_s = 0.3
    first = scene.begin()
    assert (await scene.face.lanes.wait(scene.cursors, WAIT_S)).events, "it is queued"
    await turns()
    await cut(first)
    with opened(2) as are_both_open:
        again = scene.begin()
        await are_both_open()
    entry = await scene.take()
    await scene.settle(entry, answer(7))
    assert tokens_of(await scene.frames(again)) == [7]


@pytest.mark.proves("R62")
async def test_one_who_took_a_stream_over_and_leaves_too_ends_its_sample(scene: Scene) -> None:
    first = scene.begin()
    entry = await scene.take()
    scene.face.services.streams.grace_s = 0.1
    await cut(first)
    with opened(2) as are_both_open:
        again = scene.begin()
        await are_both_open()
    await cut(again)
    assert await scene.inbox(WAIT_S) == [SampleAbort(rid=entry.rid)]
    assert scene.face.services.streams.num_open == 0


async def test_a_gateway_that_stops_within_the_grace_ends_it_and_lets_the_sample_run(scene: Scene) -> None:
    asked = scene.begin()
    await scene.take()
    scene.face.services.streams.grace_s = 60
    await cut(asked)
    with opened(0) as is_released:
        scene.face.services.polls.end()
        await is_released()
    assert await scene.inbox(0.05) == []


async def test_silence_does_not_end_a_stream_whose_tokens_are_told_at_another_gateway(
    impatient: Callable[[float, float], Any],
) -> None:
    scene = await impatient(60, 0.05)
    scene.face.services.streams.own = lambda rid: None
    asked = scene.begin()
    entry = await scene.take()
    await asyncio.sleep(0.2)
    await scene.settle(entry, answer(7, 8))
    assert tokens_of(await scene.frames(asked)) == [7, 8]


@contextlib.contextmanager
def opened(count: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """What it yields returns once as many streams are open."""
    reached = asyncio.Event()

    async def reach() -> None:
        async with asyncio.timeout(WAIT_S):
            await reached.wait()

    with telemetry.recording(lambda one: reached.set() if (one.name, one.value) == (telemetry.STREAMS_OPEN, count) else None):
        yield reach


async def cut(asked: "asyncio.Task[httpx.Response]") -> None:
    """The caller's connection breaks. What its answer still has to do goes on."""
    asked.cancel()
    await turns()


async def turns() -> None:
    """Of the loop, more than an answer needs to begin or to end."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_gateway_that_stops_ends_its_streams_with_an_error_frame_and_lets_the_sample_run(scene: Scene) -> None:
    asked = scene.begin()
    entry = await scene.take()
    scene.hear(entry.rid, 0, 7)
    scene.face.services.polls.end()
    frames = await scene.frames(asked)
    assert (frames[-1]["type"], frames[-1]["error"]["error_code"]) == ("error", 503)
    assert "same seq id" in frames[-1]["error"]["error"]
    assert await scene.inbox() == [], "the caller may come back for it"
    await scene.settle(entry, answer(7, 8))
    scene.face.services.polls.are_ending = False  # as at another gateway
    assert tokens_of(await scene.frames(scene.begin())) == [7, 8]


# --- the store


async def test_a_store_that_is_away_for_a_moment_costs_a_stream_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    look, outages = scene.face.lanes.look, [StateContention("away")] * 2

    async def flaky(tenant: str, rid: str) -> FutureRecord | None:
        if outages:
            raise outages.pop()
        return await look(tenant, rid)

    monkeypatch.setattr(scene.face.lanes, "look", flaky)
    asked = scene.begin()
    entry = await scene.take()
    await scene.settle(entry, answer(7, 8))
    assert tokens_of(await scene.frames(asked)) == [7, 8]
    assert outages == []


async def test_a_sample_that_the_store_has_lost_ends_its_stream(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(tenant: str, rid: str) -> None: ...

    monkeypatch.setattr(scene.face.lanes, "look", nothing)
    frames = await scene.frames(scene.begin())
    assert (frames[-1]["type"], frames[-1]["error"]["error_code"]) == ("error", 404)
    assert "send it again" in frames[-1]["error"]["error"]


async def test_an_abort_that_the_store_does_not_take_is_logged(
    impatient: Callable[[float, float], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await impatient(60, 0.05)

    async def away(tenant: str, rid: str) -> State | None:
        raise StateContention("away")

    monkeypatch.setattr(scene.face.lanes, "cancel", away)
    frames = await scene.frames(scene.begin())
    assert frames[-1]["error"]["error_code"] == 504
    assert "could not be aborted" in caplog.text


async def test_the_document_says_that_a_stream_answers_lines(scene: Scene) -> None:
    document = (await scene.face.http.get("/openapi.json")).json()
    content = document["paths"][PATH]["post"]["responses"]["200"]["content"]
    assert content == {"application/x-ndjson": {"schema": {"$ref": "#/components/schemas/StreamFrame"}}}
