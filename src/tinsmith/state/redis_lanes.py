"""Lanes in Redis: each operation of `lanes.Lanes` is one script under `lua/` and one round trip.

Bodies and results travel by plain SET with an expiry in front of their script, which lifts it: a script copies its arguments while
everybody waits. Encoding is `redis_codec.py`'s; the rules are the scripts'.
"""

import asyncio
import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State, Write
from tinsmith.protocol.training import Kind
from tinsmith.state.feeds import FeedPage
from tinsmith.state.futures import cancelled, given_up, orphaned, pool_lane, record_from_fields, stuck, worn_out
from tinsmith.state.inbox import SampleAbort, encode
from tinsmith.state.lanes import (
    Acquired,
    LaneInfo,
    LaneLimits,
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
    most_waiting,
    process_of,
)
from tinsmith.state.redis_codec import (
    UNCLAIMED_MS,
    check_owner,
    entry_of,
    event_id,
    feed_page,
    flags_of,
    lane_info,
    lease_expired,
    optional_text,
    pool_entry,
    queue_infos,
    refusal,
    replica_of,
    replica_text,
    size_and_failure,
    staged_result,
    writes_of,
)
from tinsmith.state.redis_link import Command, Reply, Value
from tinsmith.state.redis_store import RedisStore

_NUM_TRIES = 2  # of a write whose body or result expired before its script came
_NUM_EVENTS = 1000  # a topic and answer
# So many a script, so that nobody waits long behind it: to fail a command takes about 0.1 ms.
_CLOSE_SLICE = 250  # commands of a lane
_SESSION_SLICE = 100  # samples and results of a session
_ACKNOWLEDGE_SLICE = 250  # results of a feed
_SWEEP_BATCH = 250  # results, records, commands
_READ_SLICE = 512  # records of one round trip
_PEER_KEPT_LEASES = 60  # how long a dead replica's bell is kept for it, in leases
_MAX_EPOCH = 2**64 - 1


