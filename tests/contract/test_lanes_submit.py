"""Getting commands into a lane: submit, void, budgets, cancel, close."""

import asyncio

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    FB,
    LANE,
    NEVER_MS,
    OPTIM,
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
    seqs,
    take,
)
from tinsmith.protocol.errors import NotFound, QuotaExceeded, ReasonCode, RequestRejected, SessionEnded
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.futures import Write
from tinsmith.state.lanes import Fenced, Submitted


async def test_entry_0_creates_the_lane_together_with_its_records(state: State) -> None:
    write = Write(f"{TENANT}/models", LANE, b"a model")
    answer = await state.lanes.submit(command(0, body=b"create", writes=(write,)))
    assert answer == Submitted(rid_of(0), FutureState.PENDING, is_fresh=True)
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.tenant, lane.base, lane.is_open, lane.owner, lane.durable, lane.snapshot) == (TENANT, BASE, True, None, -1, None)
    assert (lane.num_pending, lane.held_bytes, lane.last_seq) == (1, len(b"create"), 0)
    record = await state.store.get(f"{TENANT}/models", LANE)
    assert record is not None
    assert record.value == b"a model"


async def test_a_submitted_command_is_pending_and_readable(state: State) -> None:
    before_ms = await state.store.now_ms()
    await open_lane(state.lanes, command(1, body=b"the body"))
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert (record.rid, record.lane, record.seq, record.kind, record.state) == (rid_of(1), LANE, 1, FB, FutureState.PENDING)
    assert (record.tenant, record.session, record.digest) == (TENANT, "session of local", command(1).digest)
    assert (record.started_ms, record.ended_ms, record.failure, record.result_size) == (None, None, None, None)
    assert before_ms <= record.submitted_ms <= await state.store.now_ms()
    assert await state.lanes.bodies([(rid_of(1), command(1).digest), (rid_of(1), "other"), (rid_of(9), "x")]) == [b"the body", None, None]


async def test_nobody_else_can_look_at_a_record_or_cancel_it(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", 1, 0)
    for rid in (rid_of(0), rid_of(1), "unknown"):
        assert await state.lanes.look("stranger", rid) is None
        assert await state.lanes.result("stranger", rid) is None
        assert await state.lanes.cancel("stranger", rid) is None
    record = await state.lanes.look(TENANT, rid_of(1))
    assert record is not None
    assert record.state is FutureState.PENDING


@pytest.mark.proves("R31", "I3")
async def test_a_repeat_answers_the_first_id_and_changes_nothing(state: State) -> None:
    write = Write("t", "x", b"1")
    await open_lane(state.lanes)
    first = await state.lanes.submit(command(1, writes=(write,)))
    lane = await state.lanes.lane(LANE)
    repeat = await state.lanes.submit(command(1, writes=(write,)))
    assert (first.is_fresh, repeat.is_fresh) == (True, False)
    assert (first.rid, first.state) == (repeat.rid, repeat.state)
    assert await state.lanes.lane(LANE) == lane
    record = await state.store.get("t", "x")
    assert record is not None
    assert record.version == 1


@pytest.mark.proves("R31")
async def test_a_repeat_long_after_finds_the_record_as_it_is_now(state: State) -> None:
    await open_lane(state.lanes, command(1))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1")
    assert await state.lanes.submit(command(1)) == Submitted(rid_of(1), FutureState.COMPLETED, is_fresh=False)
    assert await state.lanes.submit(command(0)) == Submitted(rid_of(0), FutureState.COMPLETED, is_fresh=False)
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.num_pending, lane.held_bytes) == (0, 0)


@pytest.mark.proves("R31")
async def test_the_same_seq_twice_at_once_is_one_command(state: State) -> None:
    await open_lane(state.lanes)
    handles = [await state.connect() for _ in range(5)]
    answers = await asyncio.gather(*(lanes.submit(command(1)) for _, lanes in handles))
    assert sorted(answer.is_fresh for answer in answers) == [False] * 4 + [True]
    assert {answer.rid for answer in answers} == {rid_of(1)}
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.num_pending == 2


@pytest.mark.proves("R31")
async def test_a_used_seq_with_other_content_is_refused(state: State) -> None:
    await open_lane(state.lanes, command(1, body=b"first"))
    before = await state.lanes.lane(LANE)
    with pytest.raises(RequestRejected):
        await state.lanes.submit(command(1, digest="other", body=b"something else"))
    assert await state.lanes.lane(LANE) == before
    assert await state.lanes.bodies([(rid_of(1), command(1).digest)]) == [b"first"]


