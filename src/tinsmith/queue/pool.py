"""The executor of pool lanes: takes samples of one base model while its backend has room, and settles what finishes.

Sees the sampler as a `PoolBackend` and the store as `Lanes`; knows nothing of tokens, engines or HTTP. The lease of the replica is renewed
elsewhere. A sample has no effect but its answer, so what is lost (a token that is outdated, a replica that dies) is run again by whoever
takes it next, with the same result. A sample whose submitter watches it has its tokens posted there as they come.

The only clocks: the bound of a request, and the pause after the store was away.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tinsmith import telemetry
from tinsmith.protocol.errors import Cancelled, ExecutionTimeout, InternalError, StateContention
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.sampling import Sample
from tinsmith.queue.accounts import outcome_attributes
from tinsmith.queue.courier import Courier
from tinsmith.queue.gate import TRANSFER_S
from tinsmith.queue.ledger import entered_sample
from tinsmith.state.inbox import StreamChunk
from tinsmith.state.lanes import Lanes, LeaseExpired, PoolEntry

_log = logging.getLogger(__name__)

TAKE_TOKENS = 65_536  # of one take: bounds how much one tenant gets ahead of the others inside a replica
TAKE_ENTRIES = 4  # of one take: how many sequences an entry means is known only when it has been read
_PAUSE_S = 0.2  # after the first failure of the store, doubled by each further one
_LONGEST_PAUSE_S = 5.0
_ABORTS_KEPT = 1024  # of ids that are not here: an order to abort may overtake the answer of the take

Finished = tuple[str, Outcome]  # request id and what became of it


@dataclass(frozen=True, slots=True)
class Work:
    """One sample of a tenant to run. is_watched: somebody wants its tokens as they come."""

    rid: str
    sample: Sample
    is_watched: bool = False
    tenant: str = ""


class PoolBackend(Protocol):
    """What runs samples. Methods are called from one event loop; `admit` may overlap with `step`."""

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing now."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called, in the loop, when the backend gets room other than through an answer of `step`."""
        ...

    def room(self) -> int:
        """How many more requests it can take; 0 while it cannot work."""
        ...

    async def admit(self, works: Sequence[Work]) -> list[Finished]:
        """Take requests in; answers those that are over at once (refused)."""
        ...

    async def step(self) -> list[Finished]:
        """Advance everything that runs; answers the requests that ended."""
        ...

    def take_chunks(self) -> list[StreamChunk]:
        """Tokens of watched requests that run, since the last call."""
        ...

    def cancel(self, rid: str) -> None:
        """Forget a request; unknown ids are ignored."""
        ...


