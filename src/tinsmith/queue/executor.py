"""The executor of a trainer replica: from "accepted" to "settled" for the model lanes that this replica owns.

    acquire -> rebuild (snapshot + replay) -> loop { take; run; settle; now and then snapshot }

It sees an engine only as a `Backend` and the store only as `Lanes`; it knows nothing of torch, files, HTTP or what a command means. One
engine call runs at a time. Between its lanes it goes by deficit round robin over tokens.

Effect = outcome: an entry is settled completed only if its whole effect is in the adapter, failed only if none is. Where that is not
known (a time-out, an exception in a mutating phase) the adapter is tainted: before the next entry of its lane runs, it is thrown away and
rebuilt from the snapshot and the log. Run comes before settle; that is safe since a fenced replica's memory is all that its run changed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from tinsmith import telemetry
from tinsmith.protocol.errors import ExecutionTimeout, InternalError, StateContention, UserError
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.training import Kind, TrainingCommand
from tinsmith.queue import accounts, ledger
from tinsmith.queue.residents import Resident, Ring
from tinsmith.state.futures import pool_lane
from tinsmith.state.lanes import Acquired, Entry, Fenced, LaneInfo, Lanes, LeaseExpired, Replica, Settlement, Taken

T = TypeVar("T")
Fetch = Callable[[Entry], Awaitable[TrainingCommand]]
Decode = Callable[[Kind, bytes], TrainingCommand | Sample]  # protocol.wire.decode_command

COMMANDS_PER_CALL = 1  # the numerics mode "exact": an engine call holds one command, so a replay computes the same bits
LOOP_DECODES_BYTES = 1024 * 1024  # a longer command is decoded in a thread: 16 MiB take 0.1 s, in which the loop must answer others
FIRST_RETRY_S = 0.05  # of a store that is away; doubles up to MAX_RETRY_S
MAX_RETRY_S = 2.0

_log = logging.getLogger(__name__)


class _GivenUp(Exception):
    """The store stayed away, or the gate shut, for as long as a stop may wait."""


@dataclass(frozen=True, slots=True)
class Ready:
    """An entry and its decoded command."""

    entry: Entry
    command: TrainingCommand


class Backend(Protocol):
    """An engine with its gate and its checkpoints, as the executor sees it.

    Any exception from `run` means that the lanes' adapters may hold half an effect, with one exception: StateContention (the store was
    away before anything was mutated) asks for the same call again.
    """

    async def restore(self, info: LaneInfo, replay: Sequence[Entry], fetch: Fetch) -> list[Settlement]:
        """Build the adapter in place of whatever memory the lane has: `info.snapshot`, then `replay` in order. Answers the outcomes of
        the saves among it that were not settled."""
        ...

    async def run(self, info: LaneInfo, items: Sequence[Ready]) -> list[Outcome]:
        """One outcome an item, in order."""
        ...

    async def snapshot(self, info: LaneInfo, seq: int) -> str:
        """Make a durable artifact of the adapter as entry `seq` left it; answers its id. Changes nothing."""
        ...

    async def discard(self, artifact: str) -> None:
        """Delete a former snapshot."""
        ...

    async def drop(self, lane: str) -> None:
        """Throw the adapter's memory away; unknown lanes are ignored."""
        ...

    async def opened(self) -> None:
        """Return once the gate is not shut."""
        ...


class Slots(Protocol):
    """The adapter slots of this replica (`lifecycle.adapters.AdapterSlots`)."""

    @property
    def has_room(self) -> bool: ...

    def claim(self, lane: str) -> bool: ...

    def free(self, lane: str) -> None: ...

    def evictee(self, idle: Iterable[str]) -> str | None: ...


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """A lane is snapshotted when more than this could be trimmed from its log, or would have to be run again."""

    max_bytes: int
    max_engine_s: float


