"""Lanes: the ordered log between "accepted" and "executed", and the only thing through which a gateway and a replica meet.

This module is the seam: the data that passes it and the operations of `Lanes`. `memory_lanes.py` and `redis_lanes.py` implement it
and run one contract suite. Every operation may be repeated with the same arguments and then answers the same, since a client library
resends after a lost reply on its own.

Terms. entry: one command in a lane. owner: the replica that may run a model lane. token: a number that grows with every change of
owner (fencing). cursor: lowest seq not yet handed out. floor (`durable`): highest seq contained in the model's durable snapshot.
barrier: an entry that is not a forward or forward_backward. Times are the store's clock, in ms since 1970 UTC.

Topics (append-only, capped, numbered from 1 in each):
    settled         request ids whose record became terminal, and names of feeds with a new end (`state.feeds`); every gateway process
                    reads it
    work:{base}     lanes of a base model that may have work and no owner, and its pools; replicas of the base model read it
    bell:{replica}  lanes of this replica with something new: a hint, never the truth
    inbox:{process} messages to one process (`Lanes.post`): orders of an operator, tokens of a stream; its reader alone acts on them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State, Write
from tinsmith.protocol.training import Kind
from tinsmith.protocol.wire_bounds import MIB
from tinsmith.state.feeds import FeedPage

SETTLED = "settled"
GATEWAYS = "*gateways"  # stands for the base model of gateways; no base model's name begins so
INBOX_KEPT_MS = 10 * 60 * 1000
_INBOX = "inbox:"
TOPIC_LENGTH = 65_536  # events kept a topic; a reader that fell further behind is told to resync


def work_topic(base: str) -> str:
    return f"work:{base}"


def bell_topic(replica: str) -> str:
    return f"bell:{replica}"


def inbox_topic(process: str) -> str:
    return f"{_INBOX}{process}"


def process_of(inbox: str) -> str:
    """Whose inbox the topic is. Raises ValueError for a topic that is none."""
    if not inbox.startswith(_INBOX):
        raise ValueError(f"topic {inbox!r} is no inbox; only inboxes are posted to")
    return inbox.removeprefix(_INBOX)


class Role(StrEnum):
    """What a process with a lease does."""

    TRAINER = "trainer"
    SAMPLER = "sampler"
    GATEWAY = "gateway"


class Fenced(Exception):
    """Another replica owns the lane now, or it is closed: drop the adapter's memory, publish nothing, forget the lane."""


class LeaseExpired(Exception):
    """Still the owner, but the own lease has lapsed: renew, then ask again. Nobody has taken the lane."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Bounds of the lane protocol, filled from the configuration."""

    lease_ms: int = 10_000
    hole_grace_ms: int = 120_000
    max_attempts: int = 3
    max_pending: int = 20_000
    max_tenant_bytes: int = 1024 * MIB
    result_kept_ms: int = 10 * 60 * 1000  # after its first fetch
    record_kept_ms: int = 24 * 3600 * 1000  # after it settled
    inbox_kept_ms: int = INBOX_KEPT_MS


@dataclass(frozen=True, slots=True)
class Submission:
    """One command for a model lane. seq 0 creates the lane. `writes` become visible with it, in the same step. `trace`: the W3C
    traceparent of the request, empty where nothing is traced; no part of the command."""

    tenant: str
    session: str
    lane: str
    base: str
    seq: int
    kind: Kind
    rid: str
    digest: str
    body: bytes
    tokens: int
    writes: tuple[Write, ...] = ()
    trace: str = ""


@dataclass(frozen=True, slots=True)
class PoolSubmission:
    """One sample for the pool lane of (base, tenant). `key` is its natural key: (sampling session, seq id) as text. `reply_to`: the topic
    that tokens are posted to while they are drawn, empty where nobody watches; like `trace` it is no part of the command. `feed`: the
    completion feed that its end is told in, empty for none. `max_waiting`: how many samples of the tenant may wait for the base model,
    where that is less than the lanes allow."""

    tenant: str
    session: str
    base: str
    key: str
    rid: str
    digest: str
    body: bytes
    tokens: int
    trace: str = ""
    reply_to: str = ""
    feed: str = ""
    max_waiting: int | None = None


def most_waiting(submission: PoolSubmission, limits: LaneLimits) -> int:
    """How many samples of the tenant may wait before this one is refused."""
    return limits.max_pending if submission.max_waiting is None else min(submission.max_waiting, limits.max_pending)


