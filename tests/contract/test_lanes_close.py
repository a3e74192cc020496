"""The end of a lane and of a session while thousands wait: in slices, between which everybody else is served."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.contract.conftest import MakeState, RedisState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    LANE,
    NEVER_MS,
    REFUSED,
    TENANT,
    command,
    completed,
    open_lane,
    own,
    replica,
    rid_of,
    run_up_to,
    sample,
    take,
)
from tinsmith.protocol.errors import SessionEnded
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.futures import Write
from tinsmith.state import redis_lanes
from tinsmith.state.lanes import SETTLED, Fenced, LaneLimits

WRITE = Write("t", "x", b"closed")
NUM = 700


async def states_of(state: State, num: int) -> Counter[FutureState]:
    records = [await state.lanes.look(TENANT, rid_of(seq)) for seq in range(num)]
    return Counter(record.state for record in records if record is not None)


@pytest.fixture
async def redis_state(redis_url: str) -> AsyncIterator[RedisState]:
    state = RedisState(redis_url, LaneLimits())
    await state.start()
    yield state
    await state.close()


def counted(state: RedisState, monkeypatch: pytest.MonkeyPatch, script: str) -> list[int]:
    """How many records each call of the script settled."""
    run, found = state.store.run, []

    async def counting(name, *args, **options):  # type: ignore[no-untyped-def]
        if name != script:
            return await run(name, *args, **options)
        before = (await state.lanes.tail([SETTLED]))[SETTLED]
        reply = await run(name, *args, **options)
        found.append((await state.lanes.tail([SETTLED]))[SETTLED] - before)
        return reply

    monkeypatch.setattr(state.store, "run", counting)
    return found


@pytest.mark.proves("R67", "I11")
async def test_a_lane_with_hundreds_of_commands_ends_whole_and_in_order(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, NUM)))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 300)
    await take(state.lanes, "r1", owner.token, 301, max_commands=5)
    cursors = await state.lanes.tail([SETTLED])
    assert await state.lanes.close(TENANT, LANE, ENDED, writes=(WRITE,))
    assert await states_of(state, NUM) == {FutureState.COMPLETED: 301, FutureState.FAILED: NUM - 301}
    told = (await state.lanes.wait(cursors, 0)).events[SETTLED]
    assert list(told) == [rid_of(seq) for seq in range(301, NUM)]
    assert [await state.lanes.result(TENANT, rid_of(seq)) for seq in (0, 150, 300)] == [None] * 3
    info = await state.lanes.lane(LANE)
    assert info is not None
    assert (info.num_pending, info.held_bytes) == (0, 0)
    held = await state.store.get("t", "x")
    assert held is not None
    assert held.version == 1


async def test_a_close_is_many_short_steps(redis_state: RedisState, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fail one command takes Redis about 0.1 ms, and 20,000 may wait."""
    await open_lane(redis_state.lanes, *(command(seq) for seq in range(1, NUM)))
    steps = counted(redis_state, monkeypatch, "close")
    await redis_state.lanes.close(TENANT, LANE, ENDED)
    assert sum(steps) == NUM
    assert max(steps) <= 250


