"""The token streams of a process: chunks that come once, twice, late or never."""

import asyncio

from tinsmith import telemetry
from tinsmith.gateway.streams import Stream, Streams
from tinsmith.protocol.native_answers import SequenceResult, StreamFrame
from tinsmith.protocol.sampling import StopReason
from tinsmith.state.inbox import DrainOrder, StreamChunk


def chunk(offset: int, *tokens: int, rid: str = "r", sequence: int = 0) -> StreamChunk:
    return StreamChunk(rid=rid, sequence=sequence, offset=offset, tokens=list(tokens), logprobs=[-float(token) for token in tokens])


def result(*tokens: int) -> SequenceResult:
    return SequenceResult(tokens=tokens, logprobs=tuple(-float(token) for token in tokens), stop_reason=StopReason.LENGTH)


def told(frames: list[StreamFrame]) -> list[tuple[int | None, int | None, tuple[int, ...]]]:
    assert all(frame.logprobs == tuple(-float(token) for token in frame.tokens) for frame in frames)
    assert all(frame.type == "delta" for frame in frames)
    return [(frame.sequence, frame.offset, frame.tokens) for frame in frames]


async def test_tokens_are_taken_once_and_in_order() -> None:
    stream = Stream("r")
    stream.hear(chunk(0, 7))
    stream.hear(chunk(1, 8, 9))
    stream.hear(chunk(0, 5, sequence=2))
    assert told(stream.take()) == [(0, 0, (7, 8, 9)), (2, 0, (5,))]
    stream.hear(chunk(3, 1))
    assert told(stream.take()) == [(0, 3, (1,))]
    assert stream.take() == []


async def test_chunks_that_come_again_are_dropped() -> None:
    stream = Stream("r")
    for _ in range(2):
        stream.hear(chunk(0, 7, 8))
    stream.hear(chunk(1, 8, 9))
    assert told(stream.take()) == [(0, 0, (7, 8, 9))]
    stream.hear(chunk(0, 7, 8, 9))
    assert stream.take() == []


async def test_what_comes_after_a_gap_waits_for_the_result() -> None:
    stream = Stream("r")
    stream.hear(chunk(0, 7))
    stream.hear(chunk(2, 9))
    assert told(stream.take()) == [(0, 0, (7,))]
    assert told(stream.rest([result(7, 8, 9)])) == [(0, 1, (8, 9))]


async def test_the_result_fills_what_was_not_sent() -> None:
    stream = Stream("r")
    stream.hear(chunk(0, 7, 8, sequence=1))
    stream.take()
    stream.hear(chunk(0, 5))
    assert told(stream.rest([result(5, 6), result(7, 8), result(3)])) == [(0, 0, (5, 6)), (2, 0, (3,))]


async def test_a_token_that_a_second_run_drew_otherwise_is_corrected_from_there_on() -> None:
    stream = Stream("r")
    stream.hear(chunk(0, 7, 8, 9))
    stream.take()
    assert told(stream.rest([result(7, 1, 2, 3)])) == [(0, 1, (1, 2, 3))]


async def test_every_chunk_wakes_and_silence_does_not() -> None:
    stream = Stream("r")
    assert not await stream.wait(0.01)
    stream.hear(chunk(4, 1))
    assert await stream.wait(0), "a chunk that cannot be told yet is a sign of life"
    assert not await stream.wait(0.01)


async def test_streams_hear_what_is_about_them() -> None:
    streams = Streams()
    with streams.open("r") as stream, streams.open("s") as other:
        streams.hear(chunk(0, 7))
        streams.hear(chunk(0, 7, rid="unknown"))
        streams.hear(DrainOrder())
        assert told(stream.take()) == [(0, 0, (7,))]
        assert other.take() == []
    streams.hear(chunk(1, 8))
    assert stream.take() == []
    assert streams.num_open == 0


async def test_a_second_stream_of_a_request_begins_with_what_the_first_has_heard() -> None:
    streams = Streams()
    with streams.open("r") as first:
        streams.hear(chunk(0, 7, 8))
        first.take()
        with streams.open("r") as second:
            assert streams.num_open == 2
            streams.hear(chunk(2, 9))
            assert told(second.take()) == [(0, 0, (7, 8, 9))]
            assert told(first.take()) == [(0, 2, (9,))]
        streams.hear(chunk(3, 1))
        assert told(first.take()) == [(0, 3, (1,))]


async def test_a_sample_is_ours_until_its_last_stream_is_closed() -> None:
    streams = Streams()
    assert not streams.is_ours("r")
    with streams.open("r"):
        streams.own("r")
        with streams.open("r"):
            assert not streams.is_last("r")
        assert streams.is_last("r")
        assert streams.is_ours("r")
    assert not streams.is_ours("r")


async def test_open_streams_are_measured() -> None:
    measured: list[telemetry.Measurement] = []
    streams = Streams()
    with telemetry.recording(measured.append), streams.open("r"), streams.open("r"):
        await asyncio.sleep(0)
    assert [one.value for one in measured if one.name == telemetry.STREAMS_OPEN] == [1, 2, 1, 0]
