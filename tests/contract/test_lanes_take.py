"""Ownership and hand-out: acquire, take, holes, renew, release."""

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    FB,
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
    seqs,
    take,
)
from tinsmith.protocol.errors import ReasonCode
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import Fenced, LeaseExpired, Settlement


async def test_a_fresh_lane_is_acquired_from_its_beginning(state: State) -> None:
    await open_lane(state.lanes, command(1))
    acquired = await own(state.lanes, "r1")
    assert (acquired.token, acquired.cursor, acquired.replay) == (1, 0, ())
    assert (acquired.info.owner, acquired.info.token, acquired.info.durable) == ("r1", 1, -1)
    assert await state.lanes.lane(LANE) == acquired.info


async def test_acquire_needs_an_open_lane_and_the_own_lease(state: State) -> None:
    with pytest.raises(LeaseExpired):
        await state.lanes.acquire(LANE, "r1")
    await state.lanes.renew(replica("r1"))
    assert await state.lanes.acquire("unknown", "r1") is None


async def test_a_lane_with_a_living_owner_is_not_taken_over(state: State) -> None:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.renew(replica("r2"))
    assert await state.lanes.acquire(LANE, "r2") is None


async def test_acquire_repeated_by_the_owner_answers_the_same(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2))
    first = await own(state.lanes, "r1")
    assert await state.lanes.acquire(LANE, "r1") == first
    await run_up_to(state.lanes, "r1", first.token, 0)
    await take(state.lanes, "r1", first.token, 1, max_commands=1)
    again = await state.lanes.acquire(LANE, "r1")
    assert again is not None
    assert (again.token, again.cursor, [entry.seq for entry in again.replay]) == (first.token, 1, [0])
    assert seqs(await take(state.lanes, "r1", first.token, 1)) == [1, 2]


async def test_entries_come_in_order_and_up_to_a_barrier(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2, FORWARD), command(3, OPTIM), command(4))
    owner = await own(state.lanes, "r1")
    first = await take(state.lanes, "r1", owner.token, 0)
    assert (seqs(first), first.cursor) == ([0], 1)
    second = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(second), second.cursor, second.wait_ms) == ([1, 2, 3], 4, None)
    assert [entry.kind for entry in second.entries] == [FB, FORWARD, OPTIM]
    entry = second.entries[0]
    assert (entry.rid, entry.digest, entry.size, entry.tokens) == (rid_of(1), command(1).digest, len(command(1).body), 10)
    assert (entry.state, entry.attempts, entry.artifact) == (FutureState.RUNNING, 0, None)
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert (record.state, record.started_ms is not None) == (FutureState.RUNNING, True)


async def test_a_take_keeps_to_its_budgets_but_hands_out_one(state: State) -> None:
    await open_lane(state.lanes, *(command(seq, tokens=10) for seq in range(1, 7)))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert seqs(await take(state.lanes, "r1", owner.token, 1, max_commands=2)) == [1, 2]
    assert seqs(await take(state.lanes, "r1", owner.token, 3, max_tokens=29)) == [3, 4]
    assert seqs(await take(state.lanes, "r1", owner.token, 5, max_tokens=3)) == [5]
    last = await take(state.lanes, "r1", owner.token, 6)
    assert (seqs(last), last.cursor) == ([6], 7)


async def test_an_empty_lane_hands_out_nothing(state: State) -> None:
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert (taken.entries, taken.cursor, taken.wait_ms, taken.held_bytes) == ((), 1, None, len(command(0).body))


@pytest.mark.proves("I3")
async def test_a_take_whose_reply_was_lost_hands_the_same_out_again(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    lost = await take(state.lanes, "r1", owner.token, 1, max_commands=2)
    again = await take(state.lanes, "r1", owner.token, 1, max_commands=2)
    assert again == lost
    assert seqs(again) == [1, 2]


async def test_terminal_entries_are_passed_over(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 6)))
    await state.lanes.cancel(TENANT, rid_of(2))
    await state.lanes.cancel(TENANT, rid_of(5))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(taken), taken.cursor) == ([1, 3, 4], 6)


