"""The event reader over scripted and in-memory topics."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pytest

from tinsmith.protocol.errors import StateContention
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits, Wake
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import StoreInfo

WORK = "work:llama"
SOON_S = 2.0  # far longer than it takes; a test that waits so long has failed
NEVER_S = 0.02


class FlakyTopics:
    """Topics in memory whose connection can be cut: a wait that is under way breaks, and so does every call until it is mended."""

    def __init__(self, length: int = 1000) -> None:
        self.log = EventLog(length)
        self.is_cut = False
        self.cursors_asked: list[dict[str, int]] = []
        self._cut = asyncio.Event()

    async def tail(self, topics: Sequence[str]) -> dict[str, int]:
        self._check()
        return {topic: self.log.tail(topic) for topic in topics}

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        self._check()
        self.cursors_asked.append(dict(cursors))
        reading = asyncio.ensure_future(self.log.wait(cursors, timeout_s))
        breaking = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait((reading, breaking), return_when=asyncio.FIRST_COMPLETED)
        breaking.cancel()
        if self.is_cut:
            reading.cancel()
        self._check()
        return await reading

    def cut(self) -> None:
        self.is_cut = True
        self._cut.set()

    def mend(self) -> None:
        self.is_cut = False
        self._cut.clear()

    def _check(self) -> None:
        if self.is_cut:
            raise StateContention("the store is away")


class TrimmedTopics(FlakyTopics):
    """The first wait tells of events up to the hundredth, of which some were trimmed; the next one has nothing to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.was_asked_again = asyncio.Event()

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        self.cursors_asked.append(dict(cursors))
        if len(self.cursors_asked) > 1:
            self.was_asked_again.set()
            await asyncio.Event().wait()
        await self.may_answer.wait()
        return Wake({SETTLED: ["a"]}, {SETTLED: 100}, frozenset({SETTLED}))


class BrokenTopics(FlakyTopics):
    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        raise ZeroDivisionError("a defect")


@pytest.fixture
def topics() -> FlakyTopics:
    return FlakyTopics()


async def reading(topics: FlakyTopics, *names: str) -> EventReader:
    reader = EventReader(topics, names or (SETTLED,), block_s=0.2)
    await reader.start()
    return reader


async def test_an_event_wakes_its_waiters_and_no_others(topics: FlakyTopics) -> None:
    reader = await reading(topics, SETTLED, WORK)
    with reader.register(SETTLED, "a") as first, reader.register(SETTLED, "a") as second, reader.register(SETTLED, "b") as other:
        topics.log.append(WORK, "b")
        topics.log.append(SETTLED, "a")
        assert await first.wait(SOON_S)
        assert await second.wait(SOON_S)
        assert not await other.wait(NEVER_S)
    await reader.stop()


async def test_an_event_between_registration_and_sleep_is_not_lost(topics: FlakyTopics) -> None:
    reader = await reading(topics)
    with reader.register(SETTLED, "a") as waiter, reader.subscribe() as everything:
        topics.log.append(SETTLED, "a")
        assert await everything.wait(SOON_S)
        assert await waiter.wait(NEVER_S)
        assert not await waiter.wait(NEVER_S), "each wake is told once"
    await reader.stop()


async def test_what_happened_before_the_start_wakes_nobody(topics: FlakyTopics) -> None:
    topics.log.append(SETTLED, "a")
    reader = await reading(topics)
    with reader.register(SETTLED, "a") as waiter:
        assert not await waiter.wait(NEVER_S)
    await reader.stop()


async def test_a_waiter_that_left_is_forgotten(topics: FlakyTopics) -> None:
    reader = await reading(topics)
    with reader.register(SETTLED, "a") as waiter:
        pass
    waiter.close()
    with reader.register(SETTLED, "b") as other:
        topics.log.append(SETTLED, "a")
        topics.log.append(SETTLED, "b")
        assert await other.wait(SOON_S)
    assert not await waiter.wait(NEVER_S)
    assert not reader._waiters
    await reader.stop()


async def test_thousands_of_waiters_are_one_read(topics: FlakyTopics) -> None:
    reader = await reading(topics)
    waiters = [reader.register(SETTLED, f"r{i}") for i in range(3000)]
    sleeping = asyncio.gather(*(waiter.wait(SOON_S) for waiter in waiters))
    await asyncio.sleep(0)
    for i in range(3000):
        topics.log.append(SETTLED, f"r{i}")
    assert all(await sleeping)
    assert len(topics.cursors_asked) < 10
    await reader.stop()


async def test_a_subscription_gathers_what_its_topics_tell(topics: FlakyTopics) -> None:
    reader = await reading(topics, SETTLED, WORK)
    with reader.subscribe(WORK) as work, reader.subscribe() as everything:
        for topic, payload in ((WORK, "lane 1"), (WORK, "lane 2"), (WORK, "lane 1"), (SETTLED, "a")):
            topics.log.append(topic, payload)
        assert await work.wait(SOON_S)
        assert await everything.wait(SOON_S)
        assert work.take() == ["lane 1", "lane 2"]
        assert set(everything.take()) == {"lane 1", "lane 2", "a"}
        assert work.take() == []
        assert not work.take_resync()
    topics.log.append(WORK, "lane 3")
    with reader.subscribe(WORK) as later:
        assert await later.wait(SOON_S)
        assert later.take() == ["lane 3"]
    assert work.take() == []
    await reader.stop()


