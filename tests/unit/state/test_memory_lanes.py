"""The memory lanes beyond the contract: their clock, what they forget about the dead, what they never keep."""

from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import Failure, Write
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import LaneLimits, PoolSubmission, Replica, Submission, bell_topic
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore, wall_clock_ms

LIMITS = LaneLimits(lease_ms=100, record_kept_ms=1000)
ENDED = Failure(reason=ReasonCode.SESSION_ENDED, message="over", category=Category.USER)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 5_000

    def __call__(self) -> int:
        return self.now_ms


def replica(name: str) -> Replica:
    return Replica(id=name, base="llama", node="n", pid=1, started="1")


def create(lane: str) -> Submission:
    return Submission(
        tenant="local",
        session="s",
        lane=lane,
        base="llama",
        seq=0,
        kind=Kind.CREATE_MODEL,
        rid=f"t-{lane}",
        digest="d",
        body=b"body",
        tokens=1,
        writes=(Write("t", lane, b"1"),),
    )


async def test_the_clock_is_the_stores_unless_another_is_given() -> None:
    clock = Clock()
    lanes = MemoryLanes(MemoryStore(clock), LIMITS)
    await lanes.submit(create("m"))
    record = await lanes.look("local", "t-m")
    assert record is not None
    assert record.submitted_ms == 5_000
    lanes = MemoryLanes(MemoryStore(), LIMITS, clock)
    await lanes.submit(create("m"))
    record = await lanes.look("local", "t-m")
    assert record is not None
    assert record.submitted_ms == 5_000


async def test_the_default_clock_is_utc_in_ms() -> None:
    before_ms = wall_clock_ms()
    assert 1_600_000_000_000 < before_ms <= await MemoryStore().now_ms()


async def test_the_bell_of_a_long_dead_replica_is_forgotten() -> None:
    clock = Clock()
    lanes = MemoryLanes(MemoryStore(clock), LIMITS)
    await lanes.submit(create("m"))
    await lanes.renew(replica("r1"))
    await lanes.acquire("m", "r1")
    await lanes.close("local", "m", ENDED)
    topic = bell_topic("r1")
    clock.now_ms += 500
    await lanes.sweep(stuck_ms=10**9, orphan_ms=10**12)
    assert await lanes.tail([topic]) == {topic: 1}
    clock.now_ms += 1000
    await lanes.sweep(stuck_ms=10**9, orphan_ms=10**12)
    assert await lanes.tail([topic]) == {topic: 0}


async def test_a_peers_renewal_puts_a_dead_takers_samples_back_and_announces_them() -> None:
    clock = Clock()
    lanes = MemoryLanes(MemoryStore(clock), LIMITS)
    await lanes.pool_submit(
        PoolSubmission(tenant="local", session="s", base="llama", key="s:1", rid="s-1", digest="d", body=b"b", tokens=1)
    )
    await lanes.renew(replica("s1"))
    await lanes.pool_take("llama", "s1", 1, 10)
    cursors = await lanes.tail(["work:llama"])
    clock.now_ms += 150
    await lanes.renew(replica("s2"))
    assert (await lanes.wait(cursors, 0)).events == {"work:llama": ["pool:llama:local"]}
    assert [entry.rid for entry in await lanes.pool_take("llama", "s2", 1, 10)] == ["s-1"]


async def test_writes_go_into_the_store_in_the_same_step() -> None:
    store = MemoryStore()
    lanes = MemoryLanes(store, LIMITS)
    await lanes.submit(create("m"))
    assert (await store.list("t")).keys() == {"m"}
    await lanes.close("local", "m", ENDED, writes=(Write("t", "m", None), Write("t", "never there", None)))
    assert await store.list("t") == {}
