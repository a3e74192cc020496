"""Topics in memory: append-only, capped, numbered from 1 in each, and waiting for what comes after a cursor.

Knows nothing of what an event means. A sleeper is woken by the append and never polls.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import islice

from tinsmith.state.lanes import TOPIC_LENGTH, Wake


class _Topic:
    """`last` is the number of the newest event; the numbers go on when the events are forgotten."""

    def __init__(self, length: int) -> None:
        self.last = 0
        self.events: deque[str] = deque(maxlen=length)

    def append(self, event: str) -> None:
        self.events.append(event)
        self.last += 1

    def forget(self) -> None:
        """Drop the events and skip a number, so that every reader, one that had read them all included, is told to resync."""
        self.events.clear()
        self.last += 1

    def holds_all_after(self, cursor: int) -> bool:
        return self.last - len(self.events) <= cursor <= self.last

    def after(self, cursor: int) -> list[str]:
        return list(islice(reversed(self.events), self.last - cursor))[::-1]


class EventLog:
    """All topics of a store."""

    def __init__(self, length: int = TOPIC_LENGTH) -> None:
        self._length = length
        self._topics: dict[str, _Topic] = {}
        self._sleepers: dict[asyncio.Event, frozenset[str]] = {}

    def append(self, topic: str, event: str) -> int:
        """Answers the event's number."""
        if topic not in self._topics:
            self._topics[topic] = _Topic(self._length)
        self._topics[topic].append(event)
        self._wake(topic)
        return self._topics[topic].last

    def empty(self, topic: str) -> None:
        """Drop the events of a topic whose numbers go on."""
        if topic in self._topics:
            self._topics[topic].events.clear()

    def tail(self, topic: str) -> int:
        return self._topics[topic].last if topic in self._topics else 0

    def since(self, cursors: Mapping[str, int]) -> Wake:
        """What came after the cursors, now."""
        events: dict[str, list[str]] = {}
        resync: set[str] = set()
        for topic, cursor in cursors.items():
            held = self._topics.get(topic)
            if cursor == (0 if held is None else held.last):
                continue
            if held is None or not held.holds_all_after(cursor):
                resync.add(topic)
            else:
                events[topic] = held.after(cursor)
        return Wake(events, {topic: self.tail(topic) for topic in cursors}, frozenset(resync))

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
        """What came after the cursors, or the first of it that comes within timeout_s; an empty wake if nothing does."""
        wake = self.since(cursors)
        if wake.events or wake.resync:
            return wake
        bell = asyncio.Event()
        self._sleepers[bell] = frozenset(cursors)
        try:
            async with asyncio.timeout(timeout_s):
                await bell.wait()
        except TimeoutError:
            pass  # an empty wake says so
        finally:
            del self._sleepers[bell]
        return self.since(cursors)

    def drop(self, topic: str) -> None:
        """Forget a topic that nobody will read again, its numbers included."""
        self._topics.pop(topic, None)

    def forget(self) -> None:
        """Drop every event; every reader is told to resync."""
        for name, topic in self._topics.items():
            topic.forget()
            self._wake(name)

    def _wake(self, topic: str) -> None:
        for bell, topics in self._sleepers.items():
            if topic in topics:
                bell.set()
