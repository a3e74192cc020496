"""What travels to the lane scripts under `lua/` and back, as text and as our types. Pure functions; knows no connection."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from tinsmith.protocol.errors import NotFound, QuotaExceeded, RequestRejected, SessionEnded, TinsmithError
from tinsmith.protocol.futures import Outcome, State, Tally, Write
from tinsmith.protocol.training import Kind
from tinsmith.state.feeds import Completion, FeedPage
from tinsmith.state.futures import pool_lane
from tinsmith.state.lanes import (
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
    Submission,
    most_waiting,
)
from tinsmith.state.redis_link import Command, Reply, Value

UNCLAIMED_MS = 10 * 60 * 1000  # a body or result that no script has picked up is gone after this
_REPLICA: TypeAdapter[Replica] = TypeAdapter(Replica)


def refusal(why: str, submission: Submission | PoolSubmission, limits: LaneLimits) -> TinsmithError:
    """The error that a refusal of `submit`, `void` or `pool_submit` stands for."""
    if isinstance(submission, PoolSubmission):
        work, lane, seq, most = "samples", submission.base, submission.key, most_waiting(submission, limits)
    else:
        work, lane, seq, most = "commands", submission.lane, str(submission.seq), limits.max_pending
    held = limits.max_tenant_bytes
    refusals: dict[str, TinsmithError] = {
        "unknown": NotFound(f"model {lane!r} is unknown; create one"),
        "closed": SessionEnded(f"model {lane} is closed; create a new one"),
        "ended": SessionEnded(f"session {submission.session} has ended; create a new one"),
        "digest": RequestRejected(f"seq_id {seq} was already used with different content; send new content under a new seq_id"),
        "pending": QuotaExceeded(f"{most} {work} are waiting already; wait for some of them before sending more"),
        "bytes": QuotaExceeded(f"commands and results over {held} bytes are held; fetch results or wait, then retry"),
    }
    return refusals[why]


def flags_of(kind: Kind) -> str:
    """What the scripts need to know of a kind: b barrier, r replayed, s save."""
    return "b" * kind.is_barrier + "r" * kind.is_replayed + "s" * kind.is_save


def writes_of(writes: Sequence[Write | Tally]) -> Iterable[Value]:
    yield len(writes)
    for write in writes:
        if isinstance(write, Tally):
            yield from (write.table, write.id, "+", write.amount)
        else:
            yield from (write.table, write.id, "" if write.value is None else "1", write.value or b"")


def staged_result(key: str, outcome: Outcome) -> list[Command]:
    if outcome.result is None:
        return []
    return [("SET", f"res:new:{key}", outcome.result, "PX", UNCLAIMED_MS)]


def size_and_failure(outcome: Outcome) -> tuple[int, str]:
    size = -1 if outcome.result is None else len(outcome.result)
    return size, "" if outcome.failure is None else outcome.failure.model_dump_json()


def check_owner(reply: Reply, lane: str, replica: str) -> None:
    if reply[0] == b"fenced":
        raise Fenced(f"model {lane} has another owner or is closed")
    if reply[0] == b"expired":
        raise lease_expired(replica)


def lease_expired(replica: str) -> LeaseExpired:
    return LeaseExpired(f"replica {replica} has no lease; renew, then ask again")


def entry_of(row: Sequence[bytes | int]) -> Entry:
    parts = (part.decode() if isinstance(part, bytes) else part for part in row)
    rid, seq, kind, digest, size, tokens, state, attempts, artifact, trace = parts
    return Entry(
        rid=str(rid),
        seq=int(seq),
        kind=Kind(str(kind)),
        digest=str(digest),
        size=int(size),
        tokens=int(tokens),
        state=State(str(state)),
        attempts=int(attempts),
        artifact=str(artifact) or None,
        trace=str(trace),
    )


def pool_entry(row: Sequence[bytes | int]) -> PoolEntry:
    parts = (part.decode() if isinstance(part, bytes) else part for part in row)
    rid, tenant, digest, size, tokens, token, attempts, trace, reply_to, session = parts
    return PoolEntry(
        rid=str(rid),
        tenant=str(tenant),
        digest=str(digest),
        size=int(size),
        tokens=int(tokens),
        token=int(token),
        attempts=int(attempts),
        trace=str(trace),
        reply_to=str(reply_to),
        session=str(session),
    )


def queue_infos(base: str, lanes: Iterable[Sequence[Any]], pools: Iterable[Sequence[Any]]) -> list[QueueInfo]:
    """Rows of the script `queues`."""
    infos = [
        QueueInfo(lane.decode(), tenant.decode(), base, Role.TRAINER, optional_text(owner), num_pending, _oldest(oldest_ms))
        for lane, tenant, owner, num_pending, oldest_ms in lanes
    ]
    for name, num_pending, oldest_ms in pools:
        tenant = name.decode()
        infos.append(QueueInfo(pool_lane(base, tenant), tenant, base, Role.SAMPLER, None, num_pending, _oldest(oldest_ms)))
    return sorted(infos, key=lambda info: info.lane)


def feed_page(cursor: bytes, rows: Iterable[Sequence[Any]]) -> FeedPage:
    """The answer of the script `completions`."""
    return FeedPage(tuple(Completion(rid.decode(), None if size < 0 else size) for rid, size in rows), int(cursor))


def replica_text(replica: Replica) -> str:
    return _REPLICA.dump_json(replica).decode()


def replica_of(description: bytes) -> Replica:
    """What an older writer did not know reads as the default, what a newer one adds is ignored."""
    return _REPLICA.validate_json(description)


def lane_info(lane: str, held: Mapping[bytes, bytes]) -> LaneInfo:
    return LaneInfo(
        lane=lane,
        tenant=held[b"tenant"].decode(),
        session=held[b"session"].decode(),
        base=held[b"base"].decode(),
        is_open=held[b"state"] == b"open",
        owner=optional_text(held[b"owner"]),
        token=int(held[b"token"]),
        durable=int(held[b"durable"]),
        snapshot=optional_text(held[b"snapshot"]),
        num_pending=int(held[b"pending"]),
        held_bytes=int(held[b"held_bytes"]),
        last_seq=int(held[b"high"]),
    )


def optional_text(held: bytes) -> str | None:
    return held.decode() or None


def event_id(id: bytes) -> tuple[int, int]:
    number, _, epoch = id.partition(b"-")
    return int(number), int(epoch)


def _oldest(submitted_ms: int) -> int | None:
    return None if submitted_ms < 0 else submitted_ms