class Executor:
    """Serves the model lanes of one base model on one replica. All methods belong to the thread of its loop.

    `drain_s`: how long a stop may wait for a store that is away or a gate that is shut. `describe`: the replica as it is now, for renewals;
    by default as it was given.
    """

    def __init__(
        self,
        lanes: Lanes,
        backend: Backend,
        slots: Slots,
        replica: Replica,
        *,
        decode: Decode,
        snapshots: SnapshotPolicy,
        drain_s: float = 10.0,
        describe: Callable[[], Replica] | None = None,
    ) -> None:
        self._lanes = lanes
        self._backend = backend
        self._slots = slots
        self._replica = replica
        self._describe: Callable[[], Replica] = (lambda: replica) if describe is None else describe
        self._pools = pool_lane(replica.base, "")
        self._decode = decode
        self._policy = snapshots
        self._drain_s = drain_s
        self._ring = Ring()
        self._candidates: dict[str, None] = {}  # lanes that may want an owner, oldest first
        self._bell = asyncio.Event()
        self._must_look = True  # for lanes without an owner, and at every own lane
        self._stopping = asyncio.Event()
        self._give_up_at = float("inf")
        self._take_over_at = 0.0
        self._is_sparing = False
        self._has_lost_memory = False

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that this replica believes to own."""
        return self._ring.lanes

    def ring(self, lane: str) -> None:
        """Something is new in one of this replica's lanes. A hint; other lanes are ignored."""
        resident = self._ring.find(lane)
        if resident is not None:
            resident.has_work = True
            self._bell.set()

    def offer(self, lanes: Collection[str]) -> None:
        """These lanes may have work and no owner. A hint; pool lanes are ignored. A lane that this replica believes to own is looked at:
        its lease had lapsed when the work came, or another has owned the lane since."""
        for lane in lanes:
            self.ring(lane)
        fresh = [lane for lane in lanes if lane not in self._ring and not lane.startswith(self._pools)]
        if fresh:
            self._candidates.update(dict.fromkeys(fresh))
            self._bell.set()

    def resync(self) -> None:
        """Hints may have been lost: look at everything."""
        self._must_look = True
        self._bell.set()

    def spare(self) -> None:
        """The store was away from this process: for one lease, leave alone the lanes that others may own, who were cut off from it too."""
        self._take_over_at = asyncio.get_running_loop().time() + self._lanes.limits.lease_ms / 1000

    def stop(self) -> None:
        """Make `run` finish the running call, snapshot and release every lane, and return."""
        self._stopping.set()
        self._give_up_at = asyncio.get_running_loop().time() + self._drain_s
        self._bell.set()

    async def run(self) -> None:
        """Serve until `stop`. Cancelling it abandons the lanes as the death of the process would. Raises InternalError where the engine
        keeps what it was to drop: this replica is to be replaced."""
        try:
            while not self._stopping.is_set():
                await self._step()
                if self._has_lost_memory:
                    raise InternalError("the engine did not drop an adapter; only another process has the memory that it holds")
            await self._drain()
        except _GivenUp as error:
            _log.warning("stopped without a drain: %s; the next owners of the lanes run again what was not settled", error)
        finally:
            for resident in self._ring:
                resident.disarm()

    # --- which lane is next

    async def _step(self) -> None:
        """One turn of one lane, or a sleep until something may have come."""
        if self._must_look:
            await self._look()
        if self._candidates:
            await self._gate_open()
            await self._admit()
        resident = self._ring.next()
        if resident is None:
            await self._bell.wait()
            self._bell.clear()
            return
        try:
            await self._gate_open()
            await self._serve(resident)
        except Fenced:
            await self._forget(resident)

    async def _look(self) -> None:
        """Learn from the store what hints may have been missed."""
        self._must_look = False
        for resident in self._ring:
            resident.has_work = True
        self.offer(await self._ask(lambda: self._lanes.renew(self._describe())))

    # --- lanes come and go

    async def _admit(self) -> None:
        """Acquire the lanes that want an owner, as far as there are slots, or idle lanes to make room."""
        for lane in tuple(self._candidates):
            if not self._slots.has_room and self._idlest() is None:
                return  # a lane that falls idle leads back here
            info = await self._ask(partial(self._lanes.lane, lane))
            if info is None or not await self._wants_owner(info):
                self._candidates.pop(lane, None)
            elif not self._must_spare(info):
                self._candidates.pop(lane, None)
                await self._acquire(lane)

    async def _wants_owner(self, info: LaneInfo) -> bool:
        if not info.is_open or info.num_pending == 0 or info.lane in self._ring:
            return False
        if info.owner in (None, self._replica.id):
            return True
        living = await self._ask(lambda: self._lanes.replicas(info.base))
        return all(replica.id != info.owner for replica in living)

    def _must_spare(self, info: LaneInfo) -> bool:
        """Whether the lane's lease says nothing now (see `spare`)."""
        rest_s = self._take_over_at - asyncio.get_running_loop().time()
        if rest_s <= 0 or info.token == 0:
            return False
        if not self._is_sparing:
            self._is_sparing = True
            asyncio.get_running_loop().call_later(rest_s, self._end_sparing)
        return True

    def _end_sparing(self) -> None:
        self._is_sparing = False
        self._bell.set()

    async def _acquire(self, lane: str) -> None:
        evictee = None if self._slots.has_room else self._idlest()
        if evictee is not None:
            await self._hand_back(evictee)
        acquired = await self._ask(lambda: self._lanes.acquire(lane, self._replica.id))
        if acquired is None:
            return
        resident = Resident.of(acquired)
        self._slots.claim(lane)
        self._ring.add(resident)

    def _idlest(self) -> Resident | None:
        lane = self._slots.evictee(resident.id for resident in self._ring if resident.is_idle)
        return None if lane is None else self._ring.find(lane)

    async def _hand_back(self, resident: Resident) -> None:
        """Snapshot, so that the next owner has nothing to run again, and release."""
        try:
            if resident.is_ahead:
                await self._snapshot(resident)
            await self._ask(lambda: self._lanes.release(resident.id, self._replica.id, resident.info.token))
        except Fenced:
            _log.info("lane %s had another owner already", resident.id)
        await self._forget(resident)

    async def _forget(self, resident: Resident) -> None:
        """The lane is no longer ours: its memory goes, nothing is published."""
        self._ring.remove(resident)
        await self._gate_open()
        failure = await _attempt(self._backend.drop(resident.id))
        if isinstance(failure, Exception):
            _log.error("the memory of lane %s could not be dropped", resident.id, exc_info=failure)
            # A late drop is done when its call ends, for which the gate waits; no other adapter fits where one was not dropped at all.
            self._has_lost_memory = self._has_lost_memory or not isinstance(failure, ExecutionTimeout)
        self._slots.free(resident.id)
        accounts.lag(self._replica.base, self._ring)

    async def _gate_open(self) -> None:
        """Return once the gate is not shut. Raises _GivenUp when a stop has waited for that long enough."""
        tasks = opened, stopping = asyncio.ensure_future(self._backend.opened()), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await asyncio.wait([opened], timeout=self._drain_s)
            if not opened.done():
                raise _GivenUp("the engine is still busy with a call that timed out")
        finally:
            opened.cancel()
            stopping.cancel()

    async def _drain(self) -> None:
        await self._gate_open()
        for resident in self._ring:
            await self._hand_back(resident)

    # --- one turn of one lane: take, run, settle

    async def _serve(self, resident: Resident) -> None:
        """An entry is taken before the adapter is built for it: a worker that dies of the building is then one that the entry has cost, so
        a command whose model kills its workers is given up as one that does so itself."""
        plan = None if resident.is_built else await self._rebuilding(resident)
        taken = await self._take(resident)
        failure = None if plan is None else await self._rebuild(resident, *plan)
        if failure is not None and not taken.entries:
            taken = await self._take(resident)  # what came meanwhile waited for this
        if taken.entries:
            self._slots.claim(resident.id)  # note its use
            outcomes = await self._run(resident, taken.entries) if failure is None else _all_failed(taken.entries, failure, is_tainted=True)
            pairs = list(zip(taken.entries, outcomes, strict=True))
            info = resident.info
            await self._settle(resident, [Settlement(entry.seq, ledger.entered(info, outcome, entry)) for entry, outcome in pairs])
            for entry, outcome in pairs:
                resident.note(entry, outcome)
                accounts.executed(self._replica.base, entry, outcome)
        resident.cursor = taken.cursor
        if resident.is_ahead and self._is_due(resident):
            await self._snapshot(resident)
        accounts.lag(self._replica.base, self._ring)

    async def _take(self, resident: Resident) -> Taken:
        """The next entries. The lane has work if there were some, or if its bell rang meanwhile."""
        resident.disarm()
        resident.has_work = False
        info, budget = resident.info, max(resident.deficit, 1)
        taken = await self._ask(
            lambda: self._lanes.take(info.lane, self._replica.id, info.token, resident.cursor, COMMANDS_PER_CALL, budget)
        )
        if taken.entries:
            resident.has_work = True
        else:
            resident.deficit = min(resident.deficit, 0)
            self._arm(resident, taken.wait_ms)
        return taken

    def _arm(self, resident: Resident, wait_ms: int | None) -> None:
        """Look again when the grace of a missing seq is over."""
        if wait_ms is not None:
            resident.hole = asyncio.get_running_loop().call_later(max(wait_ms, 1) / 1000, self.ring, resident.id)

    async def _run(self, resident: Resident, entries: Sequence[Entry]) -> list[Outcome]:
        with accounts.running(resident.info, entries[0]) as traced:
            if traced.parent:
                tenant, rid = resident.info.tenant, entries[0].rid
                traced.note(queue_wait_s=await self._ask(lambda: accounts.queue_wait_s(self._lanes, tenant, rid)))
            outcomes = await self._outcomes_of(resident, entries)
            traced.note(**accounts.outcome_attributes(outcomes[0]))
        return outcomes

    async def _outcomes_of(self, resident: Resident, entries: Sequence[Entry]) -> list[Outcome]:
        items = await _attempt(self._ask(lambda: self._ready(entries)))
        if isinstance(items, Exception):
            return _all_failed(entries, items, is_tainted=False)
        began = asyncio.get_running_loop().time()
        outcomes = await _attempt(self._ask(lambda: self._backend.run(resident.info, items)))
        resident.engine_s += asyncio.get_running_loop().time() - began
        return _all_failed(entries, outcomes, is_tainted=True) if isinstance(outcomes, Exception) else outcomes

    async def _settle(self, resident: Resident, settlements: Sequence[Settlement]) -> None:
        """Write the outcomes, as late as the store allows: they are kept while it is away."""
        await self._ask(lambda: self._lanes.settle(resident.id, self._replica.id, resident.info.token, settlements))

    async def _rebuilding(self, resident: Resident) -> tuple[Acquired, str]:
        """What the adapter is to be built from, and why it must be. Raises Fenced."""
        acquired, resident.acquired = resident.acquired, None
        if acquired is not None:
            return acquired, accounts.ACQUIRED
        acquired = await self._ask(lambda: self._lanes.acquire(resident.id, self._replica.id))
        if acquired is None:
            raise Fenced
        resident.start_from(acquired)
        resident.acquired = None
        return acquired, accounts.TAINTED

    async def _rebuild(self, resident: Resident, acquired: Acquired, cause: str) -> Exception | None:
        """Throw the adapter's memory away and build it from snapshot and log. Answers why that failed: the next entry then fails with
        it, and the one after tries again."""
        replay = acquired.replay
        began = asyncio.get_running_loop().time()
        saves = await _attempt(self._ask(lambda: self._backend.restore(resident.info, replay, self._fetch)))
        resident.unsaved_engine_s = asyncio.get_running_loop().time() - began if replay else 0.0
        failure = saves if isinstance(saves, Exception) else None
        accounts.restored(self._replica.base, acquired, cause, asyncio.get_running_loop().time() - began, failure)
        if isinstance(saves, Exception):
            _log.error("lane %s could not be rebuilt", resident.id, exc_info=saves)
            return _rebuild_failure(saves)
        if saves:
            await self._settle(resident, [Settlement(save.seq, ledger.entered(resident.info, save.outcome)) for save in saves])
        resident.is_built = True
        return None

    # --- snapshots

    def _is_due(self, resident: Resident) -> bool:
        return resident.trimmable_bytes > self._policy.max_bytes or resident.engine_s > self._policy.max_engine_s

    async def _snapshot(self, resident: Resident) -> None:
        """Raise the lane's floor to its last settled entry. A failure is logged; the next one is tried when as much has come up again."""
        resident.begin_snapshot()
        with telemetry.span(telemetry.SNAPSHOT, base_model=self._replica.base):
            is_taken = await self._raise_floor(resident)
        accounts.snapshotted(self._replica.base, is_taken=is_taken)

    async def _raise_floor(self, resident: Resident) -> bool:
        """Answers whether the lane now has the snapshot."""
        info, seq = resident.info, resident.done
        artifact = await _attempt(self._backend.snapshot(info, seq))
        if isinstance(artifact, Exception):
            _log.error("lane %s could not be snapshotted", resident.id, exc_info=artifact)
            return False
        commit = self._lanes.commit_snapshot
        try:
            former = await self._ask(lambda: commit(info.lane, self._replica.id, info.token, seq, artifact), is_patient=False)
        except StateContention as error:
            _log.warning("the snapshot of lane %s was not taken: %s", resident.id, error.message)
            return False
        resident.end_snapshot(seq, artifact)
        if former is not None and former != artifact:
            failure = await _attempt(self._backend.discard(former))
            if isinstance(failure, Exception):
                _log.warning("the former snapshot %s could not be deleted", former, exc_info=failure)
        return True

    # --- the store

    async def _ready(self, entries: Sequence[Entry]) -> list[Ready]:
        """Entries with their commands. Raises InternalError where a body is missing, and what the decoder raises."""
        bodies = await self._lanes.bodies([(entry.rid, entry.digest) for entry in entries])
        return [Ready(entry, await self._decoded(entry, body)) for entry, body in zip(entries, bodies, strict=True)]

    async def _fetch(self, entry: Entry) -> TrainingCommand:
        (item,) = await self._ready([entry])
        return item.command

    async def _decoded(self, entry: Entry, body: bytes | None) -> TrainingCommand:
        if body is None:
            raise InternalError(f"the command of seq {entry.seq} is missing from the store; load the last checkpoint into a new model")
        is_long = len(body) > LOOP_DECODES_BYTES
        command = await asyncio.to_thread(self._decode, entry.kind, body) if is_long else self._decode(entry.kind, body)
        if isinstance(command, Sample):
            raise InternalError(f"seq {entry.seq} is a sample, which belongs in a pool; submit it to a sampler")
        return command

    async def _ask(self, operation: Callable[[], Awaitable[T]], *, is_patient: bool = True) -> T:
        """Ask until the store answers; renew first where the own lease has lapsed. Raises StateContention only if it is not patient."""
        loop = asyncio.get_running_loop()
        retry_s, must_renew = FIRST_RETRY_S, False
        while True:
            try:
                if must_renew:
                    self.offer(await self._lanes.renew(self._describe()))
                    must_renew = False
                return await operation()
            except LeaseExpired:
                must_renew = True
            except StateContention as error:
                if not is_patient:
                    raise
                self.spare()
                if loop.time() >= self._give_up_at:
                    raise _GivenUp(error.message) from error
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)


async def _attempt(work: Awaitable[T]) -> T | Exception:
    """What the work came to. The executor's one broad except: whatever engine or storage raise becomes the outcome of a command. What
    the store says about the lane passes through."""
    try:
        return await work
    except (Fenced, _GivenUp):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return error


def _all_failed(entries: Sequence[Entry], error: Exception, *, is_tainted: bool) -> list[Outcome]:
    return [Outcome.failed(error, is_tainted=is_tainted) for _ in entries]


def _rebuild_failure(error: Exception) -> Exception:
    """A damaged snapshot is no fault of the caller whose command found it."""
    if isinstance(error, UserError):
        return InternalError(f"the model could not be rebuilt: {error.message}")
    return error
