"""Pool lanes in memory: samples of a base model, by tenant, each under its taker's lease.

Tenants take turns by tokens: each hand-out is charged to its tenant and the one charged least is next, so one tenant's backlog does
not delay another's single sample. Knows nothing of model lanes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from tinsmith.protocol.errors import QuotaExceeded
from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State
from tinsmith.protocol.training import Kind
from tinsmith.state.futures import cancelled, pool_lane, worn_out
from tinsmith.state.lanes import PoolEntry, PoolSubmission, QueueInfo, Role, work_topic
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_feeds import MemoryFeeds
from tinsmith.state.memory_futures import MemoryFutures
from tinsmith.state.memory_replicas import MemoryReplicas


@dataclass(frozen=True, slots=True)
class _Sample:
    """An unsettled entry and what its pool needs of it."""

    base: str
    submitted_ms: int
    arrival: int
    entry: PoolEntry


@dataclass(slots=True)
class _Pool:
    """Samples of one base model. queues: waiting rids by tenant, in order of arrival. charged: tokens handed out by tenant."""

    queues: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(deque))
    charged: dict[str, int] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)  # rid -> replica

    def waiting(self) -> list[str]:
        return [tenant for tenant, queue in self.queues.items() if queue]

    def append(self, tenant: str, rid: str) -> None:
        """Last in its tenant's line. Who comes back after a pause has saved up nothing."""
        least = min((self.charged[other] for other in self.waiting()), default=0)
        self.charged[tenant] = max(self.charged.get(tenant, 0), least)
        self.queues[tenant].append(rid)

    def next_tenant(self) -> str | None:
        return min(self.waiting(), key=lambda tenant: self.charged[tenant], default=None)

    def put_back(self, tenant: str, rid: str, num_before: int) -> None:
        """In its tenant's line again, behind as many as came before it."""
        self.append(tenant, rid)
        self.queues[tenant].pop()
        self.queues[tenant].insert(num_before, rid)

    def drop(self, tenant: str, rids: Collection[str]) -> None:
        """Take them out of line, and from those who run them."""
        self.queues[tenant] = deque(rid for rid in self.queues[tenant] if rid not in rids)
        for rid in rids:
            self.taken.pop(rid, None)

    def rest(self) -> None:
        """With nobody waiting there is nobody to be fair to."""
        if not self.waiting():
            self.queues.clear()
            self.charged.clear()


