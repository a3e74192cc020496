"""Samples: submit, take in turns, settle, reclaim."""

import asyncio
from dataclasses import replace

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import BASE, ENDED, TENANT, completed, failed, replica, rids, sample
from tinsmith.protocol.errors import QuotaExceeded, RequestRejected, SessionEnded
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.futures import Write
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import LeaseExpired, PoolEntry, Submitted


async def submit(state: State, *keys: str, tenant: str = TENANT, tokens: int = 10) -> list[str]:
    return [(await state.lanes.pool_submit(sample(key, tenant=tenant, tokens=tokens))).rid for key in keys]


async def take(state: State, name: str, max_entries: int = 100, max_tokens: int = 100_000) -> list[PoolEntry]:
    return await state.lanes.pool_take(BASE, name, max_entries, max_tokens)


async def test_a_sample_is_taken_run_and_settled(state: State) -> None:
    submission = sample("s:1", body=b"prompt", tokens=7, digest="d1")
    assert await state.lanes.pool_submit(submission) == Submitted(submission.rid, FutureState.PENDING, is_fresh=True)
    record = await state.lanes.look(TENANT, submission.rid)
    assert record is not None
    assert (record.seq, record.kind, record.state, record.session) == ("s:1", Kind.SAMPLE, FutureState.PENDING, "session of local")
    await state.lanes.renew(replica("s1"))
    (entry,) = await take(state, "s1")
    assert (entry.rid, entry.tenant, entry.digest, entry.size, entry.tokens, entry.attempts) == (submission.rid, TENANT, "d1", 6, 7, 0)
    assert await state.lanes.bodies([(entry.rid, entry.digest)]) == [b"prompt"]
    record = await state.lanes.look(TENANT, entry.rid)
    assert record is not None
    assert record.state is FutureState.RUNNING
    write = Write("t", "x", b"1")
    assert await state.lanes.pool_settle("s1", [(entry, completed(b"text", writes=(write,)))]) == frozenset()
    record = await state.lanes.look(TENANT, entry.rid)
    assert record is not None
    assert (record.state, record.result_size) == (FutureState.COMPLETED, 4)
    assert await state.lanes.result(TENANT, entry.rid) == b"text"
    assert await state.lanes.bodies([(entry.rid, entry.digest)]) == [None]
    assert await state.store.get("t", "x") is not None
    assert await take(state, "s1") == []


@pytest.mark.proves("R31", "I3")
async def test_a_sample_is_submitted_once(state: State) -> None:
    await submit(state, "s:1")
    assert (await state.lanes.pool_submit(sample("s:1"))).is_fresh is False
    with pytest.raises(RequestRejected):
        await state.lanes.pool_submit(sample("s:1", digest="other"))
    await state.lanes.renew(replica("s1"))
    assert len(await take(state, "s1")) == 1


@pytest.mark.proves("I7")
async def test_a_pool_holds_a_bounded_number_of_samples_a_tenant(make_state: MakeState) -> None:
    state = await make_state(max_pending=2)
    await submit(state, "s:1", "s:2")
    with pytest.raises(QuotaExceeded):
        await submit(state, "s:3")
    assert await state.lanes.look(TENANT, sample("s:3").rid) is None
    assert (await state.lanes.pool_submit(sample("s:3", tenant="other"))).is_fresh is True


async def test_a_take_needs_a_lease(state: State) -> None:
    await submit(state, "s:1")
    with pytest.raises(LeaseExpired):
        await take(state, "s1")


async def test_a_take_keeps_to_its_budgets_but_hands_out_one(state: State) -> None:
    expected = await submit(state, *(f"s:{index}" for index in range(6)))
    await state.lanes.renew(replica("s1"))
    assert rids(await take(state, "s1", max_tokens=3)) == expected[:1]
    assert rids(await take(state, "s1", max_tokens=29)) == expected[1:3]
    assert rids(await take(state, "s1", max_entries=2)) == expected[3:5]
    assert rids(await take(state, "s1")) == expected[5:]


async def test_pools_of_other_base_models_are_not_touched(state: State) -> None:
    await state.lanes.pool_submit(sample("s:1", base="other"))
    await state.lanes.renew(replica("s1"))
    assert await take(state, "s1") == []


@pytest.mark.proves("R68")
async def test_one_tenants_backlog_does_not_delay_anothers_sample(state: State) -> None:
    await submit(state, *(f"a:{index}" for index in range(60)), tenant="a", tokens=100)
    await state.lanes.renew(replica("s1"))
    await take(state, "s1", max_entries=8)
    (single,) = await submit(state, "b:1", tenant="b", tokens=100)
    assert single in rids(await take(state, "s1", max_entries=8))


