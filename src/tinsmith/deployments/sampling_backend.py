"""Runs a sampling engine for the pool executor: adapters fetched, engine calls made off the loop, answers encoded.

Every touch of the engine is one call through `call_backend`, and at most one is under way. The engine's state is disposable: sampling
has no effect but its answer, so after a call that failed or hung its requests are cancelled and either failed or run again.

    call that refuses a request      that request fails with the typed error
    step that raises                 each request is run again alone; the one that makes it raise fails
    call that outlives its bound     every request in the engine fails; nothing is taken until the call has really ended
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ParamSpec, TypeVar

from tinsmith import telemetry
from tinsmith.engines.base import Drawn, Files, SamplingEngine, Ticket
from tinsmith.protocol.errors import ExecutionTimeout, GateUnavailable, StateContention, TinsmithError
from tinsmith.protocol.futures import Outcome, SampledTokens
from tinsmith.protocol.sampling import SampleOutput
from tinsmith.queue.gate import CallBackend
from tinsmith.queue.pool import Finished, Work
from tinsmith.state.inbox import StreamChunk

QUEUE_AHEAD = 4  # sequences that wait inside the engine, so that a row which gets free is filled in the next step
# After so many steps without one, a request is let in all the same: requests of many samples may fill every row for long.
PATIENCE_STEPS = 32

P = ParamSpec("P")
T = TypeVar("T")


class _SlotsBusy(Exception):
    """Every adapter slot of the engine serves a request that runs."""


@dataclass(frozen=True, slots=True)
class _NeedsAdapter:
    """The engine lacks the request's adapter."""

    artifact: str


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The result of a request that completed, and the tokens that it drew over all its sequences."""

    result: bytes
    num_drawn: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class _Stepped:
    """What a step came to."""

    answers: list[tuple[Ticket, _Encoded | TinsmithError]]
    drawn: list[Drawn]


class SamplingBackend:
    """A `PoolBackend`."""

    def __init__(
        self,
        engine: SamplingEngine,
        call_backend: CallBackend,
        read_artifact: Callable[[str], Awaitable[Files]],
        encode: Callable[[SampleOutput], bytes],
        *,
        base: str,
    ) -> None:
        """`read_artifact` fetches the files of a sampler checkpoint (NotFound where it is gone). `base`: the base model, for metrics."""
        self._engine = engine
        self._call_backend = call_backend
        self._read_artifact = read_artifact
        self._encode = encode
        self._base = base
        self._max_rows = engine.max_rows
        self._wake: Callable[[], None] = lambda: None
        self._one_call = asyncio.Lock()
        self._in_call = threading.Lock()  # held by the thread, so it tells when a call has really ended
        self._is_hung = False
        self._numbers = count()
        self._arriving: deque[Work] = deque()  # let in, and not yet looked at
        self._entering: dict[Ticket, Work] = {}  # their adapters are being fetched
        self._live: dict[Ticket, Work] = {}  # in the engine
        self._parked: deque[Work] = deque()  # admitted, but the engine cannot take them yet
        self._suspects: deque[Work] = deque()  # were in a step that raised; each is run again alone
        self._steps_since_entry = 0
        self._chunks: list[StreamChunk] = []
        self._stale: set[Ticket] = set()  # to be cancelled in the engine before its next call

    @property
    def is_idle(self) -> bool:
        return self._is_hung or not (self._live or self._parked or self._suspects)

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def room(self) -> int:
        """In requests, estimated from the free sequences and the largest request at hand. Never 0 for long while the engine works, so that
        the turns of tenants in the pool and of requests in the engine decide who waits, and not who came first."""
        if self._is_hung or self._suspects:
            return 0
        sizes = [min(work.sample.num_samples, self._max_rows) for work in self._held()]
        free = self._max_rows + QUEUE_AHEAD - sum(sizes)
        if free > 0:
            return max(1, free // max(sizes, default=1))
        return int(self._steps_since_entry >= PATIENCE_STEPS and len(sizes) < 2 * self._max_rows)

    def _held(self) -> list[Work]:
        return [*self._live.values(), *self._entering.values(), *self._arriving, *self._parked]

    async def admit(self, works: Sequence[Work]) -> list[Finished]:
        self._steps_since_entry = 0
        self._arriving.extend(works)
        finished: list[Finished] = []
        while self._arriving:
            finished += await self._enter(self._arriving.popleft())
        return finished

    async def step(self) -> list[Finished]:
        self._steps_since_entry += 1
        finished = await self._reenter()
        if not self._live:
            return finished
        has_watched = any(work.is_watched for work in self._live.values())
        stepped = await self._try(self._step, has_watched)
        if isinstance(stepped, TinsmithError):  # the bound, or a gate: nothing that one of the requests could be blamed for
            return finished + self._fail_live(stepped)
        if isinstance(stepped, Exception):
            return finished + self._suspect_live(stepped)
        ended = [(work, answer) for ticket, answer in stepped.answers if (work := self._live.pop(ticket, None)) is not None]
        self._keep_chunks(stepped.drawn)
        outcomes = [(work.rid, _ended(work, answer)) for work, answer in ended]
        self._count([outcome.sampled for _, outcome in outcomes if outcome.sampled is not None])
        return finished + outcomes

    def take_chunks(self) -> list[StreamChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def cancel(self, rid: str) -> None:
        for ticket in [ticket for ticket, work in self._live.items() if work.rid == rid]:
            del self._live[ticket]
            self._stale.add(ticket)
        for ticket in [ticket for ticket, work in self._entering.items() if work.rid == rid]:
            del self._entering[ticket]
        for queue in (self._arriving, self._parked, self._suspects):
            for work in [work for work in queue if work.rid == rid]:
                queue.remove(work)

    async def _reenter(self) -> list[Finished]:
        """Bring in what waits: suspects one at a time and alone, else everything that is parked."""
        if self._suspects:
            return [] if self._live else await self._enter(self._suspects.popleft(), alone=True)
        finished: list[Finished] = []
        for _ in range(len(self._parked)):
            finished += await self._enter(self._parked.popleft())
        return finished

    async def _enter(self, work: Work, *, alone: bool = False) -> list[Finished]:
        """Put a request into the engine, with its adapter if that is not there; park it if the engine cannot take it now."""
        if self._suspects and not alone:
            self._parked.append(work)
            return []
        ticket = f"{work.rid}#{next(self._numbers)}"  # a request that runs again must not meet its own remains
        self._entering[ticket] = work
        error = await self._enter_engine(ticket, work)
        if self._entering.pop(ticket, None) is None:  # cancelled while the call ran
            self._stale.add(ticket)
            return []
        if error is None:
            self._live[ticket] = work
            return []
        self._stale.add(ticket)
        if isinstance(error, ExecutionTimeout):
            return [(work.rid, _failed(error)), *self._fail_live(error)]
        if self._is_hung or isinstance(error, _SlotsBusy):
            self._parked.append(work)
            return []
        return [(work.rid, _failed(error))]

    async def _enter_engine(self, ticket: Ticket, work: Work) -> Exception | None:
        """Why the engine does not have the request now; None if it has it."""
        missing = await self._try(self._add_if_ready, ticket, work)
        if not isinstance(missing, _NeedsAdapter):
            return missing
        try:
            files = await self._read_artifact(missing.artifact)
        except (TinsmithError, OSError) as error:
            return error
        return await self._load_and_add(ticket, work, missing.artifact, files)

    async def _load_and_add(self, ticket: Ticket, work: Work, artifact: str, files: Files) -> Exception | None:
        """In one turn, so that no other request's adapter takes the slot in between."""
        async with self._one_call:
            error = await self._call(self._engine.load_adapter, artifact, files)
            if error is not None:
                return _SlotsBusy(str(error)) if isinstance(error, StateContention) else error
            return await self._call(self._add, ticket, work)

    async def _try(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | Exception:
        async with self._one_call:
            return await self._call(call, *args, **kwargs)

    async def _call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | Exception:
        """One engine call. What it raises is an answer here: the callers decide whom it concerns."""
        if self._is_hung:
            return GateUnavailable("the engine is still in a call that outlived its bound; send the request again")
        exclusively = partial(self._exclusively, asyncio.get_running_loop())

        def engine_call() -> T:
            return exclusively(partial(call, *args, **kwargs))

        engine_call.__name__ = getattr(call, "__name__", "").lstrip("_")  # bounds and metrics go by the name of a call
        try:
            return await self._call_backend(engine_call)
        except ExecutionTimeout as error:
            self._is_hung = self._in_call.locked()
            return error
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; it concerns the requests and not the loop
            return error

    def _exclusively(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
        """In the engine's thread: note when the call really ends, and clean up first."""
        try:
            with self._in_call:
                while self._stale:
                    self._engine.cancel(self._stale.pop())
                return call()
        finally:  # after the lock is free: whoever finds it taken will still hear of the end
            loop.call_soon_threadsafe(self._call_ended)

    def _call_ended(self) -> None:
        if self._is_hung:
            self._is_hung = False
            self._wake()

    def _add_if_ready(self, ticket: Ticket, work: Work) -> _NeedsAdapter | None:
        artifact = work.sample.adapter
        if artifact is not None and not self._engine.has_adapter(artifact):
            return _NeedsAdapter(artifact)
        self._add(ticket, work)
        return None

    def _add(self, ticket: Ticket, work: Work) -> None:
        self._engine.add(ticket, work.sample, work.tenant)
        if work.is_watched:
            self._engine.watch(ticket)

    def _step(self, has_watched: bool) -> _Stepped:
        answers = self._engine.step()
        drawn = self._engine.drawn() if has_watched else []
        return _Stepped([(ticket, self._encoded(answer)) for ticket, answer in answers], drawn)

    def _encoded(self, answer: SampleOutput | TinsmithError) -> _Encoded | TinsmithError:
        if isinstance(answer, TinsmithError):
            return answer
        num_drawn = sum(len(sequence.tokens) for sequence in answer.sequences)
        return _Encoded(self._encode(answer), num_drawn, answer.prompt_cache_hit_tokens)

    def _count(self, completed: Sequence[SampledTokens]) -> None:
        if completed:
            num_drawn, num_prompt = sum(sampled.num_drawn for sampled in completed), sum(sampled.num_prompt for sampled in completed)
            telemetry.count(telemetry.TOKENS, num_drawn, base_model=self._base, kind=telemetry.SAMPLED)
            telemetry.count(telemetry.TOKENS, num_prompt, base_model=self._base, kind=telemetry.PROMPT)

    def _keep_chunks(self, drawn: Sequence[Drawn]) -> None:
        for news in drawn:
            work = self._live.get(news.ticket)
            if work is not None:
                self._chunks.append(
                    StreamChunk(rid=work.rid, sequence=news.sequence, offset=news.offset, tokens=news.tokens, logprobs=news.logprobs)
                )

    def _fail_live(self, error: Exception) -> list[Finished]:
        failed = [(work.rid, _failed(error)) for work in self._live.values()]
        self._stale.update(self._live)
        self._live.clear()
        return failed

    def _suspect_live(self, error: Exception) -> list[Finished]:
        if len(self._live) == 1:
            return self._fail_live(error)
        self._suspects.extend(self._live.values())
        self._stale.update(self._live)
        self._live.clear()
        return []


def _ended(work: Work, answer: _Encoded | TinsmithError) -> Outcome:
    if isinstance(answer, TinsmithError):
        return _failed(answer)
    sampled = SampledTokens(num_prompt=len(work.sample.prompt), num_cached=answer.num_cached, num_drawn=answer.num_drawn)
    return Outcome(result=answer.result, sampled=sampled)


def _failed(error: Exception) -> Outcome:
    return Outcome.failed(error, is_tainted=False)
