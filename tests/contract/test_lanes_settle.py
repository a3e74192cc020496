"""What becomes of a command: settle, results, snapshots, the fencing of both."""

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    FORWARD,
    LANE,
    OPTIM,
    SAVE,
    TENANT,
    command,
    completed,
    done,
    failed,
    open_lane,
    own,
    replica,
    rid_of,
    run_up_to,
    take,
)
from tinsmith.protocol.errors import Cancelled, StateContention
from tinsmith.protocol.futures import Outcome, Write
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import Fenced, LeaseExpired, Settlement


@pytest.mark.proves("R26")
async def test_a_completed_command_has_a_result_and_no_failure(state: State) -> None:
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    write = Write("t", "x", b"visible now")
    late = await state.lanes.settle(LANE, "r1", owner.token, [Settlement(0, completed(b"\x00\x01answer", writes=(write,)))])
    assert late == frozenset()
    record = await state.lanes.look(TENANT, rid_of(0))
    assert record is not None
    assert (record.state, record.failure, record.result_size) == (FutureState.COMPLETED, None, 8)
    assert record.started_ms is not None
    assert record.ended_ms is not None
    assert record.submitted_ms <= record.started_ms <= record.ended_ms
    assert await state.lanes.result(TENANT, rid_of(0)) == b"\x00\x01answer"
    held = await state.store.get("t", "x")
    assert held is not None
    assert held.value == b"visible now"
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.num_pending == 0


@pytest.mark.proves("R26")
@pytest.mark.parametrize("outcome", [failed("it broke: ünïcode"), Outcome.failed(Cancelled("stopped"), is_tainted=False)])
async def test_a_command_that_did_not_complete_has_a_failure_and_no_result(state: State, outcome: Outcome) -> None:
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    await state.lanes.settle(LANE, "r1", owner.token, [Settlement(0, outcome)])
    record = await state.lanes.look(TENANT, rid_of(0))
    assert record is not None
    assert (record.state, record.failure, record.result_size) == (outcome.state, outcome.failure, None)
    assert await state.lanes.result(TENANT, rid_of(0)) is None


async def test_an_empty_result_is_a_result(state: State) -> None:
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    await state.lanes.settle(LANE, "r1", owner.token, [Settlement(0, completed(b""))])
    assert await state.lanes.result(TENANT, rid_of(0)) == b""


@pytest.mark.proves("I3", "I4", "R54")
async def test_a_second_settle_changes_nothing_and_says_so(state: State) -> None:
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await take(state.lanes, "r1", owner.token, 1)
    write = Write("t", "x", b"1")
    settlements = [Settlement(1, completed(b"first", writes=(write,)))]
    assert await state.lanes.settle(LANE, "r1", owner.token, settlements) == frozenset()
    record = await state.lanes.look(TENANT, rid_of(1))
    assert await state.lanes.settle(LANE, "r1", owner.token, settlements) == {1}
    assert await state.lanes.settle(LANE, "r1", owner.token, [Settlement(1, failed()), Settlement(0, failed())]) == {0, 1}
    assert await state.lanes.look(TENANT, rid_of(1)) == record
    assert await state.lanes.result(TENANT, rid_of(1)) == b"first"
    held = await state.store.get("t", "x")
    assert held is not None
    assert held.version == 1


async def test_the_outcomes_of_one_call_go_together(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await take(state.lanes, "r1", owner.token, 2)
    outcomes = [Settlement(1, failed()), Settlement(2, failed()), Settlement(3, completed())]
    assert await state.lanes.settle(LANE, "r1", owner.token, outcomes) == {1}
    states = [record.state if (record := await state.lanes.look(TENANT, rid_of(seq))) else None for seq in (1, 2, 3)]
    assert states == [FutureState.COMPLETED, FutureState.FAILED, FutureState.COMPLETED]


@pytest.mark.proves("I1")
async def test_a_deposed_owner_writes_nothing(state: State) -> None:
    await open_lane(state.lanes, command(1))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    await take(state.lanes, "r1", first.token, 1)
    await state.lanes.bury("r1")
    await own(state.lanes, "r2")
    await state.lanes.renew(replica("r1"))
    before = await state.lanes.lane(LANE)
    write = Write("t", "x", b"1")
    with pytest.raises(Fenced):
        await state.lanes.settle(LANE, "r1", first.token, [Settlement(1, completed(writes=(write,)))])
    with pytest.raises(Fenced):
        await state.lanes.commit_snapshot(LANE, "r1", first.token, 0, "late")
    with pytest.raises(Fenced):
        await state.lanes.release(LANE, "r1", first.token)
    assert await state.lanes.lane(LANE) == before
    assert await state.store.get("t", "x") is None
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert record.state is FutureState.PENDING


@pytest.mark.proves("I1")
async def test_an_owner_that_slept_past_its_lease_writes_only_after_it_renewed(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await take(state.lanes, "r1", owner.token, 1)
    await state.pass_ms(300)
    with pytest.raises(LeaseExpired):
        await state.lanes.settle(LANE, "r1", owner.token, done(1))
    with pytest.raises(LeaseExpired):
        await state.lanes.commit_snapshot(LANE, "r1", owner.token, 0, "snapshot-0")
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert record.state is FutureState.RUNNING
    await state.lanes.renew(replica("r1"))
    assert await state.lanes.settle(LANE, "r1", owner.token, done(1)) == frozenset()


@pytest.mark.proves("I7")
async def test_bodies_stay_only_where_a_replay_may_need_them(state: State) -> None:
    bodies = [command(1), command(2, FORWARD), command(3), command(4, OPTIM), command(5, SAVE)]
    await open_lane(state.lanes, *bodies)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await take(state.lanes, "r1", owner.token, 1)
    await take(state.lanes, "r1", owner.token, 5)
    await state.lanes.settle(
        LANE,
        "r1",
        owner.token,
        [*done(1, 2), Settlement(3, failed()), *done(4), Settlement(5, completed(artifact="save-5"))],
    )
    kept = await state.lanes.bodies([(submission.rid, submission.digest) for submission in bodies])
    assert [body is not None for body in kept] == [True, False, False, True, True]
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.held_bytes == len(command(0).body) + sum(len(body) for body in kept if body is not None)
    assert (await take(state.lanes, "r1", owner.token, 6)).held_bytes == lane.held_bytes


@pytest.mark.proves("I9")
async def test_a_snapshot_raises_the_floor_and_trims_what_lies_under_it(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 5)))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 3)
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 2, "snapshot-2") is None
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.durable, lane.snapshot) == (2, "snapshot-2")
    assert lane.held_bytes == len(command(3).body) + len(command(4).body)
    kept = await state.lanes.bodies([(rid_of(seq), command(seq).digest) for seq in range(5)])
    assert [body is not None for body in kept] == [False, False, False, True, True]
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert ([entry.seq for entry in second.replay], second.cursor) == ([3], 4)
    assert (second.info.durable, second.info.snapshot) == (2, "snapshot-2")
    assert await state.lanes.result(TENANT, rid_of(1)) == b"result of 1"