@pytest.mark.proves("R68")
async def test_tenants_share_by_tokens_and_not_by_samples(state: State) -> None:
    await submit(state, *(f"a:{index}" for index in range(20)), tenant="a", tokens=1000)
    await submit(state, *(f"b:{index}" for index in range(60)), tenant="b", tokens=100)
    await state.lanes.renew(replica("s1"))
    tokens = {"a": 0, "b": 0}
    for _ in range(44):
        (entry,) = await take(state, "s1", max_entries=1)
        tokens[entry.tenant] += entry.tokens
    assert abs(tokens["a"] - tokens["b"]) <= 2000
    assert min(tokens.values()) >= 3000


@pytest.mark.proves("R68")
async def test_a_tenant_that_pauses_saves_nothing_up(state: State) -> None:
    await submit(state, *(f"a:{index}" for index in range(40)), tenant="a", tokens=100)
    await state.lanes.renew(replica("s1"))
    await take(state, "s1", max_entries=20)
    await submit(state, *(f"b:{index}" for index in range(20)), tenant="b", tokens=100)
    batch = await take(state, "s1", max_entries=10)
    assert 3 <= sum(entry.tenant == "a" for entry in batch) <= 7


async def test_several_takers_never_share_a_sample(state: State) -> None:
    expected = await submit(state, *(f"s:{index}" for index in range(40)))
    handles = [await state.connect() for _ in range(4)]
    for index, (_, lanes) in enumerate(handles):
        await lanes.renew(replica(f"s{index}"))
    batches = await asyncio.gather(*(lanes.pool_take(BASE, f"s{index}", 10, 1000) for index, (_, lanes) in enumerate(handles)))
    assert sorted(rid for batch in batches for rid in rids(batch)) == sorted(expected)


@pytest.mark.proves("I4", "I3")
async def test_a_second_settle_is_not_taken(state: State) -> None:
    await submit(state, "s:1")
    await state.lanes.renew(replica("s1"))
    (entry,) = await take(state, "s1")
    assert await state.lanes.pool_settle("s1", [(entry, completed(b"first"))]) == frozenset()
    write = Write("t", "x", b"1")
    assert await state.lanes.pool_settle("s1", [(entry, failed()), (entry, completed(writes=(write,)))]) == {entry.rid}
    assert await state.lanes.result(TENANT, entry.rid) == b"first"
    assert await state.store.get("t", "x") is None


@pytest.mark.proves("I1")
async def test_a_dead_takers_samples_go_to_another_under_a_new_token(state: State) -> None:
    expected = await submit(state, "s:1", "s:2", "s:3")
    await state.lanes.renew(replica("s1"))
    first = await take(state, "s1", max_entries=2)
    await state.lanes.bury("s1")
    await state.lanes.renew(replica("s2"))
    (alone,) = await take(state, "s2")
    assert (alone.rid, alone.attempts, alone.token > first[0].token) == (expected[0], 1, True)
    await state.lanes.renew(replica("s1"))
    assert await state.lanes.pool_settle("s1", [(entry, completed()) for entry in first]) == set(expected[:2])
    assert await state.lanes.pool_settle("s1", [(alone, completed())]) == {alone.rid}  # it is s2's
    assert await state.lanes.pool_settle("s2", [(alone, completed(b"mine"))]) == frozenset()
    assert await state.lanes.result(TENANT, alone.rid) == b"mine"
    assert [(entry.rid, entry.attempts) for entry in await take(state, "s2")] == [(expected[1], 1)]
    assert [(entry.rid, entry.attempts) for entry in await take(state, "s2")] == [(expected[2], 0)]