@dataclass(frozen=True, slots=True)
class Submitted:
    """`state` is that of the record; `is_fresh` is False where this was a repeat."""

    rid: str
    state: State
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Entry:
    rid: str
    seq: int
    kind: Kind
    digest: str
    size: int
    tokens: int
    state: State
    attempts: int
    artifact: str | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """What anyone may know of a lane."""

    lane: str
    tenant: str
    session: str
    base: str
    is_open: bool
    owner: str | None
    token: int
    durable: int  # -1: no snapshot yet
    snapshot: str | None
    num_pending: int
    held_bytes: int
    last_seq: int  # highest seq submitted


@dataclass(frozen=True, slots=True)
class Acquired:
    """`replay`: completed entries above the floor, in order, and in their places the saves that were being published."""

    info: LaneInfo
    token: int
    cursor: int
    replay: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """`entries` are now running under the caller's token. wait_ms: rest of the hole's grace, None where nothing is missing."""

    entries: tuple[Entry, ...]
    cursor: int
    wait_ms: int | None
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Settlement:
    seq: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One sample under this replica's lease; `token` is the entry's own and grows with every take."""

    rid: str
    tenant: str
    digest: str
    size: int
    tokens: int
    token: int
    attempts: int
    trace: str = ""
    reply_to: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """A live process with a lease: a worker of a base model, or a gateway (`base` GATEWAYS). `node`, `pid`, `started` identify the process,
    so a peer can see that it is gone. What may change with each renewal: `is_healthy`, `is_draining`, and how many of its slots are in
    use (adapters of a trainer, sequences of a sampler, requests of a gateway, whose slots are not bounded: 0)."""

    id: str
    base: str
    node: str
    pid: int
    started: str
    role: Role = Role.TRAINER
    is_healthy: bool = True
    is_draining: bool = False
    num_used: int = 0
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A lane with work: a model lane, or the pool lane of a tenant (`state.futures.pool_lane`). `oldest_ms`: when the pending entry at its
    head was submitted, None where all of its work runs. `owner` None for a pool, and for a model that waits for a trainer."""

    lane: str
    tenant: str
    base: str
    role: Role  # of the replicas that serve it
    owner: str | None
    num_pending: int  # running entries included
    oldest_ms: int | None