class RedisLanes:
    """Implements `lanes.Lanes`. Any number of handles, in any process, work on the same lanes."""

    def __init__(self, store: RedisStore, limits: LaneLimits) -> None:
        self.limits = limits
        self._store = store
        self._worn_out = worn_out(limits.max_attempts).model_dump_json()
        self._read_epoch: str | None = None  # of the cursors that `tail` gave out last
        self._pool_calls: defaultdict[tuple[str, str], _PoolCall] = defaultdict(_PoolCall)

    # Submitting

    async def submit(self, submission: Submission) -> Submitted:
        limits = self.limits
        reply = await self._submit(
            "submit",
            submission,
            *(submission.lane, submission.tenant, submission.session, submission.base, submission.seq),
            *(submission.kind, flags_of(submission.kind), submission.rid, submission.digest, len(submission.body), submission.tokens),
            *(limits.max_pending, limits.max_tenant_bytes, given_up(submission.seq).model_dump_json(), submission.trace),
            *writes_of(submission.writes),
        )
        return self._submitted(reply, submission)

    async def void(self, submission: Submission, failure: Failure) -> Submitted:
        (reply,) = await self._store.run(
            "void",
            *(submission.lane, submission.tenant, submission.session, submission.seq, submission.kind, flags_of(submission.kind)),
            *(submission.rid, submission.digest, failure.model_dump_json()),
        )
        return self._submitted(reply, submission)

    async def _submit(self, script: str, submission: Submission | PoolSubmission, *args: Value) -> Reply:
        """The script with the body in front. NX: a repeat must not put an expiry on a body that is held already."""
        body = f"body:{submission.rid}:{submission.digest}"
        for _ in range(_NUM_TRIES):
            (reply,) = await self._store.run(script, *args, before=(("SET", body, submission.body, "PX", UNCLAIMED_MS, "NX"),))
            if reply[0] != b"body":
                return reply
        raise StateContention("the store lost the command on its way; submit it again")

    def _submitted(self, reply: Reply, submission: Submission | PoolSubmission) -> Submitted:
        if reply[0] != b"ok":
            raise refusal(reply[0].decode(), submission, self.limits)
        return Submitted(submission.rid, State(reply[1].decode()), is_fresh=bool(reply[2]))

    # Owning

    async def acquire(self, lane: str, replica: str) -> Acquired | None:
        """None, too, for a lane of another within a lease of the store's return to this process: a pause of the store is no death."""
        may_depose = self._store.link.steady_s * 1000 > self.limits.lease_ms
        args = ("1" if may_depose else "", self.limits.max_attempts, self._worn_out)
        (reply,) = await self._store.run("acquire", lane, replica, *args)
        if reply[0] == b"none":
            return None
        check_owner(reply, lane, replica)
        _, cursor, replay, flat = reply
        info = lane_info(lane, dict(zip(flat[::2], flat[1::2], strict=True)))
        return Acquired(info, info.token, cursor, tuple(map(entry_of, replay)))

    async def take(self, lane: str, replica: str, token: int, from_seq: int, max_commands: int, max_tokens: int) -> Taken:
        bounds = (from_seq, max_commands, max_tokens, self.limits.hole_grace_ms)
        (reply,) = await self._store.run("take", lane, replica, token, *bounds)
        check_owner(reply, lane, replica)
        _, cursor, wait_ms, held_bytes, rows = reply
        return Taken(tuple(map(entry_of, rows)), cursor, None if wait_ms < 0 else wait_ms, held_bytes)

    async def settle(self, lane: str, replica: str, token: int, settlements: Sequence[Settlement]) -> frozenset[int]:
        args: list[Value] = [lane, replica, token, len(settlements)]
        results: list[Command] = []
        for settlement in settlements:
            outcome = settlement.outcome
            results += staged_result(f"{lane}|{token}|{settlement.seq}", outcome)
            args += [settlement.seq, outcome.state, *size_and_failure(outcome), outcome.artifact or "", *writes_of(outcome.writes)]
        reply = await self._settle("settle", args, results)
        check_owner(reply, lane, replica)
        return frozenset(reply[1])

    async def _settle(self, script: str, args: Sequence[Value], results: Sequence[Command]) -> Reply:
        for _ in range(_NUM_TRIES):
            (reply,) = await self._store.run(script, *args, before=results)
            if reply[0] != b"result":
                return reply
        raise StateContention("the store lost a result on its way; settle again")

    async def commit_snapshot(self, lane: str, replica: str, token: int, seq: int, artifact: str) -> str | None:
        (reply,) = await self._store.run("commit_snapshot", lane, replica, token, seq, artifact)
        if reply[0] == b"early":
            raise StateContention(f"model {lane} cannot be cut at seq {seq} now: a command up to it is not settled")
        check_owner(reply, lane, replica)
        return optional_text(reply[1])

    async def release(self, lane: str, replica: str, token: int) -> None:
        (reply,) = await self._store.run("release", lane, replica, token)
        check_owner(reply, lane, replica)

    # Ending

    async def close(self, tenant: str, lane: str, failure: Failure, writes: Sequence[Write] = (), *, seen: LaneInfo | None = None) -> bool:
        expected = ("", "") if seen is None else ("1", seen.snapshot or "")
        args = (tenant, lane, failure.model_dump_json(), self.limits.record_kept_ms, _CLOSE_SLICE, *expected, *writes_of(writes))
        while True:
            (reply,) = await self._store.run("close", *args)
            if reply[0] == b"seen":
                return False
            if reply[1]:
                return True

    async def close_session(self, tenant: str, session: str, failure: Failure) -> None:
        limits = self.limits
        args = (failure.model_dump_json(), limits.record_kept_ms, _SESSION_SLICE, limits.inbox_kept_ms, encode(SampleAbort(rid="%s")))
        is_done = False
        while not is_done:
            [[_, is_done]] = await self._store.run("close_session", tenant, session, *args)

    async def cancel(self, tenant: str, rid: str) -> State | None:
        (reply,) = await self._store.run("cancel", tenant, rid, cancelled().model_dump_json())
        state = optional_text(reply[0])
        return None if state is None else State(state)

    # Pools

    async def pool_submit(self, submission: PoolSubmission) -> Submitted:
        limits = self.limits
        reply = await self._submit(
            "pool_submit",
            submission,
            *(submission.base, submission.tenant, submission.session, pool_lane(submission.base, submission.tenant), submission.key),
            *(Kind.SAMPLE, submission.rid, submission.digest, len(submission.body), submission.tokens),
            *(most_waiting(submission, limits), limits.max_tenant_bytes, submission.trace, submission.reply_to, submission.feed),
        )
        return self._submitted(reply, submission)

    async def pool_take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        call = self._pool_calls[base, replica]
        async with call.lock:
            bounds = (max_entries, max_tokens, call.id, self.limits.max_attempts, self._worn_out)
            (reply,) = await self._store.run("pool_take", base, replica, *bounds)
            call.answered()
        if reply[0] == b"expired":
            raise lease_expired(replica)
        return [pool_entry(row) for row in reply[1]]

    async def pool_settle(self, replica: str, settlements: Sequence[tuple[PoolEntry, Outcome]]) -> frozenset[str]:
        args: list[Value] = [replica, len(settlements)]
        results: list[Command] = []
        for entry, outcome in settlements:
            results += staged_result(f"{entry.rid}|{entry.token}", outcome)
            args += [entry.rid, entry.token, outcome.state, *size_and_failure(outcome), *writes_of(outcome.writes)]
        reply = await self._settle("pool_settle", args, results)
        return frozenset(rid.decode() for rid in reply[1])

    async def completions(self, tenant: str, feed: str, after: int, max_events: int) -> FeedPage:
        [[cursor, rows]] = await self._store.run("completions", tenant, feed, after, max_events)
        return feed_page(cursor, rows)

    async def acknowledge(self, tenant: str, feed: str, rids: Sequence[str]) -> None:
        for start in range(0, len(rids), _ACKNOWLEDGE_SLICE):
            await self._store.run("acknowledge", tenant, feed, *rids[start : start + _ACKNOWLEDGE_SLICE])

    # Reading

    async def look(self, tenant: str, rid: str) -> FutureRecord | None:
        held: dict[bytes, bytes] = await self._store.link.command("HGETALL", f"fut:{rid}")
        return _record_of(tenant, held)

    async def requests(self, tenant: str, session: str, limit: int) -> list[FutureRecord]:
        """Read in slices, so that a long session holds nobody up for long."""
        rids: list[bytes] = await self._store.link.command("ZREVRANGE", f"requests:{tenant}|{session}", 0, limit - 1)
        records: list[FutureRecord | None] = []
        for start in range(0, len(rids), _READ_SLICE):
            commands = [("HGETALL", b"fut:" + rid) for rid in rids[start : start + _READ_SLICE]]
            records += [_record_of(tenant, held) for held in await self._store.link.batch(commands)]
        return [record for record in records if record is not None]  # one may go meanwhile

    async def result(self, tenant: str, rid: str) -> bytes | None:
        may_read, result = await self._store.run("fetch", tenant, rid, after=(("GET", f"res:{rid}"),))
        return result if may_read else None

    async def bodies(self, commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
        if not commands:
            return []
        held: list[bytes | None] = await self._store.link.command("MGET", *(f"body:{rid}:{digest}" for rid, digest in commands))
        return held

    async def lane(self, lane: str) -> LaneInfo | None:
        held: dict[bytes, bytes] = await self._store.link.command("HGETALL", f"lane:{lane}")
        return lane_info(lane, held) if held else None

    # Replicas

    async def renew(self, replica: Replica) -> list[str]:
        args = (self.limits.lease_ms, self.limits.max_attempts, self._worn_out)
        (lanes,) = await self._store.run("renew", replica.id, replica.base, replica.role, replica_text(replica), *args)
        return [lane.decode() for lane in lanes]

    async def bury(self, replica: str) -> None:
        await self._store.run("bury", replica, self.limits.max_attempts, self._worn_out)

    async def replicas(self, base: str) -> list[Replica]:
        (descriptions,) = await self._store.run("replicas", base)
        return [replica_of(description) for description in descriptions]

    # Waiting

    async def tail(self, topics: Sequence[str]) -> dict[str, int]:
        self._read_epoch = (await self._store.info()).epoch
        numbers = await self._store.link.command("HMGET", "topics", *topics) if topics else []
        return {topic: int(number or 0) for topic, number in zip(topics, numbers, strict=True)}

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        """An id is "<number>-<epoch>", so both a gap and an emptied store show in the first event that is read."""
        streams = [f"topic:{topic}" for topic in cursors]
        after = [f"{cursor}-{_MAX_EPOCH}" for cursor in cursors.values()]
        block = ("BLOCK", math.ceil(timeout_s * 1000)) if timeout_s > 0 else ()  # 0 would block for ever
        read = await self._store.link.block(timeout_s, "XREAD", "COUNT", _NUM_EVENTS, *block, "STREAMS", *streams, *after)
        if not read:
            return await self._quiet(cursors)
        events, numbers, resync = {}, dict(cursors), set()
        epoch = int(await self._epoch_of_cursors(), 16)
        for stream, entries in read:
            topic = stream.decode().removeprefix("topic:")
            first, first_epoch = event_id(entries[0][0])
            if first_epoch != epoch:
                return await self._resync_all(cursors)
            if first != cursors[topic] + 1:
                resync.add(topic)
            events[topic] = [fields[b"p"].decode() for _, fields in entries]
            numbers[topic] = event_id(entries[-1][0])[0]
        return Wake(events, numbers, frozenset(resync))

    async def _quiet(self, cursors: Mapping[str, int]) -> Wake:
        """Nothing came: an empty wake, unless the store was emptied."""
        epoch = await self._epoch_of_cursors()
        numbers = await self.tail(list(cursors))
        if self._read_epoch != epoch or await self._store.is_emptied() or any(numbers[topic] < cursor for topic, cursor in cursors.items()):
            return Wake({}, numbers, frozenset(cursors))
        return Wake({}, dict(cursors), frozenset())

    async def _epoch_of_cursors(self) -> str:
        """The store may have been opened anew since they were given out."""
        return (await self._store.info()).epoch if self._read_epoch is None else self._read_epoch

    async def _resync_all(self, cursors: Mapping[str, int]) -> Wake:
        return Wake({}, await self.tail(list(cursors)), frozenset(cursors))

    async def post(self, topic: str, messages: Sequence[str]) -> None:
        process_of(topic)
        if messages:
            await self._store.run("post", topic, self.limits.inbox_kept_ms, len(messages), *messages)

    # Watching and sweeping

    async def queues(self, base: str) -> list[QueueInfo]:
        [[lanes, pools]] = await self._store.run("queues", base)
        return queue_infos(base, lanes, pools)

    async def sweep(self, *, stuck_ms: int, orphan_ms: int) -> Swept:
        limits = self.limits
        kept = (limits.result_kept_ms, limits.record_kept_ms, limits.lease_ms * _PEER_KEPT_LEASES, limits.inbox_kept_ms)
        nobody = [orphaned(role, orphan_ms).model_dump_json() for role in (Role.TRAINER, Role.SAMPLER)]
        failures: list[Value] = [stuck_ms, stuck(stuck_ms).model_dump_json(), orphan_ms, *nobody, limits.max_attempts, self._worn_out]
        total = Swept(0, 0, 0)
        while True:
            [[num_results, num_records, num_stuck, num_orphaned, is_done]] = await self._store.run("sweep", _SWEEP_BATCH, *kept, *failures)
            total = Swept(
                total.num_results + num_results,
                total.num_records + num_records,
                total.num_stuck + num_stuck,
                total.num_orphaned + num_orphaned,
            )
            if is_done:
                return total


def _record_of(tenant: str, held: Mapping[bytes, bytes]) -> FutureRecord | None:
    """None where there is none, or another tenant's."""
    if held.get(b"tenant") != tenant.encode():
        return None
    return record_from_fields({name.decode(): value.decode() for name, value in held.items()})


class _PoolCall:
    """Identifies a take until its answer has arrived: a take whose answer was lost is asked again and gets the same samples."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.id = secrets.token_hex(8)

    def answered(self) -> None:
        self.id = secrets.token_hex(8)
