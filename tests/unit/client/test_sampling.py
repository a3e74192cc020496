"""Sampling: whole results and streams."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from tests.fakes.native_server import RESULT, refused
from tinsmith.client import ChatMessage, ClientValidationError, ConnectionFailed, HttpError, TaskFailed, UnexpectedAnswer
from tinsmith.client.transport import MAX_STREAMS
from tinsmith.protocol import native
from tinsmith.protocol.errors import NotFound, StateContention

STREAM = "/sample_stream"
START = {"type": "start", "request_id": "r-1"}
DELTA = {"type": "delta", "sequence": 0, "offset": 0, "tokens": [5], "logprobs": [-1.0]}
DONE = {"type": "done", "result": RESULT["/sample"]}
ERROR = {"type": "error", "error": {"error": "too slow", "reason": "execution_timeout", "category": "server", "error_code": 504}}


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


async def test_a_sample_is_asked_for_in_the_protocols_words(sampling, server):
    future = await sampling.sample(
        prompt_ids=np.array([1, 2]),
        num_samples=2,
        max_tokens=8,
        temperature=0.0,
        top_k=5,
        top_p=0.9,
        seed=3,
        stop_token_ids=[7],
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    assert (await future).sequences[0].tokens == (5,)
    sent = server.calls[-1].request
    assert (sent.sampler_id, sent.num_samples, sent.prompt_logprobs, sent.topk_prompt_logprobs) == ("sampler-1", 2, True, 2)
    assert list(sent.prompt_ids.whole().shape) == [2]
    assert sent.sampling == native.SamplingOptions(max_tokens=8, temperature=0.0, top_k=5, top_p=0.9, seed=3, stop_token_ids=(7,))


async def test_a_prompt_may_be_a_chat_or_a_text(sampling, server):
    await sampling.sample(messages=[{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")], stop=["."])
    await sampling.sample(text="once")
    chat, text = (call.request for call in server.calls[-2:])
    assert [message.content for message in chat.messages] == ["hi", "ho"]
    assert (chat.sampling.stop, text.text, text.sampling.stop) == ((".",), "once", None)


async def test_no_two_samples_share_a_seq_id(sampling, server):
    await asyncio.gather(*(sampling.sample(text="a") for _ in range(5)))
    assert sorted(call.seq_id for call in server.of("/sample")) == [0, 1, 2, 3, 4]


@pytest.mark.proves("R37")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt_ids, messages, text"),
        ({"text": "a", "prompt_ids": [1]}, "prompt_ids, messages, text"),
        ({"text": "a", "temperature": -1.0}, "temperature"),
        ({"text": "a", "top_p": 0.0}, "top_p"),
        ({"text": "a", "stop": ["."], "stop_token_ids": [1]}, "stop, stop_token_ids"),
        ({"text": "a", "num_samples": 0}, "num_samples"),
        ({"prompt_ids": ["a"]}, "prompt_ids"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
async def test_a_wrong_argument_is_named_before_any_request(sampling, server, arguments, field):
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError) as raised:
        await sampling.sample(**arguments)
    assert raised.value.field == field
    with pytest.raises(ClientValidationError) as raised:
        sampling.stream(**arguments)
    assert raised.value.field == field
    with pytest.raises(TypeError, match="tempurature"):
        sampling.stream(text="a", tempurature=1.0)
    assert len(server.calls) == num_calls


async def test_a_sampler_is_of_a_base_model_or_of_a_checkpoint(client, server):
    first = await client.sampling(base_model="org/tiny")
    await client.sampling(checkpoint="tinker://m/sampler_weights/a")
    base, checkpoint = (call.request for call in server.of("/create_sampler"))
    assert (base.base_model, base.sampler_seq, checkpoint.checkpoint, checkpoint.sampler_seq) == (
        "org/tiny",
        0,
        "tinker://m/sampler_weights/a",
        1,
    )
    assert repr(first) == "AsyncSamplingClient('sampler-1')"
    with pytest.raises(ClientValidationError):
        await client.sampling()


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


@pytest.mark.parametrize("end", [None, httpx.ReadError("cut")])
async def test_a_stream_that_breaks_off_is_no_result(sampling, server, end):
    server.script(STREAM, streamed(Body(START, DELTA, end=end)))
    with pytest.raises(ConnectionFailed):
        [frame async for frame in sampling.stream(text="a")]


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
