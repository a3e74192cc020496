"""Completion feeds: each end of a followed sample is told once, in order, until its caller has it."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import BASE, ENDED, NEVER_MS, TENANT, completed, failed, replica, sample
from tests.fakes.lost_replies import LostReplies
from tinsmith.protocol.errors import QuotaExceeded
from tinsmith.state.feeds import CLIENT_SPAN, Completion, FeedPage, feed_name, feed_of
from tinsmith.state.lanes import SETTLED, PoolSubmission, Role

SAMPLER = "5e55:sample:0"
FEED = feed_name(SAMPLER, 0)


def followed(seq_id: int, *, tenant: str = TENANT) -> PoolSubmission:
    submission = sample(f"{SAMPLER}/{seq_id}", tenant=tenant)
    return replace(submission, session="5e55", feed=feed_of(SAMPLER, seq_id))


async def submit(state: State, *seq_ids: int) -> list[str]:
    return [(await state.lanes.pool_submit(followed(seq_id))).rid for seq_id in seq_ids]


async def run(state: State, name: str = "s1", *, num: int = 100, result: bytes = b"text") -> None:
    """Complete what waits."""
    await state.lanes.renew(replica(name, role=Role.SAMPLER))
    entries = await state.lanes.pool_take(BASE, name, num, 100_000)
    await state.lanes.pool_settle(name, [(entry, completed(result)) for entry in entries])


async def page(state: State, after: int = 0, *, feed: str = FEED, tenant: str = TENANT, num: int = 100) -> FeedPage:
    return await state.lanes.completions(tenant, feed, after, num)


async def told(state: State, after: int = 0, *, feed: str = FEED, tenant: str = TENANT) -> list[str]:
    return [completion.rid for completion in (await page(state, after, feed=feed, tenant=tenant)).completions]


async def sweep(state: State, *, stuck_ms: int = NEVER_MS, orphan_ms: int = NEVER_MS) -> None:
    await state.lanes.sweep(stuck_ms=stuck_ms, orphan_ms=orphan_ms)


# Whatever ends a sample


async def fail(state: State) -> None:
    await state.lanes.renew(replica("s1"))
    (entry,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.pool_settle("s1", [(entry, failed())])


async def cancel(state: State) -> None:
    await state.lanes.cancel(TENANT, followed(0).rid)


async def end_session(state: State) -> None:
    await state.lanes.close_session(TENANT, "5e55", ENDED)


async def end_session_while_it_runs(state: State) -> None:
    await state.lanes.renew(replica("s1"))
    await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.close_session(TENANT, "5e55", ENDED)


async def wear_workers_out(state: State) -> None:
    for name in ("s1", "s2", "s3"):
        await state.lanes.renew(replica(name))
        await state.lanes.pool_take(BASE, name, 1, 100)
        await state.lanes.bury(name)
    await sweep(state)


async def wait_too_long(state: State) -> None:
    await state.pass_ms(20)
    await sweep(state, stuck_ms=10)


async def wait_for_nobody(state: State) -> None:
    await state.pass_ms(20)
    await sweep(state, orphan_ms=10)


ENDS = [fail, cancel, end_session, end_session_while_it_runs, wear_workers_out, wait_too_long, wait_for_nobody]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_every_end_is_told_as_failed_and_once(state: State, end: Callable[[State], Awaitable[None]]) -> None:
    (rid,) = await submit(state, 0)
    assert await page(state) == FeedPage((), 0)
    await end(state)
    found = await page(state)
    assert found.completions == (Completion(rid, None),)
    await sweep(state)
    assert await page(state, found.cursor) == FeedPage((), found.cursor)


async def test_a_finished_sample_is_told_with_the_size_of_its_result(state: State) -> None:
    (rid,) = await submit(state, 0)
    await run(state, result=b"12345")
    assert (await page(state)).completions == (Completion(rid, 5),)


async def test_a_sample_that_another_replica_took_over_is_told_once(state: State) -> None:
    (rid,) = await submit(state, 0)
    await state.lanes.renew(replica("s1"))
    (late,) = await state.lanes.pool_take(BASE, "s1", 1, 100)
    await state.lanes.bury("s1")
    await run(state, "s2")
    await state.lanes.renew(replica("s1"))
    assert await state.lanes.pool_settle("s1", [(late, completed(b"late"))]) == {rid}
    assert await told(state) == [rid]


async def test_a_result_that_is_held_no_more_is_told_as_failed(state: State) -> None:
    (rid,) = await submit(state, 0)
    await run(state)
    await state.lanes.close_session(TENANT, "5e55", ENDED)
    assert (await page(state)).completions == (Completion(rid, None),)


async def test_a_sample_that_nobody_follows_is_told_in_no_feed(state: State) -> None:
    await state.lanes.pool_submit(replace(followed(0), feed=""))
    cursors = await state.lanes.tail([SETTLED])
    await run(state)
    assert await told(state) == []
    assert len((await state.lanes.wait(cursors, 0)).events[SETTLED]) == 1


# Cursors


async def test_a_cursor_grows_and_pages_follow_each_other(state: State) -> None:
    first = await submit(state, *range(5))
    await run(state)
    pages = [await page(state, num=2)]
    while pages[-1].completions:
        pages.append(await page(state, pages[-1].cursor, num=2))
    cursors = [each.cursor for each in pages]
    assert [completion.rid for each in pages for completion in each.completions] == first
    assert cursors == sorted(cursors)
    assert cursors[-1] == cursors[-2] > cursors[0] > 0
    second = await submit(state, 9)
    await run(state)
    assert await told(state, cursors[-1]) == second
    assert (await page(state, cursors[-1])).cursor > cursors[-1]


async def test_what_a_cursor_has_passed_is_trimmed_and_the_rest_comes_again(state: State) -> None:
    rids = await submit(state, 0, 1, 2)
    await run(state)
    assert await told(state) == await told(state) == rids
    one = await page(state, num=1)
    assert await told(state, one.cursor) == rids[1:]
    assert await told(state) == rids[1:]


async def test_clients_of_one_sampler_have_feeds_of_their_own(state: State) -> None:
    (own, other) = await submit(state, 0, 7 * CLIENT_SPAN + 3)
    await run(state)
    assert await told(state) == [own]
    assert await told(state, feed=feed_name(SAMPLER, 7)) == [other]
    assert await told(state, tenant="other") == []


async def test_after_an_emptied_store_an_old_cursor_misses_nothing(state: State) -> None:
    await submit(state, *range(5))
    await run(state)
    old = (await page(state)).cursor
    await state.store.flush_all()
    await state.store.open()
    rids = await submit(state, 0)
    await run(state)
    if (await page(state)).cursor < old:  # in Redis the numbers begin anew; in memory they go on
        assert await told(state, old) == rids
    assert await told(state) == rids


async def test_a_cursor_that_was_never_given_out_is_the_beginning(state: State) -> None:
    rids = await submit(state, 0)
    await run(state)
    assert await told(state, 2**62) == rids
    assert (await page(state, 2**62)).cursor < 2**62
    assert await page(state, 2**62, feed=feed_name(SAMPLER, 1)) == FeedPage((), 0)


async def test_with_lost_replies_every_end_is_told_and_once(state: State) -> None:
    source = random.Random(7)
    lanes = LostReplies(state.lanes, 0.4, source)
    expected, heard, cursor = set(), [], 0
    await lanes.renew(replica("s1"))
    for seq_id in range(40):
        expected.add((await lanes.pool_submit(followed(seq_id))).rid)
        if source.random() < 0.3:
            await lanes.cancel(TENANT, followed(seq_id).rid)
        if source.random() < 0.5:
            entries = await lanes.pool_take(BASE, "s1", 2, 100_000)
            await lanes.pool_settle("s1", [(entry, completed()) for entry in entries])
        if source.random() < 0.3:
            found = await lanes.completions(TENANT, FEED, cursor, 3)
            heard += [completion.rid for completion in found.completions]
            cursor = found.cursor
            await lanes.acknowledge(TENANT, FEED, [completion.rid for completion in found.completions])
    await run(state)
    heard += await told(state, cursor)
    assert lanes.num_lost > 20
    assert sorted(heard) == sorted(expected)


# Waking


async def test_an_end_rings_its_feed_after_it_is_there(state: State) -> None:
    (rid,) = await submit(state, 0)
    cursors = await state.lanes.tail([SETTLED])
    waiting = asyncio.create_task(state.lanes.wait(cursors, 5))
    await cancel(state)
    events = list((await waiting).events[SETTLED])
    events += [] if FEED in events else list((await state.lanes.wait({SETTLED: cursors[SETTLED] + len(events)}, 1)).events[SETTLED])
    assert events == [rid, FEED]
    assert await told(state) == [rid]


# Acknowledging, and what is left


async def test_an_acknowledged_result_is_freed_and_no_other(make_state: MakeState) -> None:
    state = await make_state(max_tenant_bytes=17)
    (kept, done) = await submit(state, 0, 1)
    await run(state, result=b"abcd")
    (elsewhere,) = await submit(state, CLIENT_SPAN)
    for tenant, feed in (("other", FEED), (TENANT, feed_name(SAMPLER, 1))):
        await state.lanes.acknowledge(tenant, feed, [kept, done, "nonsense"])
    assert await told(state) == [kept, done]
    with pytest.raises(QuotaExceeded):
        await submit(state, 2)
    for _ in range(2):
        await state.lanes.acknowledge(TENANT, FEED, [done, elsewhere, followed(77).rid])
    assert await state.lanes.result(TENANT, done) is None
    assert await state.lanes.result(TENANT, kept) == b"abcd"
    assert await told(state) == [kept]
    record = await state.lanes.look(TENANT, done)
    assert record is not None
    assert record.state.is_terminal
    assert len(await submit(state, 2)) == 1, "its bytes are free"


async def test_many_are_acknowledged_at_once(state: State) -> None:
    rids = await submit(state, *range(600))
    await run(state, num=1000)
    await state.lanes.acknowledge(TENANT, FEED, rids)
    assert await told(state) == []
    assert not [key for key in await state.keys() if key.startswith(("res:", "result:", "feed:"))]


async def test_a_sample_that_has_not_ended_cannot_be_acknowledged(state: State) -> None:
    (rid,) = await submit(state, 0)
    await state.lanes.acknowledge(TENANT, FEED, [rid])
    await run(state)
    assert await told(state) == [rid]


async def test_a_feed_goes_with_its_records(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=200)
    await submit(state, 0, 1)
    await run(state)
    await state.pass_ms(250)
    await sweep(state)
    assert await told(state) == []
    assert not [key for key in await state.keys() if key.startswith(("fut:", "feed:", "record:"))]


# Holding back


async def test_more_may_not_wait_than_the_submission_says(make_state: MakeState) -> None:
    state = await make_state(max_pending=4)
    await submit(state, 0, 1)
    held_back = replace(followed(2), max_waiting=2)
    keys = sorted(await state.keys())
    with pytest.raises(QuotaExceeded, match=r"^2 samples are waiting"):
        await state.lanes.pool_submit(held_back)
    assert sorted(await state.keys()) == keys
    assert (await state.lanes.pool_submit(replace(followed(1), max_waiting=2))).is_fresh is False
    assert (await state.lanes.pool_submit(replace(followed(3), tenant="other", max_waiting=2))).is_fresh
    await run(state, num=1)
    assert (await state.lanes.pool_submit(held_back)).is_fresh
    await submit(state, 4)
    await submit(state, 5)
    with pytest.raises(QuotaExceeded, match=r"^4 samples are waiting"):
        await state.lanes.pool_submit(replace(followed(6), max_waiting=100))