async def test_strangers_to_a_lane_are_fenced_and_a_lapsed_owner_is_told_to_renew(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    for lane, name, token in (
        ("unknown", "r1", 1),
        (LANE, "r2", owner.token),
        (LANE, "r1", owner.token + 1),
        (LANE, "r1", owner.token - 1),
    ):
        with pytest.raises(Fenced):
            await take(state.lanes, name, token, 0, lane=lane)
    await state.pass_ms(300)
    with pytest.raises(LeaseExpired):
        await take(state.lanes, "r1", owner.token, 0)
    with pytest.raises(LeaseExpired):
        await state.lanes.acquire(LANE, "r1")
    await state.lanes.renew(replica("r1"))
    assert seqs(await take(state.lanes, "r1", owner.token, 0)) == [0]


@pytest.mark.proves("I6", "R66")
async def test_a_turn_that_arrives_out_of_order_runs_in_order(state: State) -> None:
    await open_lane(state.lanes, command(2), command(3), command(4))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    blocked = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(blocked), blocked.cursor) == ([], 1)
    assert blocked.wait_ms is not None
    assert 100_000 < blocked.wait_ms <= 120_000
    await state.lanes.submit(command(1))
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [1, 2, 3, 4]


@pytest.mark.proves("I6", "R66")
async def test_a_hole_in_the_middle_lets_out_what_stands_before_it(state: State) -> None:
    await open_lane(state.lanes, command(1), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(taken), taken.cursor) == ([1], 2)
    assert taken.wait_ms is not None


@pytest.mark.proves("I6", "R66")
async def test_a_barrier_above_a_hole_ends_it_at_once(state: State) -> None:
    await open_lane(state.lanes, command(1), command(3), command(5, OPTIM))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(taken), taken.cursor, taken.wait_ms) == ([1, 3, 5], 6, None)


@pytest.mark.proves("I6", "R66")
async def test_a_hole_ends_when_the_lane_was_silent_for_the_grace(make_state: MakeState) -> None:
    state = await make_state(hole_grace_ms=300)
    await open_lane(state.lanes, command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.pass_ms(200)
    await state.lanes.submit(command(4))  # an arrival starts the grace anew
    await state.pass_ms(200)
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert seqs(taken) == []
    assert taken.wait_ms is not None
    await state.pass_ms(taken.wait_ms + 20)
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [2, 4]


@pytest.mark.proves("I6", "R66")
async def test_a_late_arrival_of_a_given_up_seq_fails_at_birth(state: State) -> None:
    await open_lane(state.lanes, command(3, OPTIM), command(4))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 3)
    before = await state.lanes.lane(LANE)
    late = await state.lanes.submit(command(1))
    assert (late.state, late.is_fresh) == (FutureState.FAILED, True)
    record = await state.lanes.look(TENANT, late.rid)
    assert record is not None
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.REQUEST_REJECTED
    assert "its turn was given up" in record.failure.message
    assert await state.lanes.lane(LANE) == before
    assert (await state.lanes.submit(command(1))).is_fresh is False
    assert await state.lanes.bodies([(late.rid, command(1).digest)]) == [None]
    await state.lanes.void(command(2), record.failure)
    assert seqs(await take(state.lanes, "r1", owner.token, 4)) == [4]


@pytest.mark.proves("I6")
async def test_a_hole_of_any_width_costs_one_step(state: State) -> None:
    far = 2_000_000_000
    await open_lane(state.lanes, command(far), command(far + 1, OPTIM))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    for _ in range(2):
        taken = await take(state.lanes, "r1", owner.token, 1)
        assert (seqs(taken), taken.cursor) == ([far, far + 1], far + 2)


@pytest.mark.proves("I6")
async def test_a_take_over_does_not_close_a_hole_early(state: State) -> None:
    await open_lane(state.lanes, command(1), command(3))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 1)
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert seqs(await take(state.lanes, "r2", second.token, second.cursor)) == []
    assert (await state.lanes.submit(command(2))).state is FutureState.PENDING
    assert seqs(await take(state.lanes, "r2", second.token, second.cursor)) == [2, 3]