async def test_a_subscription_can_be_woken_from_within(topics: FlakyTopics) -> None:
    reader = await reading(topics)
    with reader.subscribe(SETTLED) as subscription:
        subscription.wake()
        assert await subscription.wait(SOON_S)
        assert subscription.take() == []
    await reader.stop()


async def test_a_topic_that_is_not_read_cannot_be_waited_for(topics: FlakyTopics) -> None:
    reader = await reading(topics)
    with pytest.raises(ValueError, match="bell:r1"):
        reader.register("bell:r1", "a")
    with pytest.raises(ValueError, match="bell:r1"):
        reader.subscribe(SETTLED, "bell:r1")
    await reader.stop()


async def test_events_of_a_broken_connections_time_are_read_after_it(topics: FlakyTopics, caplog: pytest.LogCaptureFixture) -> None:
    reader = await reading(topics)
    with reader.register(SETTLED, "a") as waiter, caplog.at_level(logging.WARNING):
        topics.cut()
        assert not await waiter.wait(0.2)
        topics.log.append(SETTLED, "a")
        topics.mend()
        assert await waiter.wait(SOON_S)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line a break"
    await reader.stop()


async def test_a_reader_that_fell_behind_has_everybody_look() -> None:
    topics = FlakyTopics(length=3)
    reader = await reading(topics, SETTLED, WORK)
    with reader.register(SETTLED, "a") as waiter, reader.register(WORK, "a") as other, reader.subscribe(SETTLED) as subscription:
        for payload in "abcde":
            topics.log.append(SETTLED, payload)
        assert await waiter.wait(SOON_S)
        assert subscription.take_resync()
        assert not subscription.take_resync()
        assert not await other.wait(NEVER_S), "the other topic lost nothing"
    await reader.stop()


async def test_start_and_stop_may_be_repeated(topics: FlakyTopics) -> None:
    reader = EventReader(topics, [SETTLED])
    await reader.stop()
    assert not reader.is_reading
    await reader.start()
    await reader.start()
    assert reader.is_reading
    await reader.stop()
    await reader.stop()
    assert not reader.is_reading


async def test_start_says_that_the_store_is_away(topics: FlakyTopics) -> None:
    topics.cut()
    with pytest.raises(StateContention):
        await EventReader(topics, [SETTLED]).start()


async def test_an_emptied_store_is_told_before_anybody_is_woken() -> None:
    store = MemoryStore()
    lanes = MemoryLanes(store, LaneLimits())
    epochs: list[str] = []

    def note(info: StoreInfo) -> None:
        assert not waiter_woke.is_set()
        epochs.append(info.epoch)

    waiter_woke = asyncio.Event()
    reader = EventReader(lanes, [SETTLED], store=store, on_new_epoch=note)
    await reader.start()
    old = await store.open()
    lanes._events.append(SETTLED, "something")
    with reader.register(SETTLED, "a") as waiter:
        await store.flush_all()
        assert await waiter.wait(SOON_S)
        waiter_woke.set()
    assert epochs == [(await store.open()).epoch]
    assert epochs != [old.epoch]
    await reader.stop()


async def test_a_break_without_a_new_epoch_is_only_a_break(topics: FlakyTopics) -> None:
    epochs: list[StoreInfo] = []
    reader = EventReader(topics, [SETTLED], store=MemoryStore(), on_new_epoch=epochs.append, block_s=0.2)
    await reader.start()
    with reader.register(SETTLED, "a") as waiter:
        topics.cut()
        assert not await waiter.wait(0.05)
        topics.mend()
        topics.log.append(SETTLED, "a")
        assert await waiter.wait(SOON_S)
    assert epochs == []
    await reader.stop()


async def test_a_new_epoch_after_a_break_wakes_everybody(topics: FlakyTopics) -> None:
    store = MemoryStore()
    reader = EventReader(topics, [SETTLED], store=store, block_s=0.2)
    await reader.start()
    with reader.register(SETTLED, "a") as waiter:
        topics.cut()
        assert not await waiter.wait(0.05)
        await store.flush_all()
        topics.mend()
        assert await waiter.wait(SOON_S)
    await reader.stop()


async def test_cursors_of_a_store_as_it_was_are_not_carried_into_the_new_one() -> None:
    """Emptied between a read that was behind the topic's end and the look at the epoch that follows it."""
    topics, store = TrimmedTopics(), MemoryStore()
    reader = EventReader(topics, [SETTLED], store=store, block_s=0.2)
    await reader.start()
    await store.flush_all()
    topics.may_answer.set()
    await topics.was_asked_again.wait()
    assert topics.cursors_asked[1:] == [{SETTLED: 0}]
    await reader.stop()


async def test_a_defect_is_logged_and_leaves_nobody_asleep(caplog: pytest.LogCaptureFixture) -> None:
    reader = EventReader(BrokenTopics(), [SETTLED])
    with caplog.at_level(logging.CRITICAL):
        await reader.start()
        with reader.register(SETTLED, "a") as waiter:
            assert await waiter.wait(SOON_S)
    assert not reader.is_reading
    assert "defect" in caplog.text
