"""Lanes in this process's memory: the operations of `lanes.Lanes` over the data of its neighbours in this folder.

Each operation is one function without an await between reading and writing, so it is atomic on its event loop. It outlives gateways
and replicas only as long as the process that holds it.

    memory_log.py       a model lane's entries        memory_futures.py    records, bodies, results      memory_entries.py   both as one
    memory_pool.py      samples                       memory_replicas.py   who lives                     memory_events.py    topics
    memory_sweep.py     what goes, and what fails           memory_feeds.py     ends of samples, for those who follow them
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinsmith.protocol.errors import NotFound, QuotaExceeded, RequestRejected, SessionEnded, StateContention
from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State, Write
from tinsmith.protocol.training import Kind
from tinsmith.state.feeds import FeedPage
from tinsmith.state.futures import cancelled, given_up, worn_out
from tinsmith.state.inbox import SampleAbort, encode
from tinsmith.state.lanes import (
    Acquired,
    Entry,
    Fenced,
    LaneInfo,
    LaneLimits,
    LeaseExpired,
    PoolEntry,
    PoolSubmission,
    QueueInfo,
    Replica,
    Role,
    Settlement,
    Submission,
    Submitted,
    Swept,
    Taken,
    Wake,
    bell_topic,
    inbox_topic,
    most_waiting,
    process_of,
    work_topic,
)
from tinsmith.state.memory_entries import LaneEntries, record_of
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_feeds import MemoryFeeds
from tinsmith.state.memory_futures import MemoryFutures
from tinsmith.state.memory_log import LaneLog
from tinsmith.state.memory_pool import MemoryPools
from tinsmith.state.memory_replicas import MemoryReplicas
from tinsmith.state.memory_store import Clock, MemoryStore
from tinsmith.state.memory_sweep import MemorySweep


class MemoryLanes:
    """Implements `lanes.Lanes`. Writes of an operation go into `store` in the same step; `clock_ms` defaults to the store's."""

    def __init__(self, store: MemoryStore, limits: LaneLimits, clock_ms: Clock | None = None) -> None:
        self.limits = limits
        self._store = store
        self._clock_ms = store.clock_ms if clock_ms is None else clock_ms
        self._events = EventLog()
        self._futures = MemoryFutures(self._events, self._clock_ms)
        self._replicas = MemoryReplicas(limits.lease_ms, self._clock_ms)
        self._feeds = MemoryFeeds(self._futures, self._events)
        self._pools = MemoryPools(self._futures, self._replicas, self._feeds, self._events, limits.max_attempts)
        self._lanes: dict[str, LaneLog] = {}
        self._entries = LaneEntries(self._futures, self._clock_ms)
        self._sweep = MemorySweep(limits, self._entries, self._futures, self._pools, self._replicas, self._events)
        self._ended: dict[tuple[str, str], int] = {}  # (tenant, session) -> when; their samples are refused
        self._inboxes: dict[str, int] = {}  # topic -> when something was last posted to it
        store.on_flush(self._forget)

    # Submitting

    async def submit(self, submission: Submission) -> Submitted:
        repeat = self._repeat(submission.rid, submission.tenant, submission.digest)
        if repeat is not None:
            return repeat
        lane = self._lane_for(submission, may_create=submission.seq == 0)
        if lane.is_given_up(submission.seq):
            return self._born_failed(submission, given_up(submission.seq))
        self._check_room(lane, submission)
        self._lanes[lane.name] = lane
        self._entries.add(lane, submission)
        lane.arrive(submission.seq, submission.kind, self._clock_ms())
        self._store.apply(submission.writes)
        self._announce(lane)
        return Submitted(submission.rid, State.PENDING, is_fresh=True)

    async def void(self, submission: Submission, failure: Failure) -> Submitted:
        repeat = self._repeat(submission.rid, submission.tenant, submission.digest)
        if repeat is not None:
            return repeat
        lane = self._lane_for(submission, may_create=False)
        if submission.seq >= lane.passed:
            lane.voids.add(submission.seq)
            lane.arrive(submission.seq, submission.kind, self._clock_ms())
            self._announce(lane)
        return self._born_failed(submission, failure)

    def _repeat(self, rid: str, tenant: str, digest: str) -> Submitted | None:
        """The first answer, if this request id was submitted before. Raises RequestRejected for other content."""
        record = self._futures.find(tenant, rid)
        if record is None:
            return None
        if record.digest != digest:
            raise RequestRejected(f"seq_id {record.seq} was already used with different content; send new content under a new seq_id")
        return Submitted(rid, record.state, is_fresh=False)

    def _lane_for(self, submission: Submission, *, may_create: bool) -> LaneLog:
        lane = self._lanes.get(submission.lane)
        if lane is None and may_create:
            now_ms = self._clock_ms()
            return LaneLog(submission.lane, submission.tenant, submission.session, submission.base, last_ms=now_ms, moved_ms=now_ms)
        if lane is None or lane.tenant != submission.tenant:
            raise NotFound(f"model {submission.lane!r} is unknown; create one")
        if not lane.is_open:
            raise SessionEnded(f"model {submission.lane} is closed; create a new one")
        return lane

    def _check_room(self, lane: LaneLog, submission: Submission) -> None:
        if lane.num_pending >= self.limits.max_pending:
            raise QuotaExceeded(f"{lane.num_pending} commands are waiting already; wait for some of them before sending more")
        self._check_bytes(submission.tenant, len(submission.body))

    def _check_bytes(self, tenant: str, size: int) -> None:
        if self._futures.held_bytes(tenant) + size > self.limits.max_tenant_bytes:
            raise QuotaExceeded(
                f"commands and results over {self.limits.max_tenant_bytes} bytes are held; fetch results or wait, then retry"
            )

    def _born_failed(self, submission: Submission, failure: Failure) -> Submitted:
        now_ms = self._clock_ms()
        self._futures.add_ended(replace(record_of(submission, now_ms), state=State.FAILED, ended_ms=now_ms, failure=failure))
        return Submitted(submission.rid, State.FAILED, is_fresh=True)

    def _announce(self, lane: LaneLog) -> None:
        """Ring the living owner's bell, or call for an owner."""
        if lane.owner is not None and self._replicas.is_alive(lane.owner):
            self._events.append(bell_topic(lane.owner), lane.name)
        elif lane.num_pending:
            self._events.append(work_topic(lane.base), lane.name)

    # Owning

    async def acquire(self, lane: str, replica: str) -> Acquired | None:
        if not self._replicas.is_alive(replica):
            raise LeaseExpired(f"replica {replica} has no lease; renew, then ask again")
        log = self._lanes.get(lane)
        if log is None or not log.is_open:
            return None
        if log.owner != replica:
            if self._replicas.is_alive(log.owner):
                return None
            self._hand_over(log, replica)
        return Acquired(log.info(), log.token, log.cursor(), log.replay())

    def _hand_over(self, lane: LaneLog, replica: str) -> None:
        """A new token. What was running has cost a worker; of what it leaves, the saves among the replayed entries go on."""
        lane.token += 1
        lane.owner = replica
        lane.moved_ms = self._clock_ms()
        for entry in [entry for entry in lane.unsettled() if entry.state is State.RUNNING]:
            failed = entry.attempts + 1 >= self.limits.max_attempts
            entry = lane.put(replace(entry, attempts=entry.attempts + 1))
            if failed:
                self._entries.end(lane, entry, Outcome(failure=worn_out(self.limits.max_attempts)))
            else:
                self._entries.give_back(lane, entry)
        for entry in lane.replay():
            if entry.state is State.PENDING:
                self._entries.start(lane, entry)

    async def take(self, lane: str, replica: str, token: int, from_seq: int, max_commands: int, max_tokens: int) -> Taken:
        log = self._owned(lane, replica, token)
        taken: list[Entry] = []
        num_tokens = 0
        seq, wait_ms = min(from_seq, log.passed), None  # what was never handed out is not skipped
        while seq <= log.last_seq and len(taken) < max_commands:
            entry = log.entries.get(seq)
            if entry is None:
                seq, wait_ms = self._step_over(log, seq)
                if wait_ms is not None:
                    break
                continue
            if entry.state.is_terminal:
                seq += 1
                continue
            if taken and (entry.attempts > 0 or num_tokens + entry.tokens > max_tokens):
                break
            taken.append(self._entries.start(log, entry))
            num_tokens += entry.tokens
            seq += 1
            if entry.kind.is_barrier or entry.attempts > 0:
                break
        log.passed = max(log.passed, seq)
        return Taken(tuple(taken), seq, wait_ms, log.held_bytes)

    def _step_over(self, lane: LaneLog, seq: int) -> tuple[int, int | None]:
        """Past a seq at which nothing came: where to go on, or how long to wait for it."""
        if lane.is_given_up(seq):
            return lane.after_given_up(seq), None
        wait_ms = lane.missing_wait_ms(seq, self._clock_ms(), self.limits.hole_grace_ms)
        return (seq, wait_ms) if wait_ms else (lane.next_arrived(seq), None)

    async def settle(self, lane: str, replica: str, token: int, settlements: Sequence[Settlement]) -> frozenset[int]:
        log = self._owned(lane, replica, token)
        late: set[int] = set()
        for settlement in settlements:
            if log.is_running(settlement.seq):
                self._entries.end(log, log.entries[settlement.seq], settlement.outcome)
                self._store.apply(settlement.outcome.writes)
            else:
                late.add(settlement.seq)
        return frozenset(late)

    async def commit_snapshot(self, lane: str, replica: str, token: int, seq: int, artifact: str) -> str | None:
        log = self._owned(lane, replica, token)
        if (seq, artifact) == (log.durable, log.snapshot):
            return log.former
        if not log.durable <= seq < log.cursor() or any(entry.seq <= seq for entry in log.unsettled()):
            raise StateContention(f"model {lane} cannot be cut at seq {seq} now: a command up to it is not settled")
        log.durable, log.former, log.snapshot = seq, log.snapshot, artifact
        log.passed = max(log.passed, seq + 1)
        for entry in log.trim(seq):
            self._entries.free_body(log, entry)
        return log.former

    async def release(self, lane: str, replica: str, token: int) -> None:
        log = self._lanes.get(lane)
        if log is None or not log.is_open or log.token != token or log.owner not in (replica, None):
            raise _fenced(lane)
        if log.owner is None:
            return
        log.owner = None
        for entry in log.unsettled():
            if entry.state is State.RUNNING:
                self._entries.give_back(log, entry)
        self._announce(log)

    def _owned(self, lane: str, replica: str, token: int) -> LaneLog:
        log = self._lanes.get(lane)
        if log is None or not log.is_open or (log.owner, log.token) != (replica, token):
            raise _fenced(lane)
        if not self._replicas.is_alive(replica):
            raise LeaseExpired(f"replica {replica} has no lease; renew, then ask again")
        return log

    # Ending

    async def close(self, tenant: str, lane: str, failure: Failure, writes: Sequence[Write] = (), *, seen: LaneInfo | None = None) -> bool:
        log = self._lanes.get(lane)
        if log is None or log.tenant != tenant or not log.is_open:
            return True
        if seen is not None and seen.snapshot != log.snapshot:
            return False
        for entry in log.unsettled():
            self._entries.end(log, entry, Outcome(failure=failure))
        for entry in log.trim(log.last_seq):
            self._entries.free_body(log, entry)
        self._futures.free_results_where(lambda record: record.lane == lane)
        log.closed_ms = self._clock_ms()
        log.token += 1
        if log.owner is not None:
            self._events.append(bell_topic(log.owner), lane)
            log.owner = None
        self._store.apply(writes)
        return True

    async def close_session(self, tenant: str, session: str, failure: Failure) -> None:
        self._ended.setdefault((tenant, session), self._clock_ms())
        for rid, replica in self._pools.close_session(tenant, session, failure).items():
            await self.post(inbox_topic(replica), [encode(SampleAbort(rid=rid))])
        self._futures.free_results_where(lambda record: record.kind is Kind.SAMPLE and (record.tenant, record.session) == (tenant, session))

    async def cancel(self, tenant: str, rid: str) -> State | None:
        record = self._futures.find(tenant, rid)
        if record is None:
            return None
        if record.state is not State.PENDING:
            return record.state
        if isinstance(record.seq, str):
            self._pools.cancel(rid)
        else:
            lane = self._lanes[record.lane]
            self._entries.end(lane, lane.entries[record.seq], Outcome(failure=cancelled()))
        return State.CANCELLED

    # Pools

    async def pool_submit(self, submission: PoolSubmission) -> Submitted:
        repeat = self._repeat(submission.rid, submission.tenant, submission.digest)
        if repeat is not None:
            return repeat
        if (submission.tenant, submission.session) in self._ended:
            raise SessionEnded(f"session {submission.session} has ended; create a new one")
        self._pools.check_room(submission.base, submission.tenant, most_waiting(submission, self.limits))
        self._check_bytes(submission.tenant, len(submission.body))
        self._pools.append(submission, self._clock_ms())
        return Submitted(submission.rid, State.PENDING, is_fresh=True)

    async def pool_take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        if not self._replicas.is_alive(replica):
            raise LeaseExpired(f"replica {replica} has no lease; renew, then ask again")
        return self._pools.take(base, replica, max_entries, max_tokens)

    async def pool_settle(self, replica: str, settlements: Sequence[tuple[PoolEntry, Outcome]]) -> frozenset[str]:
        late: set[str] = set()
        for entry, outcome in settlements:
            if self._pools.settle(replica, entry, outcome):
                self._store.apply(outcome.writes)
            else:
                late.add(entry.rid)
        return frozenset(late)

    async def completions(self, tenant: str, feed: str, after: int, max_events: int) -> FeedPage:
        return self._feeds.page(tenant, feed, after, max_events)

    async def acknowledge(self, tenant: str, feed: str, rids: Sequence[str]) -> None:
        self._feeds.acknowledge(tenant, feed, rids)

    # Reading

    async def look(self, tenant: str, rid: str) -> FutureRecord | None:
        return self._futures.find(tenant, rid)

    async def requests(self, tenant: str, session: str, limit: int) -> list[FutureRecord]:
        return self._futures.of_session(tenant, session, limit)

    async def result(self, tenant: str, rid: str) -> bytes | None:
        return self._futures.fetch(tenant, rid)

    async def bodies(self, commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
        return [self._futures.body(rid, digest) for rid, digest in commands]

    async def lane(self, lane: str) -> LaneInfo | None:
        log = self._lanes.get(lane)
        return None if log is None else log.info()

    async def tail(self, topics: Sequence[str]) -> dict[str, int]:
        return {topic: self._events.tail(topic) for topic in topics}

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        return await self._events.wait(cursors, timeout_s)

    async def post(self, topic: str, messages: Sequence[str]) -> None:
        process_of(topic)
        for message in messages:
            self._events.append(topic, message)
            self._inboxes[topic] = self._clock_ms()

    # Replicas

    async def renew(self, replica: Replica) -> list[str]:
        self._replicas.renew(replica)
        self._pass_on(replica.base, self._replicas.newly_dead(replica.base))
        unowned = [lane for lane in self._lanes.values() if lane.base == replica.base and self._wants_owner(lane)]
        return [lane.name for lane in sorted(unowned, key=lambda lane: (lane.last_ms, lane.name))]

    async def bury(self, replica: str) -> None:
        buried = self._replicas.bury(replica)
        if buried is not None:
            self._pass_on(buried.base, [replica])

    async def replicas(self, base: str) -> list[Replica]:
        return self._replicas.living(base)

    def _pass_on(self, base: str, dead: Sequence[str]) -> None:
        """Offer what these held to their peers. They stay the owners until one acquires, and go on if they come back before."""
        self._pools.reclaim(base)
        for lane in self._lanes.values():
            if lane.owner in dead and lane.is_open:
                self._announce(lane)

    def _wants_owner(self, lane: LaneLog) -> bool:
        return lane.is_open and lane.num_pending > 0 and not self._replicas.is_alive(lane.owner)

    # Watching and sweeping

    async def queues(self, base: str) -> list[QueueInfo]:
        infos = [self._queue_info(lane) for lane in self._lanes.values() if lane.base == base and lane.is_open and lane.num_pending]
        return sorted(infos + self._pools.queue_infos(base), key=lambda info: info.lane)

    def _queue_info(self, lane: LaneLog) -> QueueInfo:
        head = lane.first_pending()
        return QueueInfo(
            lane=lane.name,
            tenant=lane.tenant,
            base=lane.base,
            role=Role.TRAINER,
            owner=lane.owner if self._replicas.is_alive(lane.owner) else None,
            num_pending=lane.num_pending,
            oldest_ms=None if head is None else self._futures.get(head.rid).submitted_ms,
        )

    async def sweep(self, *, stuck_ms: int, orphan_ms: int) -> Swept:
        times = {"now_ms": self._clock_ms(), "stuck_ms": stuck_ms, "orphan_ms": orphan_ms}
        swept = self._sweep.run(self._lanes, self._ended, self._inboxes, **times)
        self._feeds.prune()
        return swept

    def _forget(self) -> None:
        self._lanes.clear()
        self._ended.clear()
        self._inboxes.clear()
        self._pools.clear()
        self._feeds.clear()
        self._replicas.clear()
        self._futures.clear()
        self._events.forget()


def _fenced(lane: str) -> Fenced:
    return Fenced(f"model {lane} has another owner or is closed")
