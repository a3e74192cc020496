"""The samples of one request under /v1: queued as all samples are, followed to their end, dropped with their caller.

The protocol knows no session, no seq and no second request for the same answer: seq ids are drawn, and what is not finished when the answer
ends is aborted at once. Knows tokens; nothing of texts or of the form of an answer.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from tinsmith.gateway.aborting import abort, samplers_of
from tinsmith.gateway.bodies import off_loop
from tinsmith.gateway.deps import Services
from tinsmith.gateway.openai.served import ServedModel
from tinsmith.gateway.openai.sessions import sampler_of
from tinsmith.gateway.streams import Stream
from tinsmith.gateway.submission import derived_seed, submit_sample
from tinsmith.protocol import wire
from tinsmith.protocol.errors import ExecutionTimeout, GateUnavailable, StateContention
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.native_answers import SequenceResult
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, TopRow
from tinsmith.protocol.sessions import SamplerRecord
from tinsmith.protocol.wire_bounds import MAX_SAMPLE_SEQ
from tinsmith.state.events import Waiter
from tinsmith.state.lanes import SETTLED, inbox_topic

PAUSE_S = 0.5  # before a store that was away is asked again for the outcome
_BEATS = 4  # of a session within its time-out, while a sample runs or waits
_INLINE_BYTES = 64 * 1024  # of a result: decoding more than this leaves the event loop

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence of one prompt, in order. `tops`: as `SampledSequence.topk_logprobs`."""

    prompt: int
    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopRow | None] | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The whole result of one prompt, of which all pieces were told."""

    prompt: int
    output: SampleOutput


@dataclass(slots=True)
class _Followed:
    """One queued sample and what wakes who follows it."""

    rid: str
    sample: Sample
    stream: Stream
    waiter: Waiter
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Over:
    """A sample tells no more; its task knows why."""

    task: int


@dataclass(slots=True)
class Generation:
    """`release` must be called once, whatever happens."""

    services: Services
    sampler: SamplerRecord
    registered: contextlib.ExitStack
    followed: list[_Followed] = field(default_factory=list)

    @property
    def rid(self) -> str:
        """Of the first sample: the request goes by it."""
        return self.followed[0].rid

    async def outputs(self) -> list[SampleOutput]:
        """One a prompt. Raises what the samples failed with; ExecutionTimeout, GateUnavailable."""
        waits = [asyncio.create_task(self._output(one)) for one in self.followed]
        try:
            return list(await asyncio.gather(*waits))
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def told(self) -> AsyncGenerator[Piece | Ended]:
        """What the samples tell, as they tell it. Raises as `outputs`, at the first that fails."""
        queue: asyncio.Queue[Piece | Ended | _Over] = asyncio.Queue()  # holds no more than the streams do
        telling = [asyncio.create_task(self._tell(at, one, queue)) for at, one in enumerate(self.followed)]
        num_open = len(telling)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, _Over):
                    await telling[item.task]
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    async def release(self) -> None:
        """Unregister, and abort what has not ended."""
        with self.registered:
            for one in self.followed:
                if one.has_ended:
                    continue
                try:
                    await abort(self.services, self.sampler.tenant, self.sampler.base_model, one.rid)
                except StateContention as error:
                    _log.warning("a sample that nobody waits for could not be aborted, its bounds will end it (%s)", error)

    async def _tell(self, prompt: int, one: _Followed, queue: "asyncio.Queue[Piece | Ended | _Over]") -> None:
        try:
            async with contextlib.aclosing(self._items(prompt, one)) as items:
                async for item in items:
                    queue.put_nowait(item)
        finally:
            queue.put_nowait(_Over(prompt))

    async def _items(self, prompt: int, one: _Followed) -> AsyncGenerator[Piece | Ended]:
        ending = asyncio.create_task(self._output(one))
        ending.add_done_callback(lambda _: one.stream.wake())
        num_told = [0] * one.sample.num_samples
        try:
            while not ending.done():
                await one.stream.wait(self._bound_s)
                for frame in one.stream.take():
                    assert frame.sequence is not None  # noqa: S101 - a delta names its sequence
                    num_told[frame.sequence] += len(frame.tokens)
                    yield Piece(prompt, frame.sequence, frame.tokens, frame.logprobs, None)
            output = await ending
            for frame in one.stream.rest([_result(sequence) for sequence in output.sequences]):
                assert frame.sequence is not None and frame.offset is not None  # noqa: S101, PT018 - as above
                if frame.offset < num_told[frame.sequence]:
                    raise GateUnavailable("the sample ran again and drew other tokens than were told; send the request again")
                yield Piece(
                    prompt, frame.sequence, frame.tokens, frame.logprobs, _tops_from(output.sequences[frame.sequence], frame.offset)
                )
            yield Ended(prompt, output)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _output(self, one: _Followed) -> SampleOutput:
        """The result, once the sample has ended."""
        deadline = asyncio.get_running_loop().time() + self._bound_s
        beat_s = self.services.config.execution.session_timeout_s / _BEATS
        while True:
            try:
                output = await self._look(one)
                if output is not None:
                    return output
                left_s = deadline - asyncio.get_running_loop().time()
                if self.services.polls.are_ending:
                    raise GateUnavailable("this gateway stops; send the request again")
                if left_s <= 0:
                    raise ExecutionTimeout(f"the sample did not end within {self._bound_s:g} s; send a shorter request")
                if not await one.waiter.wait(min(left_s, beat_s)):
                    await self._beat()
            except StateContention:
                if one.has_ended:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _look(self, one: _Followed) -> SampleOutput | None:
        """None while it waits or runs. Raises what it failed with."""
        tenant = self.sampler.tenant
        record = await self.services.lanes.look(tenant, one.rid)
        if record is None:
            one.has_ended = True
            raise GateUnavailable("the sample was lost by a restart of the store; send the request again")
        if not record.state.is_terminal:
            return None
        if record.failure is not None:
            one.has_ended = True
            raise record.failure.error()
        stored = await self.services.lanes.result(tenant, one.rid)
        one.has_ended = True
        if stored is None:
            raise GateUnavailable("the result is no longer kept; send the request again")
        return await off_loop(lambda: wire.decode_sample_output(stored), is_large=len(stored) > _INLINE_BYTES)

    async def _beat(self) -> None:
        """The session lives as long as a request of it."""
        await self.services.catalog.beat(self.sampler.tenant, self.sampler.session_id, await self.services.store.now_ms())

    @property
    def _bound_s(self) -> float:
        return self.services.config.execution.timeout_s


async def begin(
    services: Services, tenant: str, served: ServedModel, samples: Sequence[Sample], *, seed: int | None, is_told: bool
) -> Generation:
    """Queue the samples, which are checked. `seed` None: each gets one of its own. `is_told`: tokens are wanted while they are drawn.
    Raises what a queue refuses for, with none of them left in it; GateUnavailable where no sampler is alive."""
    base = served.base
    if not await samplers_of(services, base.name):
        raise GateUnavailable(f"no sampler of {base.name} is alive; send the request again")
    generation = Generation(services, await sampler_of(services, tenant, served), contextlib.ExitStack())
    reply_to = inbox_topic(services.process_id) if is_told else ""
    async with contextlib.AsyncExitStack() as unless_queued:
        unless_queued.push_async_callback(generation.release)
        for sample in samples:
            await _queue(generation, sample, seed, room=base.max_context - len(sample.prompt), reply_to=reply_to)
        unless_queued.pop_all()
    return generation


async def _queue(generation: Generation, sample: Sample, seed: int | None, *, room: int, reply_to: str) -> None:
    """Registered first, so nothing falls between."""
    services, sampler, registered = generation.services, generation.sampler, generation.registered
    seq_id = secrets.randbelow(MAX_SAMPLE_SEQ)
    rid = await services.request_id(WorkKind.SAMPLING, sampler.tenant, sampler.sampler_id, seq_id)
    params = sample.params.model_copy(update={"seed": derived_seed(rid) if seed is None else seed})
    stream = registered.enter_context(services.streams.open(rid))
    waiter = registered.enter_context(services.events.register(SETTLED, rid))
    registered.enter_context(services.polls.hold(waiter))
    one = _Followed(rid, replace(sample, params=params), stream, waiter)
    generation.followed.append(one)
    await submit_sample(services, sampler, seq_id, rid, one.sample, room=room, reply_to=reply_to)


async def unless_left(caller: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises ClientDisconnect where the caller leaves before it is done: the work is then given up. The body of the
    request must have been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_leaves(caller))
    either: tuple[asyncio.Task[Any], ...] = (working, leaving)
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)


async def _leaves(caller: Request) -> None:
    while (await caller.receive())["type"] != "http.disconnect":
        pass


def _result(sequence: SampledSequence) -> SequenceResult:
    return SequenceResult(tokens=tuple(sequence.tokens), logprobs=tuple(sequence.logprobs), stop_reason=sequence.stop_reason)


def _tops_from(sequence: SampledSequence, offset: int) -> Sequence[TopRow | None] | None:
    return None if sequence.topk_logprobs is None else sequence.topk_logprobs[offset:]