async def test_a_take_over_with_everything_in_the_snapshot_goes_on_after_it(state: State) -> None:
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1")
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert (second.replay, second.cursor) == ((), 2)
    await state.lanes.submit(command(2))
    assert [entry.seq for entry in (await take(state.lanes, "r2", second.token, 2)).entries] == [2]


@pytest.mark.proves("I3")
async def test_a_snapshot_whose_reply_was_lost_answers_the_same(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 4)))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 3)
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1") is None
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1") is None
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 3, "snapshot-3") == "snapshot-1"
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 3, "snapshot-3") == "snapshot-1"
    assert await state.lanes.settle(LANE, "r1", owner.token, done(1)) == {1}  # trimmed: settled long ago
    assert await take(state.lanes, "r1", owner.token, 4) == await take(state.lanes, "r1", owner.token, 4)


@pytest.mark.proves("I9")
async def test_a_snapshot_above_an_unsettled_command_is_refused(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2, SAVE), command(3), command(4))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await take(state.lanes, "r1", owner.token, 2)
    await take(state.lanes, "r1", owner.token, 3, max_commands=1)
    await state.lanes.settle(LANE, "r1", owner.token, done(3))
    before = await state.lanes.lane(LANE)
    for seq in (3, 4):
        with pytest.raises(StateContention):
            await state.lanes.commit_snapshot(LANE, "r1", owner.token, seq, "too early")
    assert await state.lanes.lane(LANE) == before
    await state.lanes.settle(LANE, "r1", owner.token, [Settlement(2, completed(artifact="save-2"))])
    assert await state.lanes.commit_snapshot(LANE, "r1", owner.token, 3, "snapshot-3") is None


@pytest.mark.proves("I10", "R65")
@pytest.mark.parametrize("max_attempts", [2, 3])
async def test_a_command_that_kills_its_worker_is_failed_at_the_last_attempt(make_state: MakeState, max_attempts: int) -> None:
    state = await make_state(max_attempts=max_attempts)
    await open_lane(state.lanes, command(1), command(2), command(3))
    await run_up_to(state.lanes, "r0", (await own(state.lanes, "r0")).token, 0)
    await state.lanes.bury("r0")
    batches = []
    for attempt in range(max_attempts):
        owner = await own(state.lanes, f"r{attempt + 1}")
        batches.append([entry.seq for entry in (await take(state.lanes, f"r{attempt + 1}", owner.token, owner.cursor)).entries])
        await state.lanes.bury(f"r{attempt + 1}")
    assert batches == [[1, 2, 3]] + [[1]] * (max_attempts - 1)
    cursor = await state.lanes.tail(["settled"])
    last = await own(state.lanes, "last")
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert record.failure is not None
    times = {2: "twice", 3: "three times"}[max_attempts]
    assert record.failure.message == f"the worker died {times} while running this command"
    assert (record.state, record.failure.reason) == (FutureState.FAILED, "internal_error")
    assert (await state.lanes.wait(cursor, 0)).events == {"settled": [rid_of(1)]}
    assert await state.lanes.bodies([(rid_of(1), command(1).digest)]) == [None]
    assert (last.cursor, [entry.seq for entry in (await take(state.lanes, "last", last.token, last.cursor)).entries]) == (2, [2])


async def test_a_snapshot_may_lie_on_a_cancelled_command(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.lanes.cancel(TENANT, rid_of(1))
    await state.lanes.release(LANE, "r1", owner.token)
    second = await own(state.lanes, "r1")
    assert second.cursor == 2
    assert await state.lanes.commit_snapshot(LANE, "r1", second.token, 1, "snapshot-1") is None
    taken = await take(state.lanes, "r1", second.token, 2)
    assert ([entry.seq for entry in taken.entries], taken.cursor, taken.wait_ms) == ([2], 3, None)