@dataclass(frozen=True, slots=True)
class Wake:
    """Events after the cursors, by topic, and the cursors to go on from. resync: topics that were trimmed, or a new epoch: look at
    every record that is waited for. An empty wake is a time-out."""

    events: Mapping[str, Sequence[str]]
    cursors: Mapping[str, int]
    resync: frozenset[str]


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep of the janitor freed."""

    num_results: int
    num_records: int
    num_stuck: int
    num_orphaned: int = 0


class Lanes(Protocol):
    """The lane operations. A store that is away raises StateContention from any of them."""

    limits: LaneLimits

    async def submit(self, submission: Submission) -> Submitted:
        """Append a command, once. Refuses, with nothing written: NotFound (no such lane), SessionEnded (closed), QuotaExceeded (pending
        or byte budget), RequestRejected (the seq was used with another digest). A seq below the cursor that never came answers a record
        that failed at birth (request_rejected, "its turn was given up")."""
        ...

    async def void(self, submission: Submission, failure: Failure) -> Submitted:
        """A refusal of a Tinker training request whose seq was readable: a record born failed and a void entry; the body is ignored."""
        ...

    async def acquire(self, lane: str, replica: str) -> Acquired | None:
        """Become or remain the owner; None if the lane is closed, unknown or has a living owner. Raises LeaseExpired if the
        caller's own replica key is gone."""
        ...

    async def take(self, lane: str, replica: str, token: int, from_seq: int, max_commands: int, max_tokens: int) -> Taken:
        """Hand out consecutive entries from `from_seq`, at least one where one is there. Raises Fenced, LeaseExpired."""
        ...

    async def settle(self, lane: str, replica: str, token: int, settlements: Sequence[Settlement]) -> frozenset[int]:
        """Write outcomes; answers the seqs that this token had already settled or that another end (cancel, close) came first to.
        Writes of an outcome become visible only with a fresh settle. Raises Fenced with nothing written."""
        ...

    async def commit_snapshot(self, lane: str, replica: str, token: int, seq: int, artifact: str) -> str | None:
        """Raise the floor to `seq` and trim the log up to it; answers the former snapshot's artifact, to be deleted afterwards.
        Raises Fenced; StateContention if an entry <= seq is not terminal."""
        ...

    async def release(self, lane: str, replica: str, token: int) -> None:
        """Owner := none; running entries go back to pending. Raises Fenced."""
        ...

    async def close(self, tenant: str, lane: str, failure: Failure, writes: Sequence[Write] = (), *, seen: LaneInfo | None = None) -> bool:
        """Fail every pending or running entry, fence the owner, delete the bodies and the log. Idempotent; unknown lanes are ignored.

        False, with nothing done, where an open lane has another snapshot than the one `seen`, of which the writes speak. The lane is
        closed and its owner fenced in one step, with the writes; its entries fail soon after, of a caller that dies meanwhile by the next
        sweep.
        """
        ...

    async def close_session(self, tenant: str, session: str, failure: Failure) -> None:
        """Refuse further samples of the session, fail those that are pending or running, and free their results; who runs one finds a
        `SampleAbort` in its inbox. Idempotent. Its model lanes are closed one by one."""
        ...

    async def cancel(self, tenant: str, rid: str) -> State | None:
        """pending -> cancelled; any other state is answered unchanged; None for an unknown or foreign id."""
        ...

    async def pool_submit(self, submission: PoolSubmission) -> Submitted:
        """Append a sample, once. Refuses, with nothing written: SessionEnded, QuotaExceeded (pending or byte budget), RequestRejected (the
        key was used with another digest)."""
        ...

    async def pool_take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        """Entries of the base model's pools, tenants by deficit round robin over tokens, arrival order within one. Reclaims those of
        dead replicas first. Raises LeaseExpired."""
        ...

    async def pool_settle(self, replica: str, settlements: Sequence[tuple[PoolEntry, Outcome]]) -> frozenset[str]:
        """Write outcomes; answers the rids whose outcome was not taken (token outdated, or already terminal)."""
        ...

    async def completions(self, tenant: str, feed: str, after: int, max_events: int) -> FeedPage:
        """What ended in the feed after the cursor `after`, `max_events` at most; what came up to it is trimmed. 0 is before everything,
        and so is a cursor that this store never gave out: one from before it was emptied."""
        ...

    async def acknowledge(self, tenant: str, feed: str, rids: Sequence[str]) -> None:
        """Their caller has the results of these samples of the feed: they are freed. Ids of others are passed over. Idempotent."""
        ...

    async def look(self, tenant: str, rid: str) -> FutureRecord | None:
        """The record; None for an unknown or foreign id."""
        ...

    async def requests(self, tenant: str, session: str, limit: int) -> list[FutureRecord]:
        """The records of a session that are still kept, newest first, at most `limit`; none for an unknown or foreign session."""
        ...

    async def result(self, tenant: str, rid: str) -> bytes | None:
        """The stored result; the first call starts its retention clock. None if there is none (any more)."""
        ...

    async def bodies(self, commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Encoded commands of (rid, digest) pairs."""
        ...

    async def lane(self, lane: str) -> LaneInfo | None: ...

    async def renew(self, replica: Replica) -> list[str]:
        """Extend the replica's lease and pass on the lanes of peers whose lease has run out; answers the base model's lanes that have
        work and no owner, oldest first."""
        ...

    async def bury(self, replica: str) -> None:
        """Drop a replica's key at once: its process is known to be gone."""
        ...

    async def replicas(self, base: str) -> list[Replica]:
        """Replicas whose lease runs."""
        ...

    async def tail(self, topics: Sequence[str]) -> dict[str, int]:
        """Cursors that stand after the newest event of each topic."""
        ...

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        """Events after the cursors, or block up to timeout_s. One blocking reader a process."""
        ...

    async def post(self, topic: str, messages: Sequence[str]) -> None:
        """Append messages to a process's inbox. A resend after a lost reply may append them twice, so each tells what it is about and where
        in it; nothing of an inbox is kept for longer than `INBOX_KEPT_MS` without a new message."""
        ...

    async def queues(self, base: str) -> list[QueueInfo]:
        """The lanes of a base model that have work, for those who watch; no bound of it is exact while work comes and goes."""
        ...

    async def sweep(self, *, stuck_ms: int, orphan_ms: int) -> Swept:
        """Free results and records past their retention; fail the first pending entry of a lane with a live owner that has
        nothing running and has settled nothing for `stuck_ms` (deadline_exceeded); pool entries by their submit time. Fail what waits for
        a role of which no replica of that base model has lived for `orphan_ms` (orphaned_replica); time before this store heard of the
        work counts as life."""
        ...