async def test_a_sessions_end_is_many_short_steps(redis_state: RedisState, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(NUM):
        await redis_state.lanes.pool_submit(replace(sample(f"s:{index}"), session="over" if index % 2 else "other"))
    steps = counted(redis_state, monkeypatch, "close_session")
    await redis_state.lanes.close_session(TENANT, "over", ENDED)
    assert sum(steps) == NUM // 2
    assert max(steps) <= 100


async def close_once(state: RedisState) -> None:
    """The first step of a close whose caller dies after it."""
    await state.store.run("close", TENANT, LANE, ENDED.model_dump_json(), 10_000, 2, "", "", 1, "t", "x", "1", b"closed")


@pytest.mark.proves("R67", "I1", "I11")
async def test_what_a_closer_that_died_left_is_finished_by_the_next_sweep(redis_state: RedisState) -> None:
    lanes = redis_state.lanes
    await open_lane(lanes, *(command(seq) for seq in range(1, 8)))
    owner = await own(lanes, "r1")
    await run_up_to(lanes, "r1", owner.token, 0)
    await take(lanes, "r1", owner.token, 1, max_commands=1)
    await close_once(redis_state)
    assert await states_of(redis_state, 8) == {FutureState.COMPLETED: 1, FutureState.FAILED: 2, FutureState.PENDING: 5}
    with pytest.raises(Fenced):
        await take(lanes, "r1", owner.token, 2)
    with pytest.raises(SessionEnded):
        await lanes.submit(command(8))
    assert await lanes.queues(BASE) == []
    assert await lanes.acquire(LANE, "r1") is None
    assert (await lanes.submit(command(5))).state is FutureState.PENDING
    assert await lanes.cancel(TENANT, rid_of(5)) is FutureState.CANCELLED
    assert await lanes.queues(BASE) == []
    await lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    assert await states_of(redis_state, 8) == {FutureState.COMPLETED: 1, FutureState.FAILED: 6, FutureState.CANCELLED: 1}
    assert sorted(key for key in await redis_state.keys() if key.partition(":")[0] in ("body", "res", "log", "unsettled", "results")) == []
    info = await lanes.lane(LANE)
    assert info is not None
    assert (info.is_open, info.num_pending, info.held_bytes) == (False, 0, 0)


async def test_a_repeat_finishes_what_a_closer_that_died_left(redis_state: RedisState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_lanes, "_CLOSE_SLICE", 2)
    await open_lane(redis_state.lanes, *(command(seq) for seq in range(1, 8)))
    await close_once(redis_state)
    await redis_state.lanes.close(TENANT, LANE, REFUSED, writes=(WRITE,))
    records = [await redis_state.lanes.look(TENANT, rid_of(seq)) for seq in range(8)]
    assert [None if record is None else record.failure for record in records] == [ENDED] * 8
    held = await redis_state.store.get("t", "x")
    assert held is not None
    assert held.version == 1


@pytest.mark.proves("R67")
async def test_a_close_that_speaks_of_an_older_snapshot_does_nothing(make_state: MakeState) -> None:
    state = await make_state()
    await open_lane(state.lanes, command(1))
    seen = await state.lanes.lane(LANE)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 0, "snapshot-0")
    assert not await state.lanes.close(TENANT, LANE, ENDED, writes=(WRITE,), seen=seen)
    assert await state.store.get("t", "x") is None
    info = await state.lanes.lane(LANE)
    assert info is not None
    assert (info.is_open, info.num_pending, info.token) == (True, 1, owner.token)
    assert await state.lanes.close(TENANT, LANE, ENDED, writes=(WRITE,), seen=info)
    assert await state.store.get("t", "x") is not None
    assert await state.lanes.close(TENANT, LANE, ENDED, seen=seen)  # it is closed; nothing is left to say


@pytest.mark.proves("R67", "I7")
async def test_the_end_of_a_session_frees_the_results_of_its_samples(make_state: MakeState) -> None:
    state = await make_state(max_tenant_bytes=100)
    done, other = sample("s:1"), replace(sample("s:2", tenant="other"), session="session of local")
    for submission in (done, other):
        await state.lanes.pool_submit(submission)
    await state.lanes.renew(replica("s1"))
    for entry in await state.lanes.pool_take(BASE, "s1", 2, 1000):
        await state.lanes.pool_settle("s1", [(entry, completed(b"r" * 90))])
    await state.lanes.close_session(TENANT, "session of local", ENDED)
    assert await state.lanes.result(TENANT, done.rid) is None
    assert await state.lanes.result("other", other.rid) == b"r" * 90
    record = await state.lanes.look(TENANT, done.rid)
    assert record is not None
    assert record.state is FutureState.COMPLETED
    assert (await state.lanes.pool_submit(replace(sample("s:3", body=b"b" * 90), session="next"))).is_fresh
