"""Sums of what tenants used, by the hour."""

from tinsmith.protocol.futures import SampledTokens
from tinsmith.state.days import DAY_MS, HOUR_MS
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.usage import KEPT_DAYS, Stored, UsageBook, UsageKind, Used, amounts_of, tallies


async def test_amounts_of_a_window_are_read_over_the_end_of_a_day() -> None:
    now = [23 * HOUR_MS]
    store = MemoryStore(lambda: now[0])
    for _ in range(4):
        store.apply(tallies("t", "s", "org/b", {UsageKind.TRAINING: 2, UsageKind.SAMPLING: 0}))
        store.apply(tallies("t", "s", "org/b", {UsageKind.TRAINING: 3}))
        now[0] += HOUR_MS
    rows = await UsageBook(store, "t").used(23, 26)
    assert sorted(row.hour for row in rows) == [23, 24, 25]
    assert Used(24, UsageKind.TRAINING, "s", "org/b", 5) in rows
    assert await UsageBook(store, "other").used(0, 48) == []


def test_a_sample_s_prompt_is_split_by_where_it_came_from() -> None:
    assert amounts_of(SampledTokens(num_prompt=10, num_cached=4, num_drawn=3)) == {
        UsageKind.PREFILL: 6,
        UsageKind.CACHED_PREFILL: 4,
        UsageKind.SAMPLING: 3,
    }


async def test_what_is_stored_is_measured_once_an_hour() -> None:
    book = UsageBook(MemoryStore(), "t")
    assert not await book.is_measured(HOUR_MS)
    await book.measure({"org/b": 5}, HOUR_MS)
    assert await book.is_measured(2 * HOUR_MS - 1)
    assert not await book.is_measured(2 * HOUR_MS)
    await book.measure({"org/b": 7}, 2 * HOUR_MS)
    assert sorted(await book.stored(0, 3), key=lambda row: row.hour) == [Stored(1, "org/b", 5), Stored(2, "org/b", 7)]
    assert await book.stored(2, 2) == []


async def test_days_that_are_too_old_go_and_others_stay() -> None:
    now = [0]
    store = MemoryStore(lambda: now[0])
    book = UsageBook(store, "t")
    for day in (0, 1):
        now[0] = day * DAY_MS
        store.apply(tallies("t", "s", "b", {UsageKind.TRAINING: 1}))
        await book.measure({"b": 1}, now[0])
    await book.trim(KEPT_DAYS)
    assert [row.hour for row in await book.used(0, 48)] == [24]
    assert [row.hour for row in await book.stored(0, 48)] == [24]
    assert set(await store.list("t/used")) == {"1"}
