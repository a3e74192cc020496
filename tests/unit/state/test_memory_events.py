"""Topics in memory beyond what the contract shows: trimming, dropping, sleepers."""

import asyncio

from tinsmith.state.lanes import Wake
from tinsmith.state.memory_events import EventLog


def test_a_reader_behind_the_trim_is_told_to_resync() -> None:
    log = EventLog(length=3)
    for event in "abcde":
        log.append("t", event)
    assert log.since({"t": 1}) == Wake({}, {"t": 5}, frozenset({"t"}))
    assert log.since({"t": 2}) == Wake({"t": ["c", "d", "e"]}, {"t": 5}, frozenset())
    assert log.since({"t": 4}).events == {"t": ["e"]}


def test_a_cursor_from_another_life_is_told_to_resync() -> None:
    log = EventLog()
    log.append("t", "a")
    wake = log.since({"t": 9, "never used": 4, "untouched": 0})
    assert wake.resync == {"t", "never used"}
    assert wake.cursors == {"t": 1, "never used": 0, "untouched": 0}


def test_after_everything_was_forgotten_every_reader_resyncs_once() -> None:
    log = EventLog()
    log.append("t", "a")
    cursors = {"t": log.tail("t")}
    log.forget()
    wake = log.since(cursors)
    assert wake.resync == {"t"}
    log.append("t", "b")
    assert log.since(wake.cursors) == Wake({"t": ["b"]}, {"t": 3}, frozenset())


def test_a_dropped_topic_starts_anew() -> None:
    log = EventLog()
    log.append("t", "a")
    log.drop("t")
    log.drop("never used")
    assert log.tail("t") == 0


async def test_sleepers_wake_for_their_own_topics_only() -> None:
    log = EventLog()
    one, two = (asyncio.create_task(log.wait({topic: 0}, 5)) for topic in ("one", "two"))
    await asyncio.sleep(0)
    log.append("one", "a")
    log.append("one", "b")
    assert (await one).events == {"one": ["a", "b"]}
    assert not two.done()
    log.forget()
    log.append("two", "c")
    assert (await two).events == {"two": ["c"]}


async def test_forgetting_wakes_the_sleepers() -> None:
    log = EventLog()
    log.append("t", "a")
    sleeper = asyncio.create_task(log.wait({"t": 1}, 5))
    await asyncio.sleep(0)
    log.forget()
    assert (await sleeper).resync == {"t"}