async def test_a_lapsed_lease_loses_its_samples(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    (rid,) = await submit(state, "s:1")
    await state.lanes.renew(replica("s1"))
    await take(state, "s1")
    await state.pass_ms(300)
    with pytest.raises(LeaseExpired):
        await take(state, "s1")
    await state.lanes.renew(replica("s2"))
    assert rids(await take(state, "s2")) == [rid]


@pytest.mark.proves("I10", "R65")
async def test_a_sample_that_kills_its_worker_is_failed_at_the_last_attempt(state: State) -> None:
    poison, innocent = await submit(state, "s:1", "s:2")
    batches = []
    for name in ("s1", "s2", "s3"):
        await state.lanes.renew(replica(name))
        batches.append(rids(await take(state, name)))
        await state.lanes.bury(name)
    assert batches == [[poison, innocent], [poison], [poison]]
    await state.lanes.renew(replica("s4"))
    assert rids(await take(state, "s4")) == [innocent]
    record = await state.lanes.look(TENANT, poison)
    assert record is not None
    assert record.failure is not None
    assert record.failure.message == "the worker died three times while running this command"
    assert await state.lanes.bodies([(poison, "d")]) == [None]


@pytest.mark.proves("R25")
async def test_a_waiting_sample_can_be_cancelled(state: State) -> None:
    first, second, third = await submit(state, "s:1", "s:2", "s:3")
    assert await state.lanes.cancel(TENANT, second) is FutureState.CANCELLED
    assert await state.lanes.cancel(TENANT, second) is FutureState.CANCELLED
    await state.lanes.renew(replica("s1"))
    assert rids(await take(state, "s1")) == [first, third]
    assert await state.lanes.cancel(TENANT, first) is FutureState.RUNNING
    assert await state.lanes.cancel("stranger", first) is None
    assert await state.lanes.bodies([(second, "d")]) == [None]


@pytest.mark.proves("R67")
async def test_the_end_of_a_session_fails_its_samples_and_no_others(state: State) -> None:
    own = [replace(sample(f"own:{index}"), session="over") for index in range(4)]
    others = [sample("s:1"), sample("s:2"), replace(sample("s:3", tenant="other"), session="over")]
    elsewhere = replace(sample("own:5", base="other"), session="over")
    for submission in (own[0], others[0], own[1], own[2], others[1], own[3], others[2], elsewhere):
        await state.lanes.pool_submit(submission)
    await state.lanes.renew(replica("s1"))
    running = await take(state, "s1", max_entries=2)
    for _ in range(2):
        await state.lanes.close_session(TENANT, "over", ENDED)
    for submission in (*own, elsewhere):
        record = await state.lanes.look(TENANT, submission.rid)
        assert record is not None
        assert (record.state, record.failure) == (FutureState.FAILED, ENDED)
        assert await state.lanes.bodies([(submission.rid, "d")]) == [None]
        assert (await state.lanes.pool_submit(submission)).state is FutureState.FAILED
    late = [entry for entry in running if entry.rid in {submission.rid for submission in own}]
    assert await state.lanes.pool_settle("s1", [(entry, completed()) for entry in running]) == {entry.rid for entry in late}
    rest = {submission.rid for submission in others} - {entry.rid for entry in running}
    assert set(rids(await take(state, "s1"))) == rest
    await state.lanes.bury("s1")
    await state.lanes.renew(replica("s2"))
    assert {rid for _ in range(3) for rid in rids(await take(state, "s2"))} == rest, "what ended is not run again"


@pytest.mark.proves("R67")
async def test_a_sample_of_a_session_that_has_ended_is_refused(state: State) -> None:
    await state.lanes.close_session(TENANT, "session of local", ENDED)
    keys = await state.keys()
    with pytest.raises(SessionEnded, match="session of local has ended"):
        await submit(state, "s:1")
    assert await state.keys() == keys
    assert await submit(state, "s:1", tenant="other") != []


@pytest.mark.proves("R67")
async def test_the_end_of_a_session_keeps_the_order_of_what_stays(state: State) -> None:
    kept: list[str] = []
    for index in range(30):
        submission = sample(f"s:{index}")
        if index % 3 == 0:
            submission = replace(submission, session="over")
        else:
            kept.append(submission.rid)
        await state.lanes.pool_submit(submission)
    await state.lanes.close_session(TENANT, "over", ENDED)
    await state.lanes.renew(replica("s1"))
    assert rids(await take(state, "s1")) == kept


@pytest.mark.proves("I7", "R67")
async def test_the_end_of_a_session_gives_back_its_bytes(make_state: MakeState) -> None:
    state = await make_state(max_tenant_bytes=10)
    await state.lanes.pool_submit(replace(sample("s:1", body=b"12345"), session="over"))
    await state.lanes.pool_submit(replace(sample("s:2", body=b"12345"), session="over"))
    await state.lanes.renew(replica("s1"))
    await take(state, "s1", max_entries=1)
    with pytest.raises(QuotaExceeded):
        await submit(state, "s:3")
    await state.lanes.close_session(TENANT, "over", ENDED)
    await state.lanes.pool_submit(sample("s:4", body=b"1234567890"))
    with pytest.raises(QuotaExceeded):
        await submit(state, "s:5")
