"""Store in this process's memory: gone with it. It serves one event loop; other processes reach it through whoever hosts it.

Each operation is one function without an await between reading and writing, so it is atomic. Knows nothing of lanes but that
somebody else may keep data that must go when everything goes (`on_flush`).
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.futures import Tally, Write
from tinsmith.state.days import day_of, day_table, hour_of
from tinsmith.state.memory_quotas import MemoryQuotas
from tinsmith.state.store import SCHEMA_VERSION, Record, StoreInfo

Clock = Callable[[], int]


def wall_clock_ms() -> int:
    """ms since 1970 UTC."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: str
    end_ms: int


class MemoryStore:
    """Implements `store.Store`. All users of one object share its data; `close` leaves them as they are."""

    def __init__(self, clock_ms: Clock = wall_clock_ms) -> None:
        self.clock_ms = clock_ms
        self._info: StoreInfo | None = None
        self._tables: defaultdict[str, dict[str, Record]] = defaultdict(dict)
        self._leases: dict[str, _Lease] = {}
        self._quotas = MemoryQuotas()
        self._flushed: list[Callable[[], None]] = []

    async def open(self) -> StoreInfo:
        if self._info is None:
            self._info = StoreInfo(epoch=secrets.token_hex(4), secret=secrets.token_bytes(32), schema=SCHEMA_VERSION)
        return self._info

    async def now_ms(self) -> int:
        return self.clock_ms()

    async def get(self, table: str, id: str) -> Record | None:
        return self._tables[table].get(id) if table in self._tables else None

    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        version = self._version(table, id)
        if expect is not None and expect != version:
            raise StateContention(f"{table}: {id!r} has version {version} and not {expect}; read it again and retry")
        self._write(table, id, value)
        return version + 1

    async def delete(self, table: str, id: str) -> bool:
        return self._delete(table, id)

    async def list(self, table: str) -> dict[str, Record]:
        return dict(self._tables[table]) if table in self._tables else {}

    async def lease(self, name: str, holder: str, ttl_ms: int) -> bool:
        now_ms = self.clock_ms()
        held = self._leases.get(name)
        if held is not None and held.holder != holder and held.end_ms > now_ms:
            return False
        self._leases[name] = _Lease(holder, now_ms + ttl_ms)
        return True

    async def unlease(self, name: str, holder: str) -> None:
        held = self._leases.get(name)
        if held is not None and held.holder == holder:
            del self._leases[name]

    async def reserve(self, quota: str, holder: str, *, limit: int, ttl_ms: int) -> bool:
        return self._quotas.reserve(quota, holder, limit=limit, ttl_ms=ttl_ms, now_ms=self.clock_ms())

    async def unreserve(self, quota: str, holder: str) -> None:
        self._quotas.unreserve(quota, holder)

    async def spend(self, budget: str, amount: float, *, per_s: float, burst: float) -> int:
        return self._quotas.spend(budget, amount, per_s=per_s, burst=burst, now_ms=self.clock_ms())

    async def close(self) -> None:
        return None

    async def flush_all(self) -> None:
        self._info = None
        self._tables.clear()
        self._leases.clear()
        self._quotas.clear()
        for forget in self._flushed:
            forget()

    def on_flush(self, forget: Callable[[], None]) -> None:
        """Call `forget` whenever everything is deleted."""
        self._flushed.append(forget)

    def apply(self, writes: Iterable[Write | Tally]) -> None:
        """Write records, and add to sums, in the caller's own step."""
        for write in writes:
            if isinstance(write, Tally):
                self._add(write)
            elif write.value is None:
                self._delete(write.table, write.id)
            else:
                self._write(write.table, write.id, write.value)

    def _add(self, tally: Tally) -> None:
        now_ms = self.clock_ms()
        day, place = str(day_of(now_ms)), f"{hour_of(now_ms)}/{tally.id}"
        table = day_table(tally.table, day_of(now_ms))
        held = self._tables[table].get(place)
        self._write(table, place, b"%d" % (tally.amount + (0 if held is None else int(held.value))))
        if self._version(tally.table, day) == 0:
            self._write(tally.table, day, b"")

    def _version(self, table: str, id: str) -> int:
        held = self._tables[table].get(id) if table in self._tables else None
        return 0 if held is None else held.version

    def _write(self, table: str, id: str, value: bytes) -> None:
        self._tables[table][id] = Record(value, self._version(table, id) + 1)

    def _delete(self, table: str, id: str) -> bool:
        if id not in self._tables.get(table, {}):
            return False
        del self._tables[table][id]
        if not self._tables[table]:
            del self._tables[table]
        return True
