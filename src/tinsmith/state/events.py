"""The one blocking reader of a process: it follows topics from its cursors and wakes whoever in this process waits for an event.

It knows no Redis and no memory, only `tail` and `wait` of the lanes. A waiter registers first, then looks at the truth, then sleeps: no
event falls between, also none of the time in which the connection was broken, since the reader goes on from its cursors. An event is a
hint to look again and never the truth itself; after a resync everybody looks.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from tinsmith import telemetry
from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import Wake
from tinsmith.state.store import Store, StoreInfo

_log = logging.getLogger(__name__)
BLOCK_S = 5.0  # of one blocking read: an idle process asks the store no more often
_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 0.25  # so that a waiter is woken within a second of the store's return


class Topics(Protocol):
    """The part of `Lanes` that the reader uses."""

    async def tail(self, topics: Sequence[str]) -> dict[str, int]: ...

    async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake: ...


class Waiter:
    """One sleeper for one event; leave its context (or call `close`) to unregister.

    with reader.register(SETTLED, rid) as waiter:
        while not (record := await lanes.look(tenant, rid)).state.is_terminal:
            if not await waiter.wait(rest_s()): break
    """

    __slots__ = ("_event", "_reader", "payload", "topic")

    def __init__(self, reader: "EventReader", topic: str, payload: str) -> None:
        self._reader = reader
        self._event = asyncio.Event()
        self.topic = topic
        self.payload = payload

    async def wait(self, timeout_s: float) -> bool:
        """True once woken since the registration or the last `wait` that said so: look again. False after `timeout_s`."""
        return await _wait_and_clear(self._event, timeout_s)

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._reader.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Subscription:
    """Hears every event of its topics. Payloads are gathered, each once, until they are taken."""

    def __init__(self, reader: "EventReader", topics: Iterable[str]) -> None:
        self._reader = reader
        self._event = asyncio.Event()
        self._payloads: dict[str, None] = {}
        self._must_resync = False
        self.topics = frozenset(topics)

    async def wait(self, timeout_s: float) -> bool:
        """True once there is something new since the last `wait` that said so; False after `timeout_s`."""
        return await _wait_and_clear(self._event, timeout_s)

    def take(self) -> list[str]:
        """Payloads heard since the last take, in order of their first hearing."""
        payloads, self._payloads = list(self._payloads), {}
        return payloads

    def take_resync(self) -> bool:
        """Whether events may have been missed since the last call: look at everything."""
        must_resync, self._must_resync = self._must_resync, False
        return must_resync

    def wake(self) -> None:
        """Wake the sleeper without an event, as for a change in the own process."""
        self._event.set()

    def hear(self, payloads: Sequence[str], *, resync: bool) -> None:
        self._payloads.update(dict.fromkeys(payloads))
        self._must_resync = self._must_resync or resync
        self._event.set()

    def close(self) -> None:
        self._reader.unsubscribe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class EventReader:
    """Reads `topics` of `lanes`; start and stop it on the loop that its waiters run on.

    With a `store`, it compares the epoch after every break and every resync, and calls `on_new_epoch` when the store was emptied: what
    this process remembers of it is gone.
    """

    def __init__(
        self,
        lanes: Topics,
        topics: Sequence[str],
        *,
        store: Store | None = None,
        on_new_epoch: Callable[[StoreInfo], None] | None = None,
        block_s: float = BLOCK_S,
    ) -> None:
        self._lanes = lanes
        self._topics = tuple(topics)
        self._store = store
        self._on_new_epoch = on_new_epoch
        self._block_s = block_s
        self._cursors: dict[str, int] = {}
        self._epoch: str | None = None
        self._waiters: defaultdict[tuple[str, str], set[Waiter]] = defaultdict(set)
        self._subscriptions: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_reading(self) -> bool:
        """False before `start`, after `stop`, and if the reader has died of a defect, which it logs."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Stand at the end of every topic and read on from there. Idempotent. Raises StateContention where the store is away."""
        if self.is_reading:
            return
        if self._store is not None:
            self._epoch = (await self._store.open()).epoch
        self._cursors = await self._lanes.tail(self._topics)
        self._task = asyncio.create_task(self._read(), name="event reader")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the reading; sleepers sleep on until their time-outs. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def register(self, topic: str, payload: str) -> Waiter:
        """Register for one event, before looking at what it tells of. Raises ValueError for a topic that is not read."""
        self._check_topics([topic])
        waiter = Waiter(self, topic, payload)
        self._waiters[topic, payload].add(waiter)
        return waiter

    def unregister(self, waiter: Waiter) -> None:
        key = (waiter.topic, waiter.payload)
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]

    def subscribe(self, *topics: str) -> Subscription:
        """Register for every event of some of the topics read; of all, if none is named. Raises ValueError for a topic that is not read."""
        self._check_topics(topics)
        subscription = Subscription(self, topics or self._topics)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def _check_topics(self, topics: Sequence[str]) -> None:
        unread = set(topics) - set(self._topics)
        if unread:
            raise ValueError(f"topics {sorted(unread)} are not read here; name them when the reader is made")

    async def _read(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        is_broken = False
        while True:
            try:
                wake = await self._next(is_broken)
            except StateContention as error:
                if not is_broken:
                    _log.warning("event reader: %s; it tries again and goes on where it was", error)
                is_broken = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            is_broken, backoff_s = False, _FIRST_BACKOFF_S
            self._deliver(wake)

    async def _next(self, is_broken: bool) -> Wake:
        """One blocking read. Raises StateContention."""
        if is_broken:
            await self._has_new_epoch()
        wake = await self._lanes.wait(self._cursors, self._block_s)
        if wake.resync and await self._has_new_epoch():
            return Wake({}, self._cursors, frozenset())  # the cursors read may be those of the store as it was
        return wake

    async def _has_new_epoch(self) -> bool:
        """Start over if the store was emptied. The callback comes first: whoever then looks knows that ids of the old epoch are gone."""
        if self._store is None:
            return False
        info = await self._store.open()
        if info.epoch == self._epoch:
            return False
        cursors = await self._lanes.tail(self._topics)
        self._epoch, self._cursors = info.epoch, cursors
        _log.warning("event reader: the store was emptied; what it held is gone")
        if self._on_new_epoch is not None:
            self._on_new_epoch(info)
        self._wake_everybody()
        return True

    def _deliver(self, wake: Wake) -> None:
        self._cursors.update(wake.cursors)
        if wake.resync:
            telemetry.count(telemetry.EVENT_RESYNCS)
        for topic, payloads in wake.events.items():
            for payload in payloads:
                for waiter in self._waiters.get((topic, payload), ()):
                    waiter.wake()
        for (topic, _), waiters in self._waiters.items() if wake.resync else ():
            if topic in wake.resync:
                for waiter in waiters:
                    waiter.wake()
        for subscription in self._subscriptions:
            heard = [payload for topic in subscription.topics for payload in wake.events.get(topic, ())]
            resync = not subscription.topics.isdisjoint(wake.resync)
            if heard or resync:
                subscription.hear(heard, resync=resync)

    def _wake_everybody(self) -> None:
        self._deliver(Wake({}, {}, frozenset(self._topics)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("event reader: died of a defect; this process must be restarted", exc_info=error)
            self._wake_everybody()


async def _wait_and_clear(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
