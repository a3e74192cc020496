"""What has ended is not handed out again: not after a cancel, a refusal, a settle or a take-over, which lists it for the replay alone."""

import pytest

from tests.contract.conftest import State
from tests.contract.scenes import (
    BASE,
    LANE,
    OPTIM,
    REFUSED,
    TENANT,
    command,
    completed,
    done,
    failed,
    open_lane,
    own,
    replica,
    rid_of,
    rids,
    run_up_to,
    sample,
    seqs,
    take,
)
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import Settlement


@pytest.mark.proves("R29")
async def test_a_command_that_was_cancelled_is_not_handed_out(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    assert await state.lanes.cancel(TENANT, rid_of(2)) is FutureState.CANCELLED
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [1, 3]
    record = await state.lanes.look(TENANT, rid_of(2))
    assert record is not None
    assert (record.state, record.started_ms) == (FutureState.CANCELLED, None)


@pytest.mark.proves("R29")
async def test_a_command_that_failed_at_birth_is_not_handed_out(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await state.lanes.void(command(2, OPTIM), REFUSED)
    await state.lanes.submit(command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [1, 3]


@pytest.mark.proves("R29")
async def test_a_command_that_was_settled_is_not_handed_out_again_from_any_cursor(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    for cursor in (0, 1, 2):
        assert not set(seqs(await take(state.lanes, "r1", owner.token, cursor))) & {0, 1}


@pytest.mark.proves("R29")
async def test_a_take_over_runs_nothing_that_has_ended_but_to_rebuild(state: State) -> None:
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 5)))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 0)
    await take(state.lanes, "r1", first.token, 1, max_commands=2)
    await state.lanes.settle(LANE, "r1", first.token, [*done(1), Settlement(2, failed())])
    await state.lanes.cancel(TENANT, rid_of(3))
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert [entry.seq for entry in second.replay] == [0, 1]  # completed: they made what the adapter holds
    assert seqs(await take(state.lanes, "r2", second.token, second.cursor)) == [4]


@pytest.mark.proves("R29")
async def test_a_sample_that_has_ended_is_not_handed_out(state: State) -> None:
    ids = [(await state.lanes.pool_submit(sample(f"s:{index}"))).rid for index in range(3)]
    await state.lanes.cancel(TENANT, ids[1])
    await state.lanes.renew(replica("s1"))
    taken = await state.lanes.pool_take(BASE, "s1", 1, 100_000)
    assert rids(taken) == [ids[0]]
    await state.lanes.pool_settle("s1", [(taken[0], completed())])
    await state.lanes.bury("s1")
    await state.lanes.renew(replica("s2"))
    assert rids(await state.lanes.pool_take(BASE, "s2", 100, 100_000)) == [ids[2]]