async def test_a_command_for_an_unknown_or_foreign_model_is_not_found(state: State) -> None:
    with pytest.raises(NotFound):
        await state.lanes.submit(command(1))
    await open_lane(state.lanes)
    with pytest.raises(NotFound):
        await state.lanes.submit(command(1, tenant="stranger"))
    with pytest.raises(NotFound):
        await state.lanes.void(command(1, tenant="stranger"), REFUSED)
    with pytest.raises(NotFound):
        await state.lanes.void(command(1, lane="unknown"), REFUSED)


async def test_a_closed_model_takes_nothing(state: State) -> None:
    await open_lane(state.lanes)
    await state.lanes.close(TENANT, LANE, ENDED)
    with pytest.raises(SessionEnded):
        await state.lanes.submit(command(1))
    with pytest.raises(SessionEnded):
        await state.lanes.void(command(1), REFUSED)
    assert await state.lanes.look(TENANT, rid_of(1)) is None


@pytest.mark.proves("I7", "R28")
async def test_a_lane_holds_a_bounded_number_of_pending_commands(make_state: MakeState) -> None:
    state = await make_state(max_pending=3)
    await open_lane(state.lanes, command(1), command(2))
    keys = sorted(await state.keys())
    with pytest.raises(QuotaExceeded):
        await state.lanes.submit(command(3, writes=(Write("t", "x", b"1"),)))
    assert await state.lanes.look(TENANT, rid_of(3)) is None
    assert await state.store.get("t", "x") is None
    assert [key for key in sorted(await state.keys()) if "body" not in key] == [key for key in keys if "body" not in key]
    assert (await state.lanes.submit(command(2))).is_fresh is False  # a repeat needs no room
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    assert (await state.lanes.submit(command(3))).is_fresh is True


@pytest.mark.proves("I7")
async def test_a_tenant_holds_a_bounded_number_of_bytes(make_state: MakeState) -> None:
    state = await make_state(max_tenant_bytes=1000)
    await state.lanes.submit(command(0, body=b"c" * 100))
    await state.lanes.submit(command(1, body=b"b" * 500))
    with pytest.raises(QuotaExceeded):
        await state.lanes.submit(command(2, body=b"b" * 500))
    with pytest.raises(QuotaExceeded):
        await state.lanes.pool_submit(sample("s:1", body=b"b" * 500))
    assert (await state.lanes.submit(command(0, lane="other", tenant="other", body=b"b" * 500))).is_fresh is True
    owner = await own(state.lanes, "r1")
    taken = await take(state.lanes, "r1", owner.token, 0, max_commands=2)
    assert taken.held_bytes == 600
    await state.lanes.settle(LANE, "r1", owner.token, done(0))
    assert await state.lanes.cancel(TENANT, rid_of(1)) is FutureState.CANCELLED
    assert (await state.lanes.submit(command(2, body=b"b" * 500))).is_fresh is True


@pytest.mark.proves("I7")
async def test_results_count_against_the_tenant_until_they_are_freed(make_state: MakeState) -> None:
    state = await make_state(max_tenant_bytes=1000, result_kept_ms=100)
    await state.lanes.pool_submit(sample("s:1", body=b"b" * 10))
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 10, 1000)
    await state.lanes.pool_settle("s1", [(entry, completed(b"r" * 900))])
    with pytest.raises(QuotaExceeded):
        await state.lanes.pool_submit(sample("s:2", body=b"b" * 200))
    assert await state.lanes.result(TENANT, entry.rid) == b"r" * 900
    await state.pass_ms(150)
    assert (await state.lanes.sweep(stuck_ms=1_000_000, orphan_ms=NEVER_MS)).num_results == 1
    assert (await state.lanes.pool_submit(sample("s:2", body=b"b" * 200))).is_fresh is True


@pytest.mark.proves("R28", "R66")
async def test_a_refusal_is_a_failed_future_and_no_hole(state: State) -> None:
    await open_lane(state.lanes, command(1), command(3))
    answer = await state.lanes.void(command(2, body=b"ignored"), REFUSED)
    assert answer == Submitted(rid_of(2), FutureState.FAILED, is_fresh=True)
    record = await state.lanes.look(TENANT, rid_of(2))
    assert record is not None
    assert record.failure == REFUSED
    assert record.ended_ms is not None
    owner = await own(state.lanes, "r1")
    assert seqs(await take(state.lanes, "r1", owner.token, 0)) == [0]
    taken = await take(state.lanes, "r1", owner.token, 1)
    assert (seqs(taken), taken.cursor, taken.wait_ms) == ([1, 3], 4, None)
    assert await state.lanes.bodies([(rid_of(2), command(2).digest)]) == [None]