class MemoryPools:
    """The pool lanes of every base model."""

    def __init__(self, futures: MemoryFutures, replicas: MemoryReplicas, feeds: MemoryFeeds, events: EventLog, max_attempts: int) -> None:
        self._futures = futures
        self._replicas = replicas
        self._feeds = feeds
        self._events = events
        self._max_attempts = max_attempts
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)
        self._samples: dict[str, _Sample] = {}  # unsettled ones by rid
        self._num_arrived = 0

    def check_room(self, base: str, tenant: str, max_pending: int) -> None:
        """Raises QuotaExceeded."""
        if base in self._pools and len(self._pools[base].queues.get(tenant, ())) >= max_pending:
            raise QuotaExceeded(f"{max_pending} samples are waiting already; wait for some of them before sending more")

    def append(self, submission: PoolSubmission, now_ms: int) -> None:
        """Add a sample and its record."""
        lane = pool_lane(submission.base, submission.tenant)
        self._futures.add(
            FutureRecord(
                rid=submission.rid,
                tenant=submission.tenant,
                session=submission.session,
                lane=lane,
                seq=submission.key,
                kind=Kind.SAMPLE,
                digest=submission.digest,
                state=State.PENDING,
                submitted_ms=now_ms,
            ),
            submission.body,
        )
        if submission.feed:
            self._feeds.follow(submission.tenant, submission.feed, submission.rid)
        entry = PoolEntry(
            rid=submission.rid,
            tenant=submission.tenant,
            digest=submission.digest,
            size=len(submission.body),
            tokens=submission.tokens,
            token=0,
            attempts=0,
            trace=submission.trace,
            reply_to=submission.reply_to,
            session=submission.session,
        )
        self._num_arrived += 1
        self._samples[entry.rid] = _Sample(submission.base, now_ms, self._num_arrived, entry)
        self._pools[submission.base].append(entry.tenant, entry.rid)
        self._events.append(work_topic(submission.base), lane)

    def take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        """Hand out up to the budget, at least one entry where one waits. One that has cost a worker before goes alone."""
        self.reclaim(base)
        pool = self._pools[base]
        taken: list[PoolEntry] = []
        num_tokens = 0
        while len(taken) < max_entries and (tenant := pool.next_tenant()) is not None:
            entry = self._samples[pool.queues[tenant][0]].entry
            if taken and (entry.attempts > 0 or num_tokens + entry.tokens > max_tokens):
                break
            pool.queues[tenant].popleft()
            pool.charged[tenant] += max(1, entry.tokens)
            num_tokens += entry.tokens
            taken.append(self._start(pool, entry, replica))
            if entry.attempts > 0:
                break
        pool.rest()
        return taken

    def reclaim(self, base: str) -> None:
        """Put what dead replicas had taken back to its place in line, or fail it if it has cost enough workers."""
        pool = self._pools[base]
        for rid in [rid for rid, replica in pool.taken.items() if not self._replicas.is_alive(replica)]:
            del pool.taken[rid]
            entry = self._samples[rid].entry
            entry = self._keep(replace(entry, attempts=entry.attempts + 1))
            if entry.attempts >= self._max_attempts:
                self._end(rid, Outcome(failure=worn_out(self._max_attempts)))
                continue
            self._futures.give_back(rid)
            pool.put_back(entry.tenant, rid, self._num_before(pool.queues[entry.tenant], rid))
            self._events.append(work_topic(base), pool_lane(base, entry.tenant))

    def settle(self, replica: str, entry: PoolEntry, outcome: Outcome) -> bool:
        """Write the outcome; False if the entry is not, or no longer, this replica's under that token."""
        sample = self._samples.get(entry.rid)
        if sample is None or sample.entry.token != entry.token or self._pools[sample.base].taken.get(entry.rid) != replica:
            return False
        del self._pools[sample.base].taken[entry.rid]
        self._end(entry.rid, outcome)
        return True

    def cancel(self, rid: str) -> None:
        """Drop a waiting entry."""
        self._withdraw([rid], cancelled())

    def close_session(self, tenant: str, session: str, failure: Failure) -> dict[str, str]:
        """Fail what waits and what runs; answers who ran what, by rid."""
        own = [rid for rid, sample in self._samples.items() if (sample.entry.tenant, self._futures.get(rid).session) == (tenant, session)]
        running = {rid: self._pools[self._samples[rid].base].taken.get(rid) for rid in own}
        self._withdraw(own, failure)
        return {rid: replica for rid, replica in running.items() if replica is not None}

    def bases(self) -> list[str]:
        return list(self._pools)

    def expire(self, base: str, submitted_before_ms: int, failure: Failure) -> int:
        """Fail the base model's entries that have waited since the time or longer; answers how many."""
        self.reclaim(base)
        waiting = [rid for queue in self._pools[base].queues.values() for rid in queue]
        old = [rid for rid in waiting if self._samples[rid].submitted_ms <= submitted_before_ms]
        self._withdraw(old, failure)
        return len(old)

    def queue_infos(self, base: str) -> list[QueueInfo]:
        """The base model's pools that have work."""
        if base not in self._pools:
            return []
        pool = self._pools[base]
        num_running = Counter(self._samples[rid].entry.tenant for rid in pool.taken)
        waiting = {tenant: pool.queues[tenant] for tenant in pool.waiting()}
        return [
            QueueInfo(
                lane=pool_lane(base, tenant),
                tenant=tenant,
                base=base,
                role=Role.SAMPLER,
                owner=None,
                num_pending=num_running[tenant] + len(waiting.get(tenant, ())),
                oldest_ms=self._samples[waiting[tenant][0]].submitted_ms if tenant in waiting else None,
            )
            for tenant in num_running.keys() | waiting.keys()
        ]

    def clear(self) -> None:
        self._pools.clear()
        self._samples.clear()

    def _start(self, pool: _Pool, entry: PoolEntry, replica: str) -> PoolEntry:
        self._futures.start(entry.rid)
        pool.taken[entry.rid] = replica
        return self._keep(replace(entry, token=entry.token + 1))

    def _withdraw(self, rids: Collection[str], failure: Failure) -> None:
        by_queue: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for rid in rids:
            sample = self._samples[rid]
            by_queue[sample.base, sample.entry.tenant].add(rid)
        for (base, tenant), dropped in by_queue.items():
            self._pools[base].drop(tenant, dropped)
        for rid in rids:
            self._end(rid, Outcome(failure=failure))

    def _end(self, rid: str, outcome: Outcome) -> None:
        self._futures.end(rid, outcome)
        self._futures.free_body(rid)
        self._feeds.tell(rid)
        del self._samples[rid]

    def _num_before(self, queue: Collection[str], rid: str) -> int:
        """How many of the queue arrived before the sample."""
        arrival = self._samples[rid].arrival
        return sum(self._samples[other].arrival < arrival for other in queue)

    def _keep(self, entry: PoolEntry) -> PoolEntry:
        self._samples[entry.rid] = replace(self._samples[entry.rid], entry=entry)
        return entry
