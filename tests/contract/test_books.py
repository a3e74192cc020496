"""What a settle adds to the sums of a tenant's books, and the list of a session's requests."""

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import BASE, ENDED, FB, LANE, TENANT, command, completed, failed, open_lane, own, replica, rid_of, sample, take
from tinsmith.protocol.futures import Tally
from tinsmith.state.days import day_of, day_table, hour_of
from tinsmith.state.lanes import Settlement

TABLE = "local/used"
SESSION = "session of local"


async def sums(state: State) -> dict[str, int]:
    """The sums of every day, without their hours."""
    days = await state.store.list(TABLE)
    tables = [await state.store.list(day_table(TABLE, int(day))) for day in days]
    return {place.split("/", 1)[1]: int(held.value) for table in tables for place, held in table.items()}


async def settle(state: State, seq: int, *tallies: Tally, name: str = "r1") -> None:
    owner = await own(state.lanes, name)
    await take(state.lanes, name, owner.token, seq, max_commands=1)
    await state.lanes.settle(LANE, name, owner.token, [Settlement(seq, completed(writes=tallies))])


async def test_a_settle_adds_to_the_sum_of_its_hour(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2))
    before = state.now_ms()
    await settle(state, 0, Tally(TABLE, "tokens/a", 5), Tally(TABLE, "tokens/b", 2**52))
    await settle(state, 1, Tally(TABLE, "tokens/a", 7))
    assert await sums(state) == {"tokens/a": 12, "tokens/b": 2**52}
    possible = {day_of(before), day_of(state.now_ms())}
    (day,) = await state.store.list(TABLE)
    assert int(day) in possible
    hours = {int(place.split("/")[0]) for place in await state.store.list(day_table(TABLE, int(day)))}
    assert hours <= {hour_of(before), hour_of(state.now_ms())}


async def test_what_was_settled_before_adds_nothing(state: State) -> None:
    """A settle whose reply was lost is sent again, and may come under a later token."""
    await open_lane(state.lanes)
    owner = await own(state.lanes, "r1")
    await take(state.lanes, "r1", owner.token, 0)
    again = [Settlement(0, completed(writes=(Tally(TABLE, "tokens", 5),)))]
    for _ in range(3):
        await state.lanes.settle(LANE, "r1", owner.token, again)
    await state.lanes.release(LANE, "r1", owner.token)
    other = await own(state.lanes, "r2")
    await state.lanes.settle(LANE, "r2", other.token, again)
    assert await sums(state) == {"tokens": 5}


async def test_a_command_that_was_closed_before_its_settle_adds_nothing(state: State) -> None:
    submission = sample("s/1")
    await state.lanes.pool_submit(submission)
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.close_session(TENANT, SESSION, ENDED)
    assert await state.lanes.pool_settle("s1", [(entry, completed(writes=(Tally(TABLE, "tokens", 5),)))]) == {submission.rid}
    assert await sums(state) == {}


async def test_a_sample_names_its_session_and_is_summed_once(state: State) -> None:
    await state.lanes.pool_submit(sample("s/1"))
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    assert entry.session == SESSION
    for _ in range(2):
        await state.lanes.pool_settle("s1", [(entry, completed(writes=(Tally(TABLE, "tokens", 3),)))])
    assert await sums(state) == {"tokens": 3}


async def test_the_requests_of_a_session_are_listed_newest_first(state: State) -> None:
    await open_lane(state.lanes)
    for submission in (command(1, FB), command(2, FB)):
        await state.pass_ms(2)
        await state.lanes.submit(submission)
    await state.pass_ms(2)
    await state.lanes.pool_submit(sample("s/1"))
    await state.pass_ms(2)
    await state.lanes.void(command(4, FB), ENDED)
    await state.lanes.submit(command(0, lane="theirs", tenant="other"))
    listed = await state.lanes.requests(TENANT, SESSION, 100)
    assert [record.rid for record in listed] == [rid_of(4), rid_of("s/1", f"pool:{BASE}"), rid_of(2), rid_of(1), rid_of(0)]
    assert await state.lanes.requests(TENANT, SESSION, 2) == listed[:2]
    assert await state.lanes.requests(TENANT, "session of other", 100) == []
    assert await state.lanes.requests("other", SESSION, 100) == []


async def test_a_session_forgets_the_requests_whose_records_are_gone(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=20)
    await state.lanes.pool_submit(sample("s/1"))
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.pool_settle("s1", [(entry, failed())])
    assert len(await state.lanes.requests(TENANT, SESSION, 100)) == 1
    await state.pass_ms(50)
    await state.lanes.sweep(stuck_ms=10**9, orphan_ms=10**9)
    assert await state.lanes.requests(TENANT, SESSION, 100) == []
    assert not [key for key in await state.keys() if key.startswith("requests:")]