@pytest.mark.proves("R31", "I3")
async def test_a_refusal_is_repeatable_and_uses_up_its_seq(state: State) -> None:
    await open_lane(state.lanes)
    await state.lanes.void(command(1), REFUSED)
    assert await state.lanes.void(command(1), REFUSED) == Submitted(rid_of(1), FutureState.FAILED, is_fresh=False)
    with pytest.raises(RequestRejected):
        await state.lanes.submit(command(1, digest="mended"))
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.num_pending == 1


async def test_a_refused_barrier_proves_that_lower_seqs_are_final(state: State) -> None:
    await open_lane(state.lanes, command(3))
    await state.lanes.void(command(2, OPTIM), REFUSED)
    owner = await own(state.lanes, "r1")
    assert seqs(await take(state.lanes, "r1", owner.token, 0)) == [0]
    assert seqs(await take(state.lanes, "r1", owner.token, 1)) == [3]


@pytest.mark.proves("R25")
async def test_only_what_has_not_started_can_be_cancelled(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    await state.lanes.settle(LANE, "r1", owner.token, done(0))
    await take(state.lanes, "r1", owner.token, 1, max_commands=1)
    assert await state.lanes.cancel(TENANT, rid_of(0)) is FutureState.COMPLETED
    assert await state.lanes.cancel(TENANT, rid_of(1)) is FutureState.RUNNING
    assert await state.lanes.cancel(TENANT, rid_of(2)) is FutureState.CANCELLED
    assert await state.lanes.cancel(TENANT, rid_of(2)) is FutureState.CANCELLED
    assert await state.lanes.cancel(TENANT, "unknown") is None
    record = await state.lanes.look(TENANT, rid_of(2))
    assert record is not None
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.CANCELLED
    assert await state.lanes.bodies([(rid_of(2), command(2).digest)]) == [None]
    assert seqs(await take(state.lanes, "r1", owner.token, 2)) == [3]


@pytest.mark.proves("R67")
async def test_close_fails_what_is_open_and_fences_the_owner(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await take(state.lanes, "r1", owner.token, 2, max_commands=1)
    write = Write("t", "x", b"closed")
    await state.lanes.close(TENANT, LANE, ENDED, writes=(write,))
    states = [record.state if (record := await state.lanes.look(TENANT, rid_of(seq))) else None for seq in range(4)]
    assert states == [FutureState.COMPLETED, FutureState.COMPLETED, FutureState.FAILED, FutureState.FAILED]
    with pytest.raises(Fenced):
        await take(state.lanes, "r1", owner.token, 3)
    with pytest.raises(Fenced):
        await state.lanes.settle(LANE, "r1", owner.token, done(2))
    with pytest.raises(Fenced):
        await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "late")
    assert await state.lanes.acquire(LANE, "r1") is None
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert (lane.is_open, lane.num_pending, lane.held_bytes) == (False, 0, 0)
    record = await state.store.get("t", "x")
    assert record is not None


async def test_close_is_idempotent_and_ignores_what_it_does_not_know(state: State) -> None:
    await open_lane(state.lanes)
    write = Write("t", "x", b"closed")
    await state.lanes.close("stranger", LANE, ENDED, writes=(write,))
    await state.lanes.close(TENANT, "unknown", ENDED, writes=(write,))
    lane = await state.lanes.lane(LANE)
    assert lane is not None
    assert lane.is_open
    assert await state.store.get("t", "x") is None
    await state.lanes.close(TENANT, LANE, ENDED, writes=(write,))
    closed = await state.lanes.lane(LANE)
    await state.lanes.close(TENANT, LANE, REFUSED, writes=(write,))
    assert await state.lanes.lane(LANE) == closed
    record = await state.lanes.look(TENANT, rid_of(0))
    assert record is not None
    assert record.failure == ENDED
    held = await state.store.get("t", "x")
    assert held is not None
    assert held.version == 1


async def test_an_unknown_lane_is_none(state: State) -> None:
    assert await state.lanes.lane("unknown") is None
