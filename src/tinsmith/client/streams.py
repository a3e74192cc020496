"""One sample, told while it is drawn, over as many connections as that takes.

A stream whose connection breaks, or whose gateway stops, is asked for again under the same seq id: the server follows the sample on, from
its first token, and what was told before is not told again. A sample that the server dropped meanwhile is drawn anew under a new seq id;
its seed is that of the first, so its tokens are the same. Knows nothing of prompts.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from tinsmith.client.errors import ClientError, ConnectionFailed, Report, TaskCancelled, TaskFailed, UnexpectedAnswer
from tinsmith.client.transport import Retries, Transport, unreadable
from tinsmith.protocol.errors import ReasonCode
from tinsmith.protocol.native import Sample
from tinsmith.protocol.native_answers import StreamFrame

_PASSING = frozenset({ReasonCode.BACKEND_GATE_UNAVAILABLE, ReasonCode.STATE_CONTENTION})  # another gateway or a later try may do better

NextSeq = Callable[[], int]


class AsyncStream:
    """An async iterator of frames. Closing it early (`aclose`, or leaving `async with`) closes the request, and the server then frees
    what it drew with. An `error` frame raises TaskFailed or TaskCancelled; what may pass (a broken connection, a gateway that stops, no
    living sampler) is asked for again first, at most five times in a row without a new token."""

    def __init__(self, transport: Transport, request: Sample, next_seq: NextSeq) -> None:
        self._frames = _frames(transport, request, next_seq)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamFrame:
        return await anext(self._frames)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._frames.aclose()


class _Told:
    """What the caller has seen: whether the stream began, and the tokens of each sequence."""

    def __init__(self) -> None:
        self._has_begun = False
        self._tokens: dict[int, list[int]] = {}

    def news(self, frame: StreamFrame) -> StreamFrame | None:
        """What the frame adds. Tokens that differ from those at their place are told: they take that place."""
        if frame.type == "start":
            is_first, self._has_begun = not self._has_begun, True
            return frame if is_first else None
        if frame.type != "delta" or frame.sequence is None or frame.offset is None:
            return frame
        tokens = self._tokens.setdefault(frame.sequence, [])
        num_known = _num_equal(tokens[frame.offset :], frame.tokens)
        if num_known == len(frame.tokens):
            return None
        tokens[frame.offset + num_known :] = frame.tokens[num_known:]
        if num_known == 0:
            return frame
        changes = {"offset": frame.offset + num_known, "tokens": frame.tokens[num_known:], "logprobs": frame.logprobs[num_known:]}
        return frame.model_copy(update=changes)


def _num_equal(known: list[int], tokens: tuple[int, ...]) -> int:
    """Of the first tokens of both."""
    shorter = min(len(known), len(tokens))
    return next((place for place in range(shorter) if known[place] != tokens[place]), shorter)


async def _frames(transport: Transport, request: Sample, next_seq: NextSeq) -> AsyncGenerator[StreamFrame, None]:
    told = _Told()
    retries = transport.retries()
    while True:
        try:
            async with aclosing(_tried(transport, request, retries)) as frames:
                async for frame in frames:
                    news = told.news(frame)
                    if news is None:
                        continue
                    if news.type == "delta":
                        retries.begin_anew()
                    yield news
                    if news.type == "done":
                        return
        except (ConnectionFailed, TaskFailed, TaskCancelled) as error:
            failure = error
        request = _next_request(request, failure, next_seq, is_retry=retries.num_in_row > 0)
        await retries.pause_after(failure)


async def _tried(transport: Transport, request: Sample, retries: Retries) -> AsyncGenerator[StreamFrame, None]:
    """The frames of one connection, up to `done`. Raises what an `error` frame says, and ConnectionFailed."""
    async with transport.stream(request, retries) as lines:
        async for line in lines:
            frame = _frame(line)
            if frame.type == "error":
                raise _failure(frame)
            yield frame
            if frame.type == "done":
                return
    raise ConnectionFailed("the stream ended before its last frame; ask again", may_have_arrived=True)


def _next_request(request: Sample, failure: ConnectionFailed | TaskFailed | TaskCancelled, next_seq: NextSeq, *, is_retry: bool) -> Sample:
    """What is asked for now. A sample that is found cancelled after a connection broke was dropped for that, and its seq id answers so for
    ever. Raises `failure` where there is nothing to hope for."""
    if isinstance(failure, ConnectionFailed) or failure.reason in _PASSING:
        return request
    if isinstance(failure, TaskCancelled) and is_retry:
        return request.model_copy(update={"seq_id": next_seq()})
    raise failure


def _frame(line: str) -> StreamFrame:
    try:
        return StreamFrame.model_validate_json(line)
    except ValidationError as error:
        unreadable(error, "a line of the stream")


def _failure(frame: StreamFrame) -> ClientError:
    """What the last line of a stream that failed says."""
    if frame.error is None:
        return UnexpectedAnswer("the stream failed and its last line does not say why; ask for the sample again")
    report = Report.of(frame.error)
    return TaskCancelled(report) if report.reason is ReasonCode.CANCELLED else TaskFailed(report)
