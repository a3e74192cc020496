"""Completion feeds in memory (`state.feeds`). Knows records only as far as their results; nothing of pools, leases or order."""

from collections import OrderedDict, defaultdict
from collections.abc import Collection
from itertools import islice

from tinsmith.state.feeds import Completion, FeedPage
from tinsmith.state.lanes import SETTLED
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_futures import MemoryFutures


class MemoryFeeds:
    """Feeds by (tenant, name)."""

    def __init__(self, futures: MemoryFutures, events: EventLog) -> None:
        self._futures = futures
        self._events = events
        self._feeds: defaultdict[tuple[str, str], OrderedDict[str, int]] = defaultdict(OrderedDict)  # rid -> number, ascending
        self._of: dict[str, tuple[str, str]] = {}  # the feed of each sample that has one

    def follow(self, tenant: str, feed: str, rid: str) -> None:
        """The sample's end will be told in the feed."""
        self._of[rid] = (tenant, feed)

    def tell(self, rid: str) -> None:
        """The sample has ended."""
        key = self._of.get(rid)
        if key is not None:
            self._feeds[key][rid] = self._events.append(SETTLED, key[1])

    def page(self, tenant: str, feed: str, after: int, max_events: int) -> FeedPage:
        """As `Lanes.completions`."""
        after = after if after <= self._events.tail(SETTLED) else 0
        held = self._feeds.get((tenant, feed))
        while held and next(iter(held.values())) <= after:
            held.popitem(last=False)
        if not held:
            self._feeds.pop((tenant, feed), None)
            return FeedPage((), after)
        told = list(islice(held.items(), max_events))
        return FeedPage(tuple(Completion(rid, self._futures.held_size(rid)) for rid, _ in told), told[-1][1])

    def acknowledge(self, tenant: str, feed: str, rids: Collection[str]) -> None:
        """As `Lanes.acknowledge`."""
        key = (tenant, feed)
        for rid in rids:
            if self._of.get(rid) == key and self._futures.get(rid).state.is_terminal:
                self._futures.free_result(rid)
                self._feeds[key].pop(rid, None)
        if not self._feeds.get(key):
            self._feeds.pop(key, None)

    def prune(self) -> None:
        """Forget the samples whose records are gone."""
        for rid in [rid for rid, (tenant, _) in self._of.items() if self._futures.find(tenant, rid) is None]:
            key = self._of.pop(rid)
            if key in self._feeds:
                self._feeds[key].pop(rid, None)
                if not self._feeds[key]:
                    del self._feeds[key]

    def clear(self) -> None:
        self._feeds.clear()
        self._of.clear()
