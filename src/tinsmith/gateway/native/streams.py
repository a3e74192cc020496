"""sample_stream: a sample whose tokens are told while they are drawn, as lines of JSON.

The stream and the waiter for its end are registered before the sample is submitted, so nothing falls between. Tokens come through this
process's inbox and may be late, doubled or missing; the stored result is the truth and fills what is missing.

The process that queued the sample owns it: when the last of its answers here ends before the sample does, the sample is aborted. At a bound
that is at once. With a broken connection it is after `Streams.grace_s`, so that the caller may ask again under the same seq id and follow
the sample on. A gateway hears nothing of streams at another one: who comes back there loses the sample, and asks under a new seq id.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway import bodies
from tinsmith.gateway.aborting import abort, samplers_of
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.errors import NATIVE_STATUS
from tinsmith.gateway.native.admission import sampling_engine
from tinsmith.gateway.native.documents import streaming
from tinsmith.gateway.native.envelopes import envelope_of
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.native.sampling import check, submit
from tinsmith.gateway.ndjson import LinesAnswer
from tinsmith.gateway.streams import Stream
from tinsmith.protocol.envelopes import ErrorPayload, TaskEnvelope
from tinsmith.protocol.errors import EndpointUnavailable, ExecutionTimeout, GateUnavailable, NotFound, StateContention, TinsmithError
from tinsmith.protocol.native import SampleStream
from tinsmith.protocol.native_answers import SampleResult, StreamFrame
from tinsmith.state.events import Waiter
from tinsmith.state.lanes import SETTLED, inbox_topic

_PAUSE_S = 0.5  # before a store that was away is asked again for the outcome
_READ_S = 10.0  # a caller has this time to read the last lines after the bound of its stream
_INLINE_TOKENS = 4096  # of a result: writing more than this leaves the event loop

_log = logging.getLogger(__name__)

router = APIRouter()


@router.post(SampleStream.path, **streaming(SampleStream))
async def sample_stream(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """A refused request is answered as everywhere. From the first line on, every end is a line of its own: `done` or `error`."""
    body = await read(request, SampleStream)
    checked = await check(request, services, tenant, body)
    rid, base = checked.rid, checked.sampler.base_model
    _check_engine(services, base)
    if not await samplers_of(services, base) and await services.lanes.look(tenant, rid) is None:
        return _refusal(rid, GateUnavailable(f"no sampler of {base} is alive; send the request again"))
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(services.streams.open(rid))
        stack.enter_context(services.polls.hold(stream))
        waiter = stack.enter_context(services.events.register(SETTLED, rid))
        if (await submit(services, checked, reply_to=inbox_topic(services.process_id))).is_fresh:
            services.streams.own(rid)
        watch = _Watch(services, tenant, base, stream, waiter, registered=stack.pop_all())
    return LinesAnswer(watch.lines(), watch.release, bound_s=services.config.execution.timeout_s + _READ_S)


@dataclass(slots=True)
class _Watch:
    """One answer that follows one sample. `registered`: what ends with it. `has_ended`: the sample has, or nothing of it is left.
    `is_told`: the caller was told why it sees no end of the sample."""

    services: Services
    tenant: str
    base: str
    stream: Stream
    waiter: Waiter
    registered: contextlib.ExitStack
    has_ended: bool = False
    is_told: bool = False

    async def lines(self) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(self._frames()) as frames:
            async for frame in frames:
                yield await _line(frame)

    async def release(self) -> None:
        """Unregister; abort the sample if it still runs, is ours, and nobody comes back for it. A gateway that stops leaves it running: its
        caller may come back for the result, with the same seq id or the request id."""
        with self.registered:
            is_unwanted = await self._is_unwanted()
        if not is_unwanted:
            return
        try:
            await abort(self.services, self.tenant, self.base, self.stream.rid)
        except StateContention as error:
            _log.warning("a sample that nobody waits for could not be aborted, its bounds will end it (%s)", error)

    async def _is_unwanted(self) -> bool:
        """Known after the grace, where a connection broke. The stream stays open meanwhile: who comes back is told what it has heard."""
        streams, polls, rid = self.services.streams, self.services.polls, self.stream.rid
        if self.has_ended or not streams.is_ours(rid):
            return False
        now = asyncio.get_running_loop().time
        until = now() if self.is_told else now() + streams.grace_s
        while now() < until and streams.is_last(rid) and not polls.are_ending:
            await self.stream.wait(until - now())
        return streams.is_last(rid) and not polls.are_ending

    async def _frames(self) -> AsyncGenerator[StreamFrame]:
        yield StreamFrame(type="start", request_id=self.stream.rid)
        ending = asyncio.create_task(self._outcome())
        ending.add_done_callback(lambda _: self.stream.wake())
        try:
            async with contextlib.aclosing(self._deltas(ending)) as deltas:
                async for delta in deltas:
                    yield delta
            for frame in await self._last(await ending):
                yield frame
        except TinsmithError as error:
            self.is_told = True
            yield _error_frame(self.stream.rid, error)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _deltas(self, ending: "asyncio.Task[TaskEnvelope]") -> AsyncGenerator[StreamFrame]:
        """What is heard until the sample ends. Raises ExecutionTimeout at either bound, GateUnavailable where this gateway stops.

        The tokens of a sample that was submitted elsewhere are told there, so silence says nothing here."""
        total_s = self.services.config.execution.timeout_s
        item_s = self.services.streams.item_s if self.services.streams.is_ours(self.stream.rid) else total_s
        deadline = asyncio.get_running_loop().time() + total_s
        while not ending.done():
            if self.services.polls.are_ending:
                raise GateUnavailable("this gateway stops; send the request again, with the same seq id, for the same sample")
            left_s = deadline - asyncio.get_running_loop().time()
            if not await self.stream.wait(max(0.0, min(item_s, left_s))):
                bound = f"no token within {item_s:g} s" if item_s < left_s else f"the sample did not end within {total_s:g} s"
                raise ExecutionTimeout(f"{bound}; send a shorter request")
            for delta in self.stream.take():
                yield delta

    async def _outcome(self) -> TaskEnvelope:
        """The envelope of the sample, once it has ended. Raises NotFound where nothing of it is left."""
        while True:
            try:
                envelope = await self._look()
            except StateContention:
                await asyncio.sleep(_PAUSE_S)
                continue
            if envelope is not None:
                return envelope
            await self.waiter.wait(self.services.config.execution.timeout_s)

    async def _look(self) -> TaskEnvelope | None:
        record = await self.services.lanes.look(self.tenant, self.stream.rid)
        self.has_ended = record is None or record.state.is_terminal
        if record is None:
            raise NotFound("the sample was lost by a restart of the store; send it again")
        return await envelope_of(self.services, record) if self.has_ended else None

    async def _last(self, envelope: TaskEnvelope) -> list[StreamFrame]:
        if envelope.error is not None:
            return [StreamFrame(type="error", request_id=self.stream.rid, error=envelope.error)]
        result = SampleResult.model_validate(envelope.result)
        return [*self.stream.rest(result.sequences), StreamFrame(type="done", request_id=self.stream.rid, result=result)]


def _check_engine(services: Services, base: str) -> None:
    engine, capability = sampling_engine(services, base)
    if not capability.has_streams:
        raise EndpointUnavailable(f"the sampling engine {engine!r} of {base} does not stream; use /sample")


def _refusal(rid: str, error: TinsmithError) -> Response:
    async def only() -> AsyncGenerator[bytes]:
        yield await _line(_error_frame(rid, error))

    async def nothing() -> None: ...

    return LinesAnswer(only(), nothing, bound_s=_READ_S)


def _error_frame(rid: str, error: TinsmithError) -> StreamFrame:
    payload = ErrorPayload.of(error, error_code=NATIVE_STATUS[error.reason], request_id=rid)
    return StreamFrame(type="error", request_id=rid, error=payload)


async def _line(frame: StreamFrame) -> bytes:
    """Only what the frame says. Log-probs that are no finite numbers are written as in every native answer."""
    num_tokens = 0 if frame.result is None else sum(len(sequence.tokens) for sequence in frame.result.sequences)

    def write() -> bytes:
        return json.dumps(frame.model_dump(exclude_unset=True), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    return await bodies.off_loop(write, is_large=num_tokens > _INLINE_TOKENS)
