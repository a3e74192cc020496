"""Work that nobody serves: when the sweep fails it, and all else that a sweep does to a record."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

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
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import Fenced, Role

LEASE_MS, KEPT_MS, ORPHAN_MS = 100, 300, 200


async def record_of(state: State, rid: str) -> FutureRecord:
    record = await state.lanes.look(TENANT, rid)
    assert record is not None
    return record


async def sweep(state: State, *, stuck_ms: int = NEVER_MS, orphan_ms: int = NEVER_MS) -> tuple[int, int]:
    """(stuck, orphaned)."""
    swept = await state.lanes.sweep(stuck_ms=stuck_ms, orphan_ms=orphan_ms)
    return swept.num_stuck, swept.num_orphaned


# The matrix: what becomes of one record, by what it is and who lives


async def settled_sample(state: State) -> str:
    rid = (await state.lanes.pool_submit(sample("s:1"))).rid
    await state.lanes.renew(replica("s1", role=Role.SAMPLER))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.pool_settle("s1", [(entry, completed())])
    return rid


async def terminal_and_old(state: State) -> str:
    rid = await settled_sample(state)
    await state.pass_ms(KEPT_MS + 50)
    await sweep(state)
    return rid


async def terminal_and_young(state: State) -> str:
    rid = await settled_sample(state)
    await sweep(state, stuck_ms=0, orphan_ms=0)
    return rid


async def pending_and_old(state: State) -> str:
    await open_lane(state.lanes)
    await state.pass_ms(KEPT_MS + 50)
    await sweep(state, stuck_ms=0)
    return rid_of(0)


async def owner_dead(state: State) -> str:
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    await state.pass_ms(LEASE_MS + 50)
    await sweep(state, stuck_ms=0, orphan_ms=ORPHAN_MS)
    return rid_of(0)


async def no_trainer(state: State) -> str:
    await open_lane(state.lanes)
    await state.lanes.renew(replica("s1", role=Role.SAMPLER))  # of another role
    await state.pass_ms(ORPHAN_MS + 50)
    await state.lanes.renew(replica("s1", role=Role.SAMPLER))
    await state.lanes.renew(replica("r9", "another base"))
    await sweep(state, orphan_ms=ORPHAN_MS)
    return rid_of(0)


async def no_sampler(state: State) -> str:
    rid = (await state.lanes.pool_submit(sample("s:1"))).rid
    await state.pass_ms(ORPHAN_MS + 50)
    await state.lanes.renew(replica("r1", role=Role.TRAINER))
    await sweep(state, orphan_ms=ORPHAN_MS)
    return rid


async def stuck_lane(state: State) -> str:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.pass_ms(50)
    await sweep(state, stuck_ms=50)
    return rid_of(0)


async def session_ended(state: State) -> str:
    await open_lane(state.lanes)
    await state.lanes.close(TENANT, LANE, ENDED)
    await sweep(state, stuck_ms=0, orphan_ms=0)
    return rid_of(0)


FAILED = FutureState.FAILED
MATRIX: list[tuple[Callable[[State], Awaitable[str]], FutureState | None, ReasonCode | None]] = [
    (terminal_and_old, None, None),
    (terminal_and_young, FutureState.COMPLETED, None),
    (pending_and_old, FutureState.PENDING, None),
    (owner_dead, FutureState.RUNNING, None),
    (no_trainer, FAILED, ReasonCode.ORPHANED_REPLICA),
    (no_sampler, FAILED, ReasonCode.ORPHANED_REPLICA),
    (stuck_lane, FAILED, ReasonCode.DEADLINE_EXCEEDED),
    (session_ended, FAILED, ReasonCode.SESSION_ENDED),
]


@pytest.mark.proves("R51", "R52", "R67")
@pytest.mark.parametrize(("arrange", "expected", "reason"), MATRIX, ids=[row[0].__name__ for row in MATRIX])
async def test_the_sweep_does_to_a_record_what_the_matrix_says(
    make_state: MakeState,
    arrange: Callable[[State], Awaitable[str]],
    expected: FutureState | None,
    reason: ReasonCode | None,
) -> None:
    state = await make_state(lease_ms=LEASE_MS, record_kept_ms=KEPT_MS)
    record = await state.lanes.look(TENANT, await arrange(state))
    assert (None if record is None else record.state) is expected
    failure = None if record is None else record.failure
    assert (None if failure is None else failure.reason) is reason


# Orphans


@pytest.mark.proves("R51")
async def test_work_is_not_orphaned_before_its_time_has_passed_since_it_came(make_state: MakeState) -> None:
    state = await make_state(lease_ms=LEASE_MS)
    await state.pass_ms(ORPHAN_MS)  # nobody lived before, and nobody waited
    await open_lane(state.lanes)
    sampled = (await state.lanes.pool_submit(sample("s:1"))).rid
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 0)
    await state.pass_ms(ORPHAN_MS + 50)
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 2)
    for rid in (rid_of(0), sampled):
        failure = (await record_of(state, rid)).failure
        assert failure is not None
        assert (failure.reason, failure.category) == (ReasonCode.ORPHANED_REPLICA, Category.SERVER)
        assert await state.lanes.bodies([(rid, (await record_of(state, rid)).digest)]) == [None]
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 0)


@pytest.mark.proves("R51", "R53")
async def test_a_replica_that_renews_starts_the_time_anew(make_state: MakeState) -> None:
    state = await make_state(lease_ms=LEASE_MS)
    await open_lane(state.lanes)
    await state.pass_ms(ORPHAN_MS + 50)
    await state.lanes.renew(replica("r1"))
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 0)
    await state.pass_ms(LEASE_MS + 50)
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 0)  # it is dead now, but has lived a moment ago
    await state.pass_ms(ORPHAN_MS)
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 1)


async def test_a_replica_lives_for_its_whole_lease_however_short_the_time_is(make_state: MakeState) -> None:
    state = await make_state(lease_ms=60_000)
    await open_lane(state.lanes)
    await state.lanes.renew(replica("r1"))
    await state.pass_ms(30)
    assert await sweep(state, orphan_ms=0) == (0, 0)


@pytest.mark.proves("R51", "I1", "I4")
async def test_the_last_owner_of_an_orphan_is_fenced(make_state: MakeState) -> None:
    state = await make_state(lease_ms=LEASE_MS)
    await open_lane(state.lanes, command(1), command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await take(state.lanes, "r1", owner.token, 1, max_commands=1)
    await state.pass_ms(LEASE_MS + ORPHAN_MS + 50)
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 2)
    await state.lanes.renew(replica("r1"))
    with pytest.raises(Fenced):
        await state.lanes.settle(LANE, "r1", owner.token, done(1))
    assert (await record_of(state, rid_of(1))).state is FutureState.FAILED
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.is_open, lane.owner, lane.num_pending, lane.held_bytes) == (True, None, 0, len(command(0).body))


@pytest.mark.proves("R51")
async def test_an_orphaned_lane_goes_on_with_what_comes_later(make_state: MakeState) -> None:
    state = await make_state(lease_ms=LEASE_MS)
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.pass_ms(LEASE_MS + ORPHAN_MS + 50)
    await sweep(state, orphan_ms=ORPHAN_MS)
    assert await state.lanes.renew(replica("r2")) == []
    await state.lanes.submit(command(2))
    assert await state.lanes.renew(replica("r2")) == [LANE]
    acquired = await own(state.lanes, "r2")
    assert [entry.seq for entry in acquired.replay] == [0]
    assert seqs(await take(state.lanes, "r2", acquired.token, acquired.cursor)) == [2]


async def test_samples_that_a_dead_sampler_held_are_orphans_too(make_state: MakeState) -> None:
    state = await make_state(lease_ms=LEASE_MS)
    first = sample("s:1")
    await state.lanes.pool_submit(first)
    await state.lanes.renew(replica("s1", role=Role.SAMPLER))
    await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.pass_ms(LEASE_MS + ORPHAN_MS + 50)
    young = sample("s:2")
    await state.lanes.pool_submit(young)
    assert await sweep(state, orphan_ms=ORPHAN_MS) == (0, 1)
    assert (await record_of(state, first.rid)).state is FutureState.FAILED
    assert (await record_of(state, young.rid)).state is FutureState.PENDING


@pytest.mark.proves("R51")
async def test_thousands_of_orphans_fail_in_one_sweep_and_in_order(make_state: MakeState) -> None:
    state = await make_state()
    num = 600  # more than one script fails at once
    await open_lane(state.lanes, *(command(seq) for seq in range(1, num)))
    for index in range(num):
        await state.lanes.pool_submit(replace(sample(f"s:{index}"), tenant="other"))
    cursor = await state.lanes.tail(["settled"])
    await state.pass_ms(20)
    assert await sweep(state, orphan_ms=10) == (0, 2 * num)
    wake = await state.lanes.wait(cursor, 0)
    told = list(wake.events["settled"])
    while wake.events:
        wake = await state.lanes.wait(wake.cursors, 0)
        told += wake.events.get("settled", ())
    assert told[:num] == [rid_of(seq) for seq in range(num)]
    assert len(told) == 2 * num
    assert await state.lanes.queues(BASE) == []
