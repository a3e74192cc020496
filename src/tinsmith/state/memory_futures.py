"""Future records in memory with the bodies and results that belong to them, and what each tenant holds of both.

Every change of a record goes through `state.futures`; every terminal one appends to the topic `settled`. Knows nothing of the order
of commands, of owners or of quotas.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tinsmith.protocol.futures import FutureRecord, Outcome
from tinsmith.state import futures
from tinsmith.state.lanes import SETTLED
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_store import Clock


class MemoryFutures:
    """Records by request id."""

    def __init__(self, events: EventLog, clock_ms: Clock) -> None:
        self._events = events
        self._clock_ms = clock_ms
        self._records: dict[str, FutureRecord] = {}
        self._bodies: dict[str, bytes] = {}
        self._results: dict[str, bytes] = {}
        self._held: Counter[str] = Counter()  # bytes by tenant

    def get(self, rid: str) -> FutureRecord:
        """The record of an entry that is still in a lane."""
        return self._records[rid]

    def find(self, tenant: str, rid: str) -> FutureRecord | None:
        record = self._records.get(rid)
        return record if record is not None and record.tenant == tenant else None

    def of_session(self, tenant: str, session: str, limit: int) -> list[FutureRecord]:
        """Newest first."""
        own = [record for record in self._records.values() if (record.tenant, record.session) == (tenant, session)]
        return sorted(own, key=lambda record: (record.submitted_ms, record.rid), reverse=True)[:limit]

    def held_bytes(self, tenant: str) -> int:
        return self._held[tenant]

    def add(self, record: FutureRecord, body: bytes) -> None:
        """A pending record and its body."""
        self._records[record.rid] = record
        self._bodies[record.rid] = body
        self._held[record.tenant] += len(body)

    def add_ended(self, record: FutureRecord) -> None:
        """A record that was born terminal: it has no body."""
        self._records[record.rid] = record
        self._events.append(SETTLED, record.rid)

    def start(self, rid: str) -> None:
        self._records[rid] = futures.started(self._records[rid], self._clock_ms())

    def give_back(self, rid: str) -> None:
        self._records[rid] = futures.returned(self._records[rid])

    def end(self, rid: str, outcome: Outcome) -> None:
        """Settle the record and keep its result; the body stays until `free_body`."""
        record = futures.settled(self._records[rid], outcome, self._clock_ms())
        self._records[rid] = record
        if outcome.result is not None:
            self._results[rid] = outcome.result
            self._held[record.tenant] += len(outcome.result)
        self._events.append(SETTLED, rid)

    def body(self, rid: str, digest: str) -> bytes | None:
        record = self._records.get(rid)
        return self._bodies.get(rid) if record is not None and record.digest == digest else None

    def free_body(self, rid: str) -> int:
        """Delete the body if there is one; answers its size in bytes."""
        return self._release(rid, self._bodies.pop(rid, b""))

    def fetch(self, tenant: str, rid: str) -> bytes | None:
        """The result; the first call starts its retention clock."""
        record = self.find(tenant, rid)
        if record is None or rid not in self._results:
            return None
        if record.fetched_ms is None:
            self._records[rid] = replace(record, fetched_ms=self._clock_ms())
        return self._results[rid]

    def held_size(self, rid: str) -> int | None:
        """Bytes of the result; None where none is held."""
        return len(self._results[rid]) if rid in self._results else None

    def free_result(self, rid: str) -> None:
        self._release(rid, self._results.pop(rid, b""))

    def free_results(self, *, fetched_before_ms: int, ended_before_ms: int) -> int:
        """Delete results first fetched, or settled, at or before those times; answers how many."""
        old = [rid for rid in self._results if self._is_due(self._records[rid], fetched_before_ms, ended_before_ms)]
        for rid in old:
            self.free_result(rid)
        return len(old)

    def free_results_where(self, is_over: Callable[[FutureRecord], bool]) -> None:
        """Delete the results of the records of which `is_over` is true."""
        for rid in [rid for rid in self._results if is_over(self._records[rid])]:
            self.free_result(rid)

    def forget_where(self, is_old: Callable[[FutureRecord], bool]) -> int:
        """Delete the terminal records of which `is_old` is true, results included; answers how many."""
        old = [rid for rid, record in self._records.items() if record.state.is_terminal and is_old(record)]
        for rid in old:
            self.free_result(rid)
            del self._records[rid]
        return len(old)

    def clear(self) -> None:
        for held in (self._records, self._bodies, self._results, self._held):
            held.clear()

    def _is_due(self, record: FutureRecord, fetched_before_ms: int, ended_before_ms: int) -> bool:
        if record.fetched_ms is not None and record.fetched_ms <= fetched_before_ms:
            return True
        return record.ended_ms is not None and record.ended_ms <= ended_before_ms

    def _release(self, rid: str, content: bytes) -> int:
        if content:
            self._held[self._records[rid].tenant] -= len(content)
        return len(content)