@pytest.mark.proves("I6")
async def test_a_take_over_does_not_reopen_a_hole(state: State) -> None:
    await open_lane(state.lanes, command(2), command(3, OPTIM))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    assert seqs(await take(state.lanes, "r1", first.token, 1)) == [2, 3]
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert (await state.lanes.submit(command(1))).state is FutureState.FAILED
    assert seqs(await take(state.lanes, "r2", second.token, second.cursor)) == [2]


async def test_a_take_over_replays_what_completed_and_goes_on_after_it(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 6)))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 2)
    await take(state.lanes, "r1", first.token, 3, max_commands=1)
    await state.lanes.settle(LANE, "r1", first.token, [Settlement(3, failed())])
    await take(state.lanes, "r1", first.token, 4, max_commands=1)
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert (second.token, second.cursor) == (first.token + 1, 4)
    assert [(entry.seq, entry.state) for entry in second.replay] == [(seq, FutureState.COMPLETED) for seq in (0, 1, 2)]
    bodies = await state.lanes.bodies([(entry.rid, entry.digest) for entry in second.replay])
    assert bodies == [command(seq).body for seq in range(3)]
    assert await state.lanes.bodies([(rid_of(3), command(3).digest)]) == [None]
    record = await state.lanes.look(TENANT, rid_of(4))
    assert record is not None
    assert record.state is FutureState.PENDING
    with pytest.raises(Fenced):
        await take(state.lanes, "r1", first.token, 4)


async def test_what_ran_when_its_worker_died_runs_alone(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 6)))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    assert seqs(await take(state.lanes, "r1", first.token, 1, max_commands=2)) == [1, 2]
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    alone = await take(state.lanes, "r2", second.token, 1)
    assert [(entry.seq, entry.attempts) for entry in alone.entries] == [(1, 1)]
    assert await state.lanes.acquire(LANE, "r2") is not None  # a repeat counts nothing
    assert [(entry.seq, entry.attempts) for entry in (await take(state.lanes, "r2", second.token, 2)).entries] == [(2, 1)]
    assert seqs(await take(state.lanes, "r2", second.token, 3)) == [3, 4, 5]


async def test_an_entry_with_an_attempt_ends_a_batch(state: State) -> None:
    await open_lane(state.lanes, command(2))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    await state.lanes.submit(command(1))
    await take(state.lanes, "r1", first.token, 1, max_commands=1)
    await state.lanes.release(LANE, "r1", first.token)
    second = await own(state.lanes, "r1")
    await take(state.lanes, "r1", second.token, 2)  # out of its order, so that only the later one has cost a worker
    await state.lanes.bury("r1")
    third = await own(state.lanes, "r2")
    assert seqs(await take(state.lanes, "r2", third.token, 1)) == [1]


async def test_a_save_under_way_is_replayed_in_its_place_and_stays_running(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2, SAVE), command(3), command(4, SAVE))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 1)
    assert seqs(await take(state.lanes, "r1", first.token, 2)) == [2]
    assert seqs(await take(state.lanes, "r1", first.token, 3)) == [3, 4]
    await state.lanes.settle(LANE, "r1", first.token, done(3))
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    states = [(entry.seq, entry.state, entry.attempts) for entry in second.replay]
    completed_state, running = FutureState.COMPLETED, FutureState.RUNNING
    assert states == [(0, completed_state, 0), (1, completed_state, 0), (2, running, 1), (3, completed_state, 0)]
    assert second.cursor == 4
    assert await state.lanes.settle(LANE, "r2", second.token, [Settlement(2, completed(artifact="save-2"))]) == frozenset()
    assert [(entry.seq, entry.attempts) for entry in (await take(state.lanes, "r2", second.token, 4)).entries] == [(4, 1)]


