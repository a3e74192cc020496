"""The actor's two sides, without Ray: the handle here calls the object in this process."""

import asyncio
import inspect

import pytest
from ray.exceptions import RayActorError

from tests.fakes.local_actor import LocalHandle
from tinsmith import telemetry
from tinsmith.deployments.memory_state import MemoryState, Part, Refused, RemoteLanes, RemoteStore, _Remote
from tinsmith.protocol.errors import Category, NotFound, ReasonCode, SessionEnded, StateContention
from tinsmith.protocol.futures import Failure, Outcome, State, Write
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import (
    SETTLED,
    Fenced,
    LaneLimits,
    Lanes,
    LeaseExpired,
    PoolSubmission,
    Replica,
    Settlement,
    Submission,
    bell_topic,
    inbox_topic,
)
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.store import Store

REPLICA = Replica("r1", "base", "node", 1, "0")
TENANT = "local"
LANE = "s:train:0"


class DeadMethod:
    def remote(self, *_: object, **__: object) -> "asyncio.Future[object]":
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(RayActorError())
        return future


class DeadHandle:
    call = DeadMethod()


@pytest.fixture
def actor() -> MemoryState:
    return MemoryState(LaneLimits())


@pytest.fixture
def store(actor: MemoryState) -> RemoteStore:
    return RemoteStore(LocalHandle(actor))


@pytest.fixture
def lanes(actor: MemoryState) -> RemoteLanes:
    return RemoteLanes(LocalHandle(actor), LaneLimits())


def submission(seq: int, *, rid: str | None = None) -> Submission:
    kind = Kind.CREATE_MODEL if seq == 0 else Kind.OPTIM_STEP
    return Submission(TENANT, "s", LANE, "base", seq, kind, rid or f"t{seq}", f"digest{seq}", b"body", 1)


FAILURE = Failure(reason=ReasonCode.SESSION_ENDED, message="ended", category=Category.USER)


@pytest.mark.parametrize(("remote", "face"), [(RemoteStore, Store), (RemoteLanes, Lanes)])
def test_the_client_side_has_the_operations_of_the_protocol(remote: type[_Remote], face: type) -> None:
    for name, method in vars(face).items():
        if not name.startswith("_"):
            assert inspect.signature(getattr(remote, name)) == inspect.signature(method), name


async def test_records_go_through(store: RemoteStore) -> None:
    info = await store.open()
    assert await store.open() == info
    assert await store.now_ms() > 0
    assert await store.put("local/x", "a", b"1") == 1
    assert await store.put("local/x", "a", b"2", expect=1) == 2
    record = await store.get("local/x", "a")
    assert record is not None
    assert (record.value, record.version) == (b"2", 2)
    assert set(await store.list("local/x")) == {"a"}
    assert await store.delete("local/x", "a")
    assert await store.lease("leader", "me", 1000)
    assert not await store.lease("leader", "you", 1000)
    await store.unlease("leader", "me")
    assert await store.lease("leader", "you", 1000)


async def test_quotas_and_rates_go_through(store: RemoteStore) -> None:
    assert await store.reserve("models:local", "m", limit=1, ttl_ms=1000)
    assert not await store.reserve("models:local", "n", limit=1, ttl_ms=1000)
    await store.unreserve("models:local", "m")
    assert await store.reserve("models:local", "n", limit=1, ttl_ms=1000)
    assert await store.spend("rps:local", 1, per_s=0.01, burst=1) == 0
    assert await store.spend("rps:local", 1, per_s=0.01, burst=1) > 0


async def test_messages_and_queues_go_through(lanes: RemoteLanes) -> None:
    topic = inbox_topic("g1")
    cursors = await lanes.tail([topic])
    await lanes.post(topic, ["one", "two"])
    assert (await lanes.wait(cursors, 0)).events == {topic: ["one", "two"]}
    await lanes.submit(submission(0))
    [queue] = await lanes.queues("base")
    assert (queue.lane, queue.num_pending, queue.owner) == (LANE, 1, None)


async def test_closing_drops_nothing_and_flushing_everything(store: RemoteStore) -> None:
    await store.put("local/x", "a", b"1")
    await store.close()
    assert await store.get("local/x", "a") is not None
    await store.flush_all()
    assert await store.get("local/x", "a") is None