@dataclass(slots=True)
class _Pause:
    """When the store may be asked again."""

    until: float = 0.0
    length_s: float = _PAUSE_S

    def lengthen(self, now: float) -> None:
        self.until = now + self.length_s
        self.length_s = min(2 * self.length_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        self.until, self.length_s = 0.0, _PAUSE_S


@dataclass(slots=True)
class _Held:
    """A request that this replica runs. `since` and `deadline` are on the executor's clock. is_suspect: it had cost a worker when it was
    let in."""

    entry: PoolEntry
    since: float
    deadline: float
    is_suspect: bool


class PoolExecutor:
    """Call `wake` for every event of the base model's work topic; `run` returns after `stop`, when all that was taken is settled."""

    def __init__(
        self,
        lanes: Lanes,
        base: str,
        replica: str,
        backend: PoolBackend,
        decode: Callable[[bytes], Sample],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: bound of one request from its admission to its end; the admission itself, which may load an adapter, has its own
        declared bound. `decode` turns a stored body into the command."""
        self._lanes = lanes
        self._base = base
        self._replica = replica
        self._backend = backend
        self._decode = decode
        self._timeout_s = timeout_s
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._taken: list[PoolEntry] = []  # under our lease, but not yet with the backend
        self._unsettled: dict[str, tuple[PoolEntry, Outcome]] = {}
        self._aborted: dict[str, None] = {}  # ids that are not here, newest last
        self._courier = Courier(lanes)
        self._intake: asyncio.Task[None] | None = None
        self._take_pause = _Pause()
        self._settle_pause = _Pause()
        self._may_have_work = True  # what came before the first event
        self._stopping = False
        self._woken = asyncio.Event()
        backend.attach(self.wake)

    @property
    def num_held(self) -> int:
        """Requests under this replica's lease whose outcome is not yet in the store."""
        return len(self._held) + len(self._taken) + len(self._unsettled)

    def wake(self) -> None:
        """There may be work, or room for it."""
        self._may_have_work = True
        self._woken.set()

    def abort(self, rid: str) -> None:
        """Nobody waits for this sample any more: free its sequences and settle it as cancelled. An id that is not here is ignored, or
        aborted once it is taken."""
        if rid in self._held:
            self._backend.cancel(rid)
            self._end(rid, _aborted())
            self.wake()
        elif rid not in self._unsettled:
            self._aborted[rid] = None
            if len(self._aborted) > _ABORTS_KEPT:
                del self._aborted[next(iter(self._aborted))]

    def stop(self) -> None:
        """Take nothing more."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Take, run, settle, until stopped. An exception is a defect of this server and ends the replica."""
        try:
            while not self._is_over():
                self._start_intake()
                await self._advance()
                self._expire()
                await self._settle()
        finally:
            await self._end_intake()
            await self._courier.close()

    def _is_over(self) -> bool:
        return self._stopping and self._intake is None and self.num_held == 0

    def _start_intake(self) -> None:
        """Begin a take beside the running steps: a slow store or checkpoint does not hold up the sequences that decode."""
        if self._intake is not None and self._intake.done():
            intake, self._intake = self._intake, None
            intake.result()
        wanted = bool(self._taken) or (self._may_have_work and not self._stopping and self._backend.room() > 0)
        if self._intake is None and wanted and not self._must_hold_off() and self._clock() >= self._take_pause.until:
            self._intake = asyncio.create_task(self._fill())
            self._intake.add_done_callback(lambda _: self._woken.set())

    async def _fill(self) -> None:
        """Take until nothing comes or nothing more fits."""
        while await self._take() and not self._stopping and not self._must_hold_off() and self._backend.room() > 0:
            pass

    def _must_hold_off(self) -> bool:
        """A request that has cost a worker runs alone: if it does so again, no other is lost with it."""
        if self._taken:
            return bool(self._held) and self._taken[0].attempts > 0
        return any(held.is_suspect for held in self._held.values())

    async def _take(self) -> bool:
        """Whether anything was taken."""
        try:
            if not self._taken:
                self._may_have_work = False  # before the look: an event from here on counts
                max_entries = min(self._backend.room(), TAKE_ENTRIES)
                entries = await self._lanes.pool_take(self._base, self._replica, max_entries, TAKE_TOKENS)
                self._may_have_work = self._may_have_work or bool(entries)
                self._taken = [entry for entry in entries if not self._is_known(entry)]
            if not self._taken or self._must_hold_off():
                self._take_pause.end()
                return False
            bodies = await self._lanes.bodies([(entry.rid, entry.digest) for entry in self._taken])
        except (StateContention, LeaseExpired) as error:
            _log.warning("pool %s: nothing can be taken now (%s)", self._base, error)
            self._may_have_work = True
            self._take_pause.lengthen(self._clock())
            return False
        self._take_pause.end()
        entries, self._taken = self._taken, []
        await self._admit(entries, bodies)
        return True

    def _is_known(self, entry: PoolEntry) -> bool:
        """True where our own lapsed lease gave an entry back to us under a new token: it goes on under that one."""
        held = self._held.get(entry.rid)
        if held is not None:
            held.entry = entry
            return True
        if entry.rid in self._unsettled:
            self._unsettled[entry.rid] = (entry, self._unsettled[entry.rid][1])
            return True
        return False

    async def _admit(self, entries: Sequence[PoolEntry], bodies: Sequence[bytes | None]) -> None:
        now = self._clock()
        works: list[Work] = []
        for entry, body in zip(entries, bodies, strict=True):
            self._held[entry.rid] = _Held(entry, now, now + TRANSFER_S + self._timeout_s, is_suspect=entry.attempts > 0)
            work = self._work(entry, body)
            if isinstance(work, Work):
                works.append(work)
            else:
                self._end(entry.rid, work)
        for rid, outcome in await self._backend.admit(works):
            self._end(rid, outcome)
        deadline = self._clock() + self._timeout_s
        for held in [self._held[work.rid] for work in works if work.rid in self._held]:
            held.deadline = deadline

    def _work(self, entry: PoolEntry, body: bytes | None) -> Work | Outcome:
        if entry.rid in self._aborted:
            del self._aborted[entry.rid]
            return _aborted()
        if body is None:
            return Outcome.failed(InternalError("the stored command is gone; send the request again"), is_tainted=False)
        try:
            return Work(entry.rid, self._decode(body), is_watched=entry.reply_to != "", tenant=entry.tenant)
        except Exception as error:  # noqa: BLE001 - a body that cannot be decoded fails its own request and nobody else's
            return Outcome.failed(error, is_tainted=False)

    async def _advance(self) -> None:
        if self._backend.is_idle:
            await self._sleep()
            return
        for rid, outcome in await self._backend.step():
            self._end(rid, outcome)
        self._tell()

    def _tell(self) -> None:
        """Send on what the step brought to those who watch."""
        by_topic: dict[str, list[StreamChunk]] = {}
        for chunk in self._backend.take_chunks():
            held = self._held.get(chunk.rid)
            if held is not None and held.entry.reply_to:
                by_topic.setdefault(held.entry.reply_to, []).append(chunk)
        for topic, chunks in by_topic.items():
            self._courier.carry(topic, chunks)

    async def _sleep(self) -> None:
        """Until something happens, or the next pause or bound ends."""
        if self._unsettled and self._settle_pause.until <= self._clock():
            return
        until = [held.deadline for held in self._held.values()]
        if self._unsettled:
            until.append(self._settle_pause.until)
        if self._take_pause.until > self._clock():
            until.append(self._take_pause.until)
        timeout_s = max(0.0, min(until) - self._clock()) if until else None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        self._woken.clear()

    def _end(self, rid: str, outcome: Outcome) -> None:
        held = self._held.pop(rid, None)
        if held is not None:
            self._unsettled[rid] = (held.entry, entered_sample(self._base, held.entry, outcome))
            self._courier.forget(rid)
            self._account(held, outcome)

    def _account(self, held: _Held, outcome: Outcome) -> None:
        rid, seconds = held.entry.rid, self._clock() - held.since
        reason = "" if outcome.failure is None else outcome.failure.reason.value
        telemetry.count(telemetry.EXECUTIONS, base_model=self._base, kind=telemetry.SAMPLE, outcome=outcome.state, reason=reason)
        telemetry.observe(telemetry.EXECUTION, seconds, base_model=self._base, kind=telemetry.SAMPLE)
        attributes = {"kind": telemetry.SAMPLE, "request_id": rid} | outcome_attributes(outcome)
        telemetry.trace_ended(telemetry.SPAN_COMMAND, seconds, held.entry.trace, **attributes)
        if outcome.failure is not None and outcome.failure.diagnostic is not None:
            with telemetry.bound_request(rid):
                _log.error("sample failed:\n%s", outcome.failure.diagnostic)

    def _expire(self) -> None:
        now = self._clock()
        late = ExecutionTimeout(f"the sample did not end within {self._timeout_s:g} s; send a shorter request")
        for rid in [rid for rid, held in self._held.items() if held.deadline <= now]:
            self._backend.cancel(rid)
            self._end(rid, Outcome.failed(late, is_tainted=False))

    async def _settle(self) -> None:
        """Write all outcomes in one round trip; with the store away they are kept."""
        if not self._unsettled or self._clock() < self._settle_pause.until:
            return
        settled = dict(self._unsettled)
        try:
            lost = await self._lanes.pool_settle(self._replica, list(settled.values()))
        except StateContention as error:
            _log.warning("pool %s: %d outcomes are kept until the store is back (%s)", self._base, len(settled), error)
            self._settle_pause.lengthen(self._clock())
            return
        self._settle_pause.end()
        for rid, pair in settled.items():
            if self._unsettled.get(rid) is pair:
                del self._unsettled[rid]
        if lost:
            _log.info("pool %s: %d outcomes came too late, others have settled them", self._base, len(lost))

    async def _end_intake(self) -> None:
        if self._intake is not None:
            self._intake.cancel()
            with suppress(asyncio.CancelledError):
                await self._intake


def _aborted() -> Outcome:
    return Outcome.failed(Cancelled("the caller has gone, so the sample was dropped; send it again under a new seq_id"), is_tainted=False)
