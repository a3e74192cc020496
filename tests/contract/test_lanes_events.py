"""Topics and waiting for them."""

import asyncio
import time

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    LANE,
    REFUSED,
    TENANT,
    command,
    completed,
    done,
    open_lane,
    own,
    replica,
    rid_of,
    run_up_to,
    sample,
    take,
)
from tinsmith.state.lanes import SETTLED, Wake, bell_topic, work_topic

WORK = work_topic(BASE)


async def news(state: State, cursors: dict[str, int]) -> dict[str, list[str]]:
    """What is there now, and move the cursors past it."""
    wake = await state.lanes.wait(cursors, 0)
    assert wake.resync == frozenset()
    cursors.update(wake.cursors)
    return {topic: list(events) for topic, events in wake.events.items() if events}


async def test_topics_are_numbered_from_1(state: State) -> None:
    assert await state.lanes.tail([SETTLED, WORK]) == {SETTLED: 0, WORK: 0}
    await open_lane(state.lanes)
    await state.lanes.cancel(TENANT, rid_of(0))
    assert (await state.lanes.tail([SETTLED])) == {SETTLED: 1}
    wake = await state.lanes.wait({SETTLED: 0, "bell:nobody": 0}, 0)
    assert wake == Wake({SETTLED: [rid_of(0)]}, {SETTLED: 1, "bell:nobody": 0}, frozenset())


async def test_every_terminal_record_is_an_event(state: State) -> None:
    cursors = await state.lanes.tail([SETTLED])
    await open_lane(state.lanes, command(1), command(2), command(4))
    await state.lanes.void(command(3), REFUSED)
    assert await news(state, cursors) == {SETTLED: [rid_of(3)]}
    await state.lanes.cancel(TENANT, rid_of(2))
    assert await news(state, cursors) == {SETTLED: [rid_of(2)]}
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    assert await news(state, cursors) == {SETTLED: [rid_of(0), rid_of(1)]}
    await state.lanes.settle(LANE, "r1", owner.token, done(1))
    assert await news(state, cursors) == {}
    await state.lanes.close(TENANT, LANE, ENDED)
    assert await news(state, cursors) == {SETTLED: [rid_of(4)]}
    await state.lanes.pool_submit(sample("s:1"))
    (entry,) = await state.lanes.pool_take(BASE, "r1", 1, 100)
    await state.lanes.pool_settle("r1", [(entry, completed())])
    assert await news(state, cursors) == {SETTLED: [entry.rid]}


async def test_work_without_an_owner_is_announced_to_its_base_model(state: State) -> None:
    cursors = await state.lanes.tail([WORK, work_topic("other")])
    await open_lane(state.lanes)
    assert await news(state, cursors) == {WORK: [LANE]}
    owner = await own(state.lanes, "r1")
    await state.lanes.submit(command(1))
    assert await news(state, cursors) == {}
    await state.lanes.release(LANE, "r1", owner.token)
    assert await news(state, cursors) == {WORK: [LANE]}
    await own(state.lanes, "r1")
    await state.lanes.bury("r1")
    await state.lanes.submit(command(2))
    assert LANE in (await news(state, cursors))[WORK]
    await state.lanes.pool_submit(sample("s:1"))
    assert len((await news(state, cursors))[WORK]) == 1


async def test_an_owner_hears_its_bell(state: State) -> None:
    bell = bell_topic("r1")
    cursors = await state.lanes.tail([bell])
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert await news(state, cursors) == {}
    await state.lanes.submit(command(2))
    assert await news(state, cursors) == {bell: [LANE]}
    await state.lanes.submit(command(2))
    assert await news(state, cursors) == {}
    await state.lanes.void(command(1), REFUSED)
    assert await news(state, cursors) == {bell: [LANE]}
    await state.lanes.close(TENANT, LANE, ENDED)
    assert await news(state, cursors) == {bell: [LANE]}


