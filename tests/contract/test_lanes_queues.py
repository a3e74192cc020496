"""Who waits for a base model, for those who watch."""

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
    take,
)
from tinsmith.state.futures import pool_lane
from tinsmith.state.lanes import QueueInfo, Role


async def submitted_ms(state: State, rid: str, tenant: str = TENANT) -> int:
    record = await state.lanes.look(tenant, rid)
    assert record is not None
    return record.submitted_ms


def model_queue(num_pending: int, oldest_ms: int | None, owner: str | None = None) -> QueueInfo:
    return QueueInfo(LANE, TENANT, BASE, Role.TRAINER, owner, num_pending, oldest_ms)


def pool_queue(num_pending: int, oldest_ms: int | None, tenant: str = TENANT) -> QueueInfo:
    return QueueInfo(pool_lane(BASE, tenant), tenant, BASE, Role.SAMPLER, None, num_pending, oldest_ms)


async def test_a_lane_is_a_queue_while_it_has_work(state: State) -> None:
    assert await state.lanes.queues(BASE) == []
    await open_lane(state.lanes)
    await state.pass_ms(5)
    await state.lanes.submit(command(1))
    assert await state.lanes.queues(BASE) == [model_queue(2, await submitted_ms(state, rid_of(0)))]
    assert await state.lanes.queues("another") == []
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert await state.lanes.queues(BASE) == [model_queue(1, await submitted_ms(state, rid_of(1)), "r1")]
    await run_up_to(state.lanes, "r1", owner.token, 1)
    assert await state.lanes.queues(BASE) == []


async def test_what_runs_counts_and_is_not_the_head(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.pass_ms(5)
    await state.lanes.submit(command(3))
    await take(state.lanes, "r1", owner.token, 1, max_commands=2)
    assert await state.lanes.queues(BASE) == [model_queue(3, await submitted_ms(state, rid_of(3)), "r1")]
    await take(state.lanes, "r1", owner.token, 3)
    assert await state.lanes.queues(BASE) == [model_queue(3, None, "r1")]
    await state.lanes.release(LANE, "r1", owner.token)
    assert await state.lanes.queues(BASE) == [model_queue(3, await submitted_ms(state, rid_of(1)))]


async def test_the_head_is_not_what_was_cancelled_or_never_came(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await state.pass_ms(5)
    await state.lanes.submit(command(4))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await state.lanes.cancel(TENANT, rid_of(1))
    assert await state.lanes.queues(BASE) == [model_queue(1, await submitted_ms(state, rid_of(4)), "r1")]


async def test_a_lane_whose_owner_is_dead_waits_for_a_trainer(state: State) -> None:
    await open_lane(state.lanes)
    await own(state.lanes, "r1")
    await state.lanes.bury("r1")
    (queue,) = await state.lanes.queues(BASE)
    assert queue.owner is None


async def test_a_closed_lane_is_no_queue(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await state.lanes.close(TENANT, LANE, ENDED)
    assert await state.lanes.queues(BASE) == []


async def test_pools_are_queues_by_tenant(state: State) -> None:
    first = sample("s:1")
    await state.lanes.pool_submit(first)
    await state.pass_ms(5)
    for submission in (sample("s:2"), sample("s:1", tenant="other"), sample("s:3", base="another")):
        await state.lanes.pool_submit(submission)
    other = pool_queue(1, await submitted_ms(state, sample("s:1", tenant="other").rid, "other"), "other")
    assert await state.lanes.queues(BASE) == [pool_queue(2, await submitted_ms(state, first.rid)), other]
    await state.lanes.renew(replica("s1"))
    entries = await state.lanes.pool_take(BASE, "s1", 3, 1000)
    assert await state.lanes.queues(BASE) == [pool_queue(2, None), pool_queue(1, None, "other")]
    await state.lanes.pool_settle("s1", [(entry, completed()) for entry in entries if entry.rid != first.rid])
    assert await state.lanes.queues(BASE) == [pool_queue(1, None)]
    await state.lanes.bury("s1")
    assert await state.lanes.queues(BASE) == [pool_queue(1, await submitted_ms(state, first.rid))]
    await state.lanes.cancel(TENANT, first.rid)
    assert await state.lanes.queues(BASE) == []


async def test_a_session_that_ended_is_in_no_queue(state: State) -> None:
    for key in ("s:1", "s:2"):
        await state.lanes.pool_submit(sample(key))
    await state.lanes.renew(replica("s1"))
    await state.lanes.pool_take(BASE, "s1", 1, 1000)
    await state.lanes.close_session(TENANT, "session of local", ENDED)
    assert await state.lanes.queues(BASE) == []


@pytest.mark.proves("R52")
async def test_what_has_failed_by_time_is_in_no_queue(make_state: MakeState) -> None:
    state = await make_state()
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    await state.lanes.settle(LANE, "r1", owner.token, done(0))
    await state.lanes.submit(command(1))
    await state.lanes.pool_submit(sample("s:1"))
    await state.pass_ms(50)
    swept = await state.lanes.sweep(stuck_ms=40, orphan_ms=NEVER_MS)
    assert swept.num_stuck == 2
    assert await state.lanes.queues(BASE) == []