async def test_a_save_under_way_survives_a_release(state: State) -> None:
    await open_lane(state.lanes, command(1, SAVE), command(2))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    await take(state.lanes, "r1", first.token, 1)
    await take(state.lanes, "r1", first.token, 2)
    await state.lanes.settle(LANE, "r1", first.token, done(2))
    await state.lanes.release(LANE, "r1", first.token)
    second = await own(state.lanes, "r2")
    assert [(entry.seq, entry.state, entry.attempts) for entry in second.replay if entry.kind.is_save] == [(1, FutureState.RUNNING, 0)]
    assert await state.lanes.settle(LANE, "r2", second.token, [Settlement(1, completed(artifact="save-1"))]) == frozenset()


async def test_a_completed_save_is_replayed_with_its_artifact(state: State) -> None:
    await open_lane(state.lanes, command(1, SAVE))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    await take(state.lanes, "r1", first.token, 1)
    await state.lanes.settle(LANE, "r1", first.token, [Settlement(1, completed(artifact="save-1"))])
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert [(entry.seq, entry.artifact) for entry in second.replay] == [(0, None), (1, "save-1")]
    assert await state.lanes.bodies([(rid_of(1), command(1, SAVE).digest)]) == [command(1, SAVE).body]


async def test_release_gives_the_lane_and_its_running_entries_back(state: State) -> None:
    await open_lane(state.lanes, command(1))
    first = await own(state.lanes, "r1")
    await take(state.lanes, "r1", first.token, 0)
    await state.lanes.release(LANE, "r1", first.token)
    await state.lanes.release(LANE, "r1", first.token)  # a lost reply
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.owner is None
    with pytest.raises(Fenced):
        await take(state.lanes, "r1", first.token, 0)
    second = await own(state.lanes, "r2")
    assert [(entry.seq, entry.attempts) for entry in (await take(state.lanes, "r2", second.token, 0)).entries] == [(0, 0)]
    with pytest.raises(Fenced):
        await state.lanes.release(LANE, "r1", first.token)
    with pytest.raises(Fenced):
        await state.lanes.release("unknown", "r1", first.token)


async def test_renew_lists_lanes_with_work_and_no_owner_oldest_first(state: State) -> None:
    for lane in ("b", "a", "c"):
        await state.lanes.submit(command(0, lane=lane))
        await state.pass_ms(5)
    await state.lanes.submit(command(0, lane="elsewhere", base="other"))
    assert await state.lanes.renew(replica("r1")) == ["b", "a", "c"]
    assert await state.lanes.renew(replica("r9", base="other")) == ["elsewhere"]
    await own(state.lanes, "r1", "b")
    assert await state.lanes.renew(replica("r2")) == ["a", "c"]
    await run_up_to(state.lanes, "r1", 1, 0, lane="b")
    await state.lanes.release("b", "r1", 1)
    assert await state.lanes.renew(replica("r2")) == ["a", "c"]  # nothing to do in b
    await state.lanes.close(TENANT, "a", ENDED)
    assert await state.lanes.renew(replica("r2")) == ["c"]


async def test_renew_passes_on_the_lanes_of_the_dead(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await open_lane(state.lanes)
    first = await own(state.lanes, "r1")
    assert await state.lanes.renew(replica("r2")) == []
    await state.pass_ms(300)
    assert await state.lanes.renew(replica("r2")) == [LANE]
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.owner, lane.token) == ("r1", first.token)
    acquired = await state.lanes.acquire(LANE, "r2")
    assert acquired is not None
    assert acquired.token == first.token + 1
    assert await state.lanes.renew(replica("r3")) == []


@pytest.mark.proves("R53")
async def test_the_living_replicas_are_those_whose_lease_runs(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await state.lanes.renew(replica("r1"))
    await state.lanes.renew(replica("r2"))
    await state.lanes.renew(replica("x", base="other"))
    assert sorted(await state.lanes.replicas(BASE), key=lambda held: held.id) == [replica("r1"), replica("r2")]
    await state.lanes.bury("r1")
    await state.lanes.bury("never known")
    assert await state.lanes.replicas(BASE) == [replica("r2")]
    await state.pass_ms(300)
    assert await state.lanes.replicas(BASE) == []


async def test_a_lane_of_a_buried_replica_is_free_at_once(state: State) -> None:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.bury("r1")
    assert await state.lanes.renew(replica("r2")) == [LANE]
    assert (await own(state.lanes, "r2")).token == 2
