"""The memory store of a cluster: one actor that holds the store and the lanes, and the client side that every other process uses.

The actor knows nothing of HTTP or engines; it runs the named operation and answers its value, or, as a value too, the error of our own
tree that the operation raised (an exception would arrive wrapped by Ray, with a traceback formatted for each refusal). What the store
holds lives as long as the actor: it is never restarted, since a fresh one would answer as if nothing had ever been accepted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from tinsmith import telemetry
from tinsmith.config import ConfigError
from tinsmith.protocol.errors import StateContention, TinsmithError
from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State, Write
from tinsmith.state.feeds import FeedPage
from tinsmith.state.lanes import (
    Acquired,
    Fenced,
    LaneInfo,
    LaneLimits,
    Lanes,
    LeaseExpired,
    PoolEntry,
    PoolSubmission,
    QueueInfo,
    Replica,
    Settlement,
    Submission,
    Submitted,
    Swept,
    Taken,
    Wake,
)
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import Record, Store, StoreInfo

_OWN_ERRORS = (TinsmithError, Fenced, LeaseExpired, ConfigError)


class Part(StrEnum):
    """The two faces of the state; the operations of each are those of its protocol."""

    STORE = "store"
    LANES = "lanes"


_OPERATIONS: Mapping[Part, frozenset[str]] = {
    part: frozenset(name for name in vars(face) if not name.startswith("_")) for part, face in ((Part.STORE, Store), (Part.LANES, Lanes))
}


@dataclass(frozen=True, slots=True)
class Refused:
    """An operation that raised an error of our own tree."""

    error: Exception


class MemoryState:
    """What the actor runs. One thread, one loop: an operation that does not wait is atomic."""

    def __init__(self, limits: LaneLimits) -> None:
        store = MemoryStore()
        self._parts: Mapping[Part, object] = {Part.STORE: store, Part.LANES: MemoryLanes(store, limits)}

    async def call(self, part: Part, operation: str, *arguments: object, **options: object) -> object:
        """The operation's value, or Refused."""
        if operation not in _OPERATIONS[part]:
            raise ValueError(f"{part} has no operation {operation!r}")
        try:
            return await getattr(self._parts[part], operation)(*arguments, **options)
        except _OWN_ERRORS as error:
            return Refused(error)

    async def live(self) -> None:
        """Never returns: the call fails when the actor is gone, and so tells whoever started it."""
        await asyncio.Event().wait()


def start_memory_state(limits: LaneLimits) -> ActorHandle:
    """Start the actor; it dies with the process that called this."""
    return ray.remote(MemoryState).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote(limits)


class _Remote:
    """One part of the actor, called from a process of the cluster."""

    _part: Part

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def _call(self, operation: str, *arguments: object, **options: object) -> Any:
        telemetry.count(telemetry.STATE_CALLS, operation=operation)
        try:
            answer = await self._actor.call.remote(self._part, operation, *arguments, **options)
        except RayActorError as error:
            telemetry.count(telemetry.STORE_ERRORS)
            raise StateContention("the process that holds the memory store is gone, and the state with it; restart the server") from error
        if isinstance(answer, Refused):
            raise answer.error
        return answer


class RemoteStore(_Remote):
    """`Store` over the actor."""

    _part = Part.STORE

    async def open(self) -> StoreInfo:
        info: StoreInfo = await self._call("open")
        return info

    async def now_ms(self) -> int:
        now: int = await self._call("now_ms")
        return now

    async def get(self, table: str, id: str) -> Record | None:
        record: Record | None = await self._call("get", table, id)
        return record

    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        version: int = await self._call("put", table, id, value, expect=expect)
        return version

    async def delete(self, table: str, id: str) -> bool:
        existed: bool = await self._call("delete", table, id)
        return existed

    async def list(self, table: str) -> dict[str, Record]:
        records: dict[str, Record] = await self._call("list", table)
        return records

    async def lease(self, name: str, holder: str, ttl_ms: int) -> bool:
        is_held: bool = await self._call("lease", name, holder, ttl_ms)
        return is_held

    async def unlease(self, name: str, holder: str) -> None:
        await self._call("unlease", name, holder)

    async def reserve(self, quota: str, holder: str, *, limit: int, ttl_ms: int) -> bool:
        is_held: bool = await self._call("reserve", quota, holder, limit=limit, ttl_ms=ttl_ms)
        return is_held

    async def unreserve(self, quota: str, holder: str) -> None:
        await self._call("unreserve", quota, holder)

    async def spend(self, budget: str, amount: float, *, per_s: float, burst: float) -> int:
        wait_ms: int = await self._call("spend", budget, amount, per_s=per_s, burst=burst)
        return wait_ms

    async def close(self) -> None:
        """The handle is all that this process has; the data stay in the actor."""

    async def flush_all(self) -> None:
        await self._call("flush_all")