async def test_a_sleeper_is_woken_by_the_event(state: State) -> None:
    await open_lane(state.lanes)
    cursors = await state.lanes.tail([SETTLED, WORK])
    _, reader = await state.connect()
    sleeper = asyncio.create_task(reader.wait(cursors, 30))
    await asyncio.sleep(0.05)
    assert not sleeper.done()
    await state.lanes.cancel(TENANT, rid_of(0))
    wake = await asyncio.wait_for(sleeper, 5)
    assert wake.events[SETTLED] == [rid_of(0)]
    assert wake.cursors == {SETTLED: cursors[SETTLED] + 1, WORK: cursors[WORK]}


async def test_a_wait_that_nothing_ends_times_out_empty(state: State) -> None:
    await open_lane(state.lanes)
    cursors = await state.lanes.tail([SETTLED, WORK])
    for timeout_s in (0, 0.1):
        started = time.monotonic()
        wake = await state.lanes.wait(cursors, timeout_s)
        assert timeout_s - 0.02 <= time.monotonic() - started < timeout_s + 2
        assert (dict(wake.events), wake.cursors, wake.resync) == ({}, cursors, frozenset())


async def test_each_reader_reads_everything_from_its_own_cursor(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 30)))
    for seq in range(20):
        await state.lanes.cancel(TENANT, rid_of(seq))
    expected = [rid_of(seq) for seq in range(20)]
    for start in (0, 7, 19):
        assert await news(state, {SETTLED: start}) == {SETTLED: expected[start:]}


async def test_a_cancelled_reader_loses_nothing(state: State) -> None:
    await open_lane(state.lanes)
    cursors = await state.lanes.tail([SETTLED])
    sleeper = asyncio.create_task(state.lanes.wait(cursors, 30))
    await asyncio.sleep(0.02)
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    await state.lanes.cancel(TENANT, rid_of(0))
    assert await news(state, cursors) == {SETTLED: [rid_of(0)]}


async def test_a_reader_of_a_store_that_was_emptied_is_told_to_resync(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await state.lanes.cancel(TENANT, rid_of(0))
    await state.lanes.cancel(TENANT, rid_of(1))
    cursors = await state.lanes.tail([SETTLED])
    await state.store.flush_all()
    await state.store.open()
    wake = await state.lanes.wait(cursors, 0)
    assert wake.resync == {SETTLED}
    await open_lane(state.lanes)
    await state.lanes.cancel(TENANT, rid_of(0))
    wake = await state.lanes.wait(wake.cursors, 0)
    assert (wake.events, wake.resync) == ({SETTLED: [rid_of(0)]}, frozenset())


async def test_an_emptied_store_has_no_lanes(state: State) -> None:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.pool_submit(sample("s:1"))
    await state.store.flush_all()
    await state.store.open()
    assert await state.lanes.lane(LANE) is None
    assert await state.lanes.look(TENANT, rid_of(0)) is None
    assert await state.lanes.replicas(BASE) == []
    assert await state.lanes.renew(replica("r1")) == []
    assert await state.lanes.pool_take(BASE, "r1", 1, 100) == []
    assert (await state.lanes.submit(command(0))).is_fresh is True
    assert (await take(state.lanes, "r1", (await own(state.lanes, "r1")).token, 0)).cursor == 1


async def test_what_a_buried_replica_held_is_announced_once(state: State) -> None:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.pool_submit(sample("s:1"))
    await state.lanes.pool_take(BASE, "r1", 1, 100)
    cursors = await state.lanes.tail([WORK])
    await state.lanes.bury("r1")
    announced = (await news(state, cursors))[WORK]
    assert LANE in announced
    assert len(announced) == 2  # the lane and the pool
    await state.lanes.bury("r1")
    await state.lanes.renew(replica("r2"))
    assert await news(state, cursors) == {}


async def test_what_a_lapsed_replica_held_is_announced_by_a_peers_renewal(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.pool_submit(sample("s:1"))
    await state.lanes.pool_take(BASE, "r1", 1, 100)
    cursors = await state.lanes.tail([WORK])
    await state.lanes.renew(replica("r2"))
    assert await news(state, cursors) == {}
    await state.pass_ms(300)
    await state.lanes.renew(replica("r2"))
    announced = (await news(state, cursors))[WORK]
    assert LANE in announced
    assert len(announced) == 2
    await state.lanes.renew(replica("r2"))
    assert await news(state, cursors) == {}
