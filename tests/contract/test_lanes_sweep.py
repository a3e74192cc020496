"""The janitor's sweep: retention and lanes that do not move."""

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    LANE,
    NEVER_MS,
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
    seqs,
    take,
)
from tinsmith.protocol.errors import ReasonCode
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import Swept


async def record_of(state: State, rid: str) -> FutureRecord:
    record = await state.lanes.look(TENANT, rid)
    assert record is not None
    return record


async def sampled(state: State, key: str) -> str:
    """A completed sample."""
    rid = (await state.lanes.pool_submit(sample(key))).rid
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.pool_settle("s1", [(entry, completed(b"text"))])
    return rid


async def test_a_sweep_of_nothing_frees_nothing(state: State) -> None:
    await open_lane(state.lanes)
    assert await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS) == Swept(num_results=0, num_records=0, num_stuck=0)


async def test_a_result_is_kept_for_a_while_after_its_first_fetch(make_state: MakeState) -> None:
    state = await make_state(result_kept_ms=300)
    fetched, waiting = await sampled(state, "s:1"), await sampled(state, "s:2")
    assert (await record_of(state, fetched)).fetched_ms is None
    await state.lanes.result(TENANT, fetched)
    first_fetch_ms = (await record_of(state, fetched)).fetched_ms
    await state.pass_ms(150)
    assert await state.lanes.result(TENANT, fetched) == b"text"
    assert (await record_of(state, fetched)).fetched_ms == first_fetch_ms
    assert (await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)).num_results == 0
    await state.pass_ms(200)
    assert (await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)).num_results == 1
    assert await state.lanes.result(TENANT, fetched) is None
    assert (await record_of(state, fetched)).state is FutureState.COMPLETED
    assert await state.lanes.result(TENANT, waiting) == b"text"


@pytest.mark.proves("R51")
async def test_terminal_and_old_is_deleted_and_nothing_else(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=300)
    settled = await sampled(state, "s:1")
    waiting = (await state.lanes.pool_submit(sample("s:2"))).rid
    assert (await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)).num_records == 0
    await state.pass_ms(350)
    assert await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS) == Swept(num_results=1, num_records=1, num_stuck=0)
    assert await state.lanes.look(TENANT, settled) is None
    assert await state.lanes.result(TENANT, settled) is None
    assert (await record_of(state, waiting)).state is FutureState.PENDING


@pytest.mark.proves("R31")
async def test_a_claim_lives_as_long_as_its_model(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=300)
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await state.pass_ms(350)
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    repeat = await state.lanes.submit(command(1))
    assert (repeat.is_fresh, repeat.state) == (False, FutureState.COMPLETED)
    await state.lanes.close(TENANT, LANE, ENDED)
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    await state.pass_ms(350)
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    assert await state.lanes.look(TENANT, rid_of(1)) is None
    assert await state.lanes.lane(LANE) is None


@pytest.mark.proves("R52")
async def test_the_first_command_of_a_lane_that_does_not_move_fails(make_state: MakeState) -> None:
    state = await make_state()
    await open_lane(state.lanes, command(1), command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert (await state.lanes.sweep(stuck_ms=300, orphan_ms=NEVER_MS)).num_stuck == 0
    await state.pass_ms(350)
    cursor = await state.lanes.tail(["settled"])
    assert (await state.lanes.sweep(stuck_ms=300, orphan_ms=NEVER_MS)).num_stuck == 1
    record = await record_of(state, rid_of(1))
    assert record.failure is not None
    assert (record.state, record.failure.reason) == (FutureState.FAILED, ReasonCode.DEADLINE_EXCEEDED)
    assert (await state.lanes.wait(cursor, 0)).events == {"settled": [rid_of(1)]}
    assert (await state.lanes.sweep(stuck_ms=300, orphan_ms=NEVER_MS)).num_stuck == 0
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [2]
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.num_pending, lane.held_bytes) == (1, len(command(0).body) + len(command(2).body))


@pytest.mark.proves("R52")
async def test_waiting_behind_own_work_or_for_an_owner_is_no_deadline(make_state: MakeState) -> None:
    state = await make_state()
    await open_lane(state.lanes, command(1))
    await state.pass_ms(150)
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # nobody owns it
    owner = await own(state.lanes, "r1")
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # its owner has just come
    await take(state.lanes, "r1", owner.token, 0)
    await state.pass_ms(150)
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # it runs
    await state.lanes.settle(LANE, "r1", owner.token, done(0))
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # it has just moved
    await take(state.lanes, "r1", owner.token, 1)
    await state.lanes.settle(LANE, "r1", owner.token, done(1))
    await state.pass_ms(150)
    await state.lanes.submit(command(2))
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # it was idle, and this has just come
    await state.lanes.bury("r1")
    await state.pass_ms(150)
    assert (await state.lanes.sweep(stuck_ms=100, orphan_ms=NEVER_MS)).num_stuck == 0  # its owner is dead
    assert (await record_of(state, rid_of(2))).state is FutureState.PENDING


@pytest.mark.proves("R52")
async def test_a_sample_counts_from_its_submit(make_state: MakeState) -> None:
    state = await make_state()
    old = (await state.lanes.pool_submit(sample("s:1"))).rid
    await state.pass_ms(350)
    young = (await state.lanes.pool_submit(sample("s:2"))).rid
    assert (await state.lanes.sweep(stuck_ms=300, orphan_ms=NEVER_MS)).num_stuck == 1
    record = await record_of(state, old)
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.DEADLINE_EXCEEDED
    await state.lanes.renew(replica("s1"))
    assert [entry.rid for entry in await state.lanes.pool_take(BASE, "s1", 10, 100)] == [young]
    assert await state.lanes.bodies([(old, "d")]) == [None]
