"""A stream over its connections: frames, ends, and how it goes on after a cut."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.native_server import RESULT, refused
from tinsmith.client import ConnectionFailed, HttpError, TaskCancelled, TaskFailed, UnexpectedAnswer
from tinsmith.client.transport import MAX_RETRIES, MAX_STREAMS
from tinsmith.protocol.envelopes import ErrorPayload
from tinsmith.protocol.errors import Cancelled, GateUnavailable, InternalError, NotFound, StateContention, TinsmithError

STREAM = "/sample_stream"
START = {"type": "start", "request_id": "r-1"}
DELTA = {"type": "delta", "sequence": 0, "offset": 0, "tokens": [5], "logprobs": [-1.0]}
DONE = {"type": "done", "result": RESULT["/sample"]}
ERROR = {"type": "error", "error": {"error": "too slow", "reason": "execution_timeout", "category": "server", "error_code": 504}}
CUT = httpx.ReadError("cut")


class Body(httpx.AsyncByteStream):
    """The bytes of an answer, one part at a time; then `end`, where there is one."""

    def __init__(self, *frames: object, end: Exception | None = None, hangs: bool = False) -> None:
        self.lines = [frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n" for frame in frames]
        self.end = end
        self.hangs = hangs
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line
        if self.end is not None:
            raise self.end
        if self.hangs:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


def streamed(body: Body) -> httpx.Response:
    return httpx.Response(200, stream=body)


async def test_a_stream_tells_frame_by_frame_and_ends_with_the_result(sampling, server):
    body = Body(START, b"\n", DELTA, DONE, hangs=True)
    server.script(STREAM, streamed(body))
    frames = [frame async for frame in sampling.stream(text="a", max_tokens=1)]
    assert [frame.type for frame in frames] == ["start", "delta", "done"]
    assert frames[1].tokens == frames[2].result.sequences[0].tokens == (5,)
    assert body.is_closed
    assert server.calls[-1].request.sampling.max_tokens == 1


async def test_nothing_is_sent_before_the_first_frame_is_asked_for(sampling, server):
    stream = sampling.stream(text="a")
    await stream.aclose()
    assert STREAM not in server.paths()


async def test_closing_a_stream_early_closes_its_request(sampling, server):
    left, closed = Body(START, DELTA, hangs=True), Body(START, hangs=True)
    server.script(STREAM, streamed(left), streamed(closed))
    async with sampling.stream(text="a") as stream:
        assert (await anext(stream)).type == "start"
        assert not left.is_closed
    assert left.is_closed
    stream = sampling.stream(text="a")
    await anext(stream)
    await stream.aclose()
    assert closed.is_closed
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_cancelled_reader_closes_its_request(sampling, server):
    body = Body(START, hangs=True)
    server.script(STREAM, streamed(body))
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in sampling.stream(text="a"):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert body.is_closed


@pytest.mark.proves("R33")
async def test_an_error_frame_raises_the_failure(sampling, server):
    body = Body(START, ERROR)
    server.script(STREAM, streamed(body))
    with pytest.raises(TaskFailed, match="504 execution_timeout: too slow"):
        [frame async for frame in sampling.stream(text="a")]
    assert body.is_closed


@pytest.mark.parametrize("frame", [b"no json\n", {"type": "news"}, {"type": "error", "error": {}}])
async def test_a_line_that_is_none_of_the_protocol_is_named(sampling, server, frame):
    server.script(STREAM, streamed(Body(frame)))
    with pytest.raises(UnexpectedAnswer, match="of the stream"):
        [frame async for frame in sampling.stream(text="a")]


async def test_a_stream_is_tried_again_until_it_begins(sampling, server):
    server.script(STREAM, httpx.ConnectError("refused"), refused(StateContention("away")), streamed(Body(DONE)))
    assert [frame.type async for frame in sampling.stream(text="a")] == ["done"]
    assert len({call.body for call in server.of(STREAM)}) == 1


async def test_a_refused_stream_is_an_http_error(sampling, server):
    server.script(STREAM, refused(NotFound("no such sampler")))
    with pytest.raises(HttpError, match="404"):
        await anext(sampling.stream(text="a"))


async def test_streams_beyond_the_bound_wait_for_one_to_end(sampling, server):
    server.script(STREAM, *[streamed(Body(START, hangs=True)) for _ in range(MAX_STREAMS)], streamed(Body(DONE)))
    streams = [sampling.stream(text="a") for _ in range(MAX_STREAMS)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    waiting = asyncio.create_task(anext(sampling.stream(text="a")))
    for _ in range(20):  # turns of the loop, more than a request needs to arrive
        await asyncio.sleep(0)
    assert len(server.of(STREAM)) == MAX_STREAMS
    await streams[0].aclose()
    assert (await waiting).type == "done"
    for stream in streams[1:]:
        await stream.aclose()


def delta(offset: int, *tokens: int, sequence: int = 0) -> dict[str, object]:
    return {"type": "delta", "sequence": sequence, "offset": offset, "tokens": tokens, "logprobs": [-float(token) for token in tokens]}


def error_frame(error: TinsmithError) -> dict[str, object]:
    return {"type": "error", "error": ErrorPayload.of(error, error_code=error.status).model_dump(mode="json")}


async def told(stream) -> list[tuple[int, int, tuple[int, ...]]]:
    """The deltas; each with the log-probs of its tokens."""
    frames = [frame async for frame in stream]
    assert [frame.type for frame in frames].count("start") == 1
    assert frames[-1].type == "done"
    deltas = [frame for frame in frames if frame.type == "delta"]
    assert all(frame.logprobs == tuple(-float(token) for token in frame.tokens) for frame in deltas)
    return [(frame.sequence, frame.offset, frame.tokens) for frame in deltas]


def seq_ids(server) -> list[int]:
    return [call.seq_id for call in server.of(STREAM)]


@pytest.mark.proves("R32")
@pytest.mark.parametrize(
    "end", [None, CUT, error_frame(GateUnavailable("this gateway stops")), error_frame(StateContention("the store is away"))]
)
async def test_a_stream_that_is_cut_goes_on_under_its_seq_id_and_tells_each_token_once(sampling, server, end):
    first = [START, delta(0, 5, 6), delta(0, 9, sequence=1)]
    cut = Body(*first, end) if isinstance(end, dict) else Body(*first, end=end)
    again = Body(START, delta(0, 5, 6, 7), delta(0, 9, sequence=1), delta(3, 8), DONE)
    server.script(STREAM, streamed(cut), streamed(again))
    assert await told(sampling.stream(text="a")) == [(0, 0, (5, 6)), (1, 0, (9,)), (0, 2, (7,)), (0, 3, (8,))]
    assert len({call.body for call in server.of(STREAM)}) == 1
    assert len(server.pauses) == 1
    assert cut.is_closed
    assert again.is_closed


@pytest.mark.proves("R32")
async def test_without_a_sampler_a_stream_is_asked_for_again_until_one_lives(sampling, server):
    away = [streamed(Body(error_frame(GateUnavailable("no sampler is alive")))) for _ in range(3)]
    server.script(STREAM, *away, streamed(Body(START, DELTA, DONE)))
    assert [frame.type async for frame in sampling.stream(text="a")] == ["start", "delta", "done"]
    assert [round(pause) for pause in server.pauses] == sorted(round(pause) for pause in server.pauses)
    assert len(server.pauses) == 3


@pytest.mark.proves("R32")
async def test_a_stream_gives_up_after_five_retries_in_a_row_and_a_new_token_counts_from_zero(sampling, server):
    server.script(STREAM, *[streamed(Body(START, delta(0, *range(num)), end=CUT)) for num in range(1, 4)])
    server.script(STREAM, httpx.ConnectError("refused"), *[streamed(Body(START, delta(0, 0), end=CUT)) for _ in range(MAX_RETRIES - 2)])
    server.script(STREAM, streamed(Body(START, error_frame(GateUnavailable("stops")))))
    with pytest.raises(TaskFailed, match="503 backend_gate_unavailable: stops"):
        [frame async for frame in sampling.stream(text="a")]
    assert len(server.of(STREAM)) == 3 + MAX_RETRIES
    assert [round(pause) for pause in server.pauses[:3]] == [1, 1, 1], "each brought a token"


async def test_a_connection_that_breaks_again_and_again_is_no_result(sampling, server):
    server.script(STREAM, *[streamed(Body(START, DELTA)) for _ in range(MAX_RETRIES + 1)])
    with pytest.raises(ConnectionFailed, match="before its last frame"):
        [frame async for frame in sampling.stream(text="a")]
    assert len(server.of(STREAM)) == MAX_RETRIES + 1


@pytest.mark.proves("R32")
@pytest.mark.parametrize("lost", [httpx.ReadError("the head was lost"), streamed(Body(START, delta(0, 5), end=CUT))], ids=["head", "body"])
async def test_a_sample_that_was_dropped_for_a_cut_is_drawn_again_under_a_new_seq_id_with_the_same_seed(sampling, server, lost):
    dropped = streamed(Body(START, error_frame(Cancelled("the caller has gone"))))
    server.script(STREAM, lost, dropped, streamed(Body(START, delta(0, 5, 6), DONE)))
    tokens = [token for _, _, tokens in await told(sampling.stream(text="a")) for token in tokens]
    assert tokens == [5, 6]
    first, repeat, anew = seq_ids(server)
    assert first == repeat != anew
    await sampling.sample(text="a")
    assert server.of("/sample")[-1].seq_id not in (first, anew)
    (seed,) = {call.request.sampling.seed for call in server.of(STREAM)}
    assert seed is not None


async def test_two_streams_without_a_seed_draw_different_tokens_and_a_given_seed_is_kept(sampling, server):
    server.script(STREAM, *[streamed(Body(DONE)) for _ in range(3)])
    for seed in (None, None, 3):
        [frame async for frame in sampling.stream(text="a", seed=seed)]
    first, second, given = (call.request.sampling.seed for call in server.of(STREAM))
    assert first != second
    assert given == 3


@pytest.mark.proves("R33")
async def test_a_stream_that_somebody_cancelled_is_cancelled_and_a_failed_one_has_failed(sampling, server):
    server.script(STREAM, streamed(Body(START, error_frame(Cancelled("by its caller")))))
    server.script(STREAM, streamed(Body(START, error_frame(InternalError("a kernel failed")))))
    for kind in (TaskCancelled, TaskFailed):
        with pytest.raises(kind):
            [frame async for frame in sampling.stream(text="a")]
    assert len(server.of(STREAM)) == 2


async def test_a_token_that_another_run_drew_otherwise_takes_the_place_of_what_was_told(sampling, server):
    server.script(STREAM, streamed(Body(START, delta(0, 5, 6, 7), end=CUT)), streamed(Body(START, delta(0, 5, 1, 2, 3), DONE)))
    assert await told(sampling.stream(text="a")) == [(0, 0, (5, 6, 7)), (0, 1, (1, 2, 3))]


async def test_a_stream_that_was_closed_is_not_asked_for_again(sampling, server):
    server.script(STREAM, streamed(Body(START, DELTA, end=CUT)))
    async with sampling.stream(text="a") as stream:
        assert (await anext(stream)).type == "start"
    assert len(server.of(STREAM)) == 1