class RemoteLanes(_Remote):
    """`Lanes` over the actor. `wait` is the only call that may stay there for long, and a process has one at a time."""

    _part = Part.LANES

    def __init__(self, actor: ActorHandle, limits: LaneLimits) -> None:
        super().__init__(actor)
        self.limits = limits
        self._is_waiting = False

    async def submit(self, submission: Submission) -> Submitted:
        submitted: Submitted = await self._call("submit", submission)
        return submitted

    async def void(self, submission: Submission, failure: Failure) -> Submitted:
        submitted: Submitted = await self._call("void", submission, failure)
        return submitted

    async def acquire(self, lane: str, replica: str) -> Acquired | None:
        acquired: Acquired | None = await self._call("acquire", lane, replica)
        return acquired

    async def take(self, lane: str, replica: str, token: int, from_seq: int, max_commands: int, max_tokens: int) -> Taken:
        taken: Taken = await self._call("take", lane, replica, token, from_seq, max_commands, max_tokens)
        return taken

    async def settle(self, lane: str, replica: str, token: int, settlements: Sequence[Settlement]) -> frozenset[int]:
        settled: frozenset[int] = await self._call("settle", lane, replica, token, settlements)
        return settled

    async def commit_snapshot(self, lane: str, replica: str, token: int, seq: int, artifact: str) -> str | None:
        former: str | None = await self._call("commit_snapshot", lane, replica, token, seq, artifact)
        return former

    async def release(self, lane: str, replica: str, token: int) -> None:
        await self._call("release", lane, replica, token)

    async def close(self, tenant: str, lane: str, failure: Failure, writes: Sequence[Write] = (), *, seen: LaneInfo | None = None) -> bool:
        is_closed: bool = await self._call("close", tenant, lane, failure, writes, seen=seen)
        return is_closed

    async def close_session(self, tenant: str, session: str, failure: Failure) -> None:
        await self._call("close_session", tenant, session, failure)

    async def cancel(self, tenant: str, rid: str) -> State | None:
        state: State | None = await self._call("cancel", tenant, rid)
        return state

    async def pool_submit(self, submission: PoolSubmission) -> Submitted:
        submitted: Submitted = await self._call("pool_submit", submission)
        return submitted

    async def pool_take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        entries: list[PoolEntry] = await self._call("pool_take", base, replica, max_entries, max_tokens)
        return entries

    async def pool_settle(self, replica: str, settlements: Sequence[tuple[PoolEntry, Outcome]]) -> frozenset[str]:
        refused: frozenset[str] = await self._call("pool_settle", replica, settlements)
        return refused

    async def completions(self, tenant: str, feed: str, after: int, max_events: int) -> FeedPage:
        page: FeedPage = await self._call("completions", tenant, feed, after, max_events)
        return page

    async def acknowledge(self, tenant: str, feed: str, rids: Sequence[str]) -> None:
        await self._call("acknowledge", tenant, feed, rids)

    async def look(self, tenant: str, rid: str) -> FutureRecord | None:
        record: FutureRecord | None = await self._call("look", tenant, rid)
        return record

    async def requests(self, tenant: str, session: str, limit: int) -> list[FutureRecord]:
        records: list[FutureRecord] = await self._call("requests", tenant, session, limit)
        return records

    async def result(self, tenant: str, rid: str) -> bytes | None:
        result: bytes | None = await self._call("result", tenant, rid)
        return result

    async def bodies(self, commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
        bodies: list[bytes | None] = await self._call("bodies", commands)
        return bodies

    async def lane(self, lane: str) -> LaneInfo | None:
        info: LaneInfo | None = await self._call("lane", lane)
        return info

    async def renew(self, replica: Replica) -> list[str]:
        unowned: list[str] = await self._call("renew", replica)
        return unowned

    async def bury(self, replica: str) -> None:
        await self._call("bury", replica)

    async def replicas(self, base: str) -> list[Replica]:
        alive: list[Replica] = await self._call("replicas", base)
        return alive

    async def tail(self, topics: Sequence[str]) -> dict[str, int]:
        cursors: dict[str, int] = await self._call("tail", topics)
        return cursors

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        """Raises RuntimeError while another wait of this process runs: an actor holds 1,000 calls at once and no more."""
        if self._is_waiting:
            raise RuntimeError("a process has one reader of events; let its waiters share it")
        self._is_waiting = True
        try:
            wake: Wake = await self._call("wait", cursors, timeout_s)
        finally:
            self._is_waiting = False
        return wake

    async def post(self, topic: str, messages: Sequence[str]) -> None:
        await self._call("post", topic, messages)

    async def queues(self, base: str) -> list[QueueInfo]:
        infos: list[QueueInfo] = await self._call("queues", base)
        return infos

    async def sweep(self, *, stuck_ms: int, orphan_ms: int) -> Swept:
        swept: Swept = await self._call("sweep", stuck_ms=stuck_ms, orphan_ms=orphan_ms)
        return swept