async def test_a_command_lives_from_submit_to_result(lanes: RemoteLanes) -> None:
    assert await lanes.renew(REPLICA) == []
    first = await lanes.submit(submission(0))
    assert (first.state, first.is_fresh) == (State.PENDING, True)
    assert await lanes.renew(REPLICA) == [LANE]
    acquired = await lanes.acquire(LANE, REPLICA.id)
    assert acquired is not None
    taken = await lanes.take(LANE, REPLICA.id, acquired.token, acquired.cursor, 4, 100)
    assert [entry.seq for entry in taken.entries] == [0]
    assert await lanes.bodies([("t0", "digest0")]) == [b"body"]
    assert await lanes.settle(LANE, REPLICA.id, acquired.token, [Settlement(0, Outcome(result=b"done"))]) == frozenset()
    record = await lanes.look(TENANT, "t0")
    assert record is not None
    assert record.state is State.COMPLETED
    assert await lanes.result(TENANT, "t0") == b"done"
    assert await lanes.commit_snapshot(LANE, REPLICA.id, acquired.token, 0, "artifact") is None
    info = await lanes.lane(LANE)
    assert info is not None
    assert (info.durable, info.snapshot) == (0, "artifact")
    await lanes.release(LANE, REPLICA.id, acquired.token)
    assert await lanes.close(TENANT, LANE, FAILURE, (Write("local/models", LANE, b"ended"),), seen=info)
    assert (await lanes.sweep(stuck_ms=1000, orphan_ms=10**12)).num_stuck == 0


async def test_refusals_cancels_and_samples_go_through(lanes: RemoteLanes) -> None:
    await lanes.renew(REPLICA)
    assert await lanes.replicas("base") == [REPLICA]
    await lanes.submit(submission(0))
    assert (await lanes.void(submission(1), FAILURE)).state is State.FAILED
    assert await lanes.cancel(TENANT, "t0") is State.CANCELLED
    await lanes.pool_submit(PoolSubmission(TENANT, "s", "base", "key", "s1", "d", b"prompt", 3))
    [entry] = await lanes.pool_take("base", REPLICA.id, 4, 100)
    assert await lanes.pool_settle(REPLICA.id, [(entry, Outcome(result=b"text"))]) == frozenset()
    await lanes.close_session(TENANT, "s", FAILURE)
    with pytest.raises(SessionEnded):
        await lanes.pool_submit(PoolSubmission(TENANT, "s", "base", "late", "s2", "d", b"prompt", 3))
    await lanes.bury(REPLICA.id)
    assert await lanes.replicas("base") == []


async def test_errors_of_our_own_tree_pass_through_as_they_are(store: RemoteStore, lanes: RemoteLanes) -> None:
    await store.put("local/x", "a", b"1")
    with pytest.raises(StateContention):
        await store.put("local/x", "a", b"2", expect=0)
    with pytest.raises(NotFound):
        await lanes.submit(submission(3))
    await lanes.submit(submission(0))
    with pytest.raises(LeaseExpired):
        await lanes.acquire(LANE, "unknown")
    await lanes.renew(REPLICA)
    await lanes.acquire(LANE, REPLICA.id)
    with pytest.raises(Fenced):
        await lanes.release(LANE, REPLICA.id, 99)


async def test_a_defect_is_raised_and_not_answered(actor: MemoryState, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: MemoryLanes, lane: str) -> None:
        raise KeyError(lane)

    monkeypatch.setattr(MemoryLanes, "lane", broken)
    with pytest.raises(KeyError):
        await actor.call(Part.LANES, "lane", "x")


async def test_a_refusal_is_a_value_for_the_actor(actor: MemoryState) -> None:
    answer = await actor.call(Part.LANES, "submit", submission(3))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, NotFound)


@pytest.mark.parametrize("operation", ["on_flush", "_parts", "limits", "nothing"])
async def test_only_operations_of_the_protocol_can_be_called(actor: MemoryState, operation: str) -> None:
    with pytest.raises(ValueError, match="has no operation"):
        await actor.call(Part.LANES, operation)


@pytest.mark.proves("R57")
async def test_a_dead_actor_is_a_store_that_is_away() -> None:
    with pytest.raises(StateContention, match="restart the server"):
        await RemoteStore(DeadHandle()).get("local/x", "a")


async def test_a_process_has_one_wait_at_a_time(lanes: RemoteLanes) -> None:
    topic = bell_topic(REPLICA.id)
    cursors = await lanes.tail([SETTLED, topic])
    first = asyncio.create_task(lanes.wait(cursors, 30))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader of events"):
        await lanes.wait(cursors, 0)
    await lanes.submit(submission(0))
    await lanes.cancel(TENANT, "t0")
    wake = await first
    assert wake.events[SETTLED] == ["t0"]
    assert not (await lanes.wait(wake.cursors, 0)).events


async def test_a_cancelled_wait_leaves_room_for_the_next(lanes: RemoteLanes) -> None:
    cursors = await lanes.tail([SETTLED])
    first = asyncio.create_task(lanes.wait(cursors, 30))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not (await lanes.wait(cursors, 0)).events


async def test_calls_are_counted_by_operation(store: RemoteStore) -> None:
    found: list[telemetry.Measurement] = []
    with telemetry.recording(found.append):
        await store.now_ms()
    assert [(measured.name, dict(measured.labels)) for measured in found] == [(telemetry.STATE_CALLS, {"operation": "now_ms"})]


async def test_live_ends_only_with_its_actor(actor: MemoryState) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await actor.live()
