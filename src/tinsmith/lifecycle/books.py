"""The care of the tenants' books: measures once an hour what is stored, and lets go of days that are too old.

Knows the store and the catalog; neither HTTP nor processes.
"""

from collections import Counter

from tinsmith.lifecycle.sessions import LEADER
from tinsmith.state.audit import AuditLog
from tinsmith.state.catalog import Catalog
from tinsmith.state.days import day_of
from tinsmith.state.store import Store
from tinsmith.state.usage import UsageBook


class BookSweep:
    """One pass at a time, in the process that holds the leader's lease. Passes must come more often than once an hour; an hour without any
    has no storage in the books."""

    def __init__(self, store: Store, *, holder: str, lease_ms: int) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._holder = holder
        self._lease_ms = lease_ms

    async def run(self) -> None:
        """One pass; nothing where another process leads. Raises StateContention while the store is away."""
        if not await self._store.lease(LEADER, self._holder, self._lease_ms):
            return
        now_ms = await self._store.now_ms()
        for tenant in await self._catalog.tenants():
            await self._measure(tenant, now_ms)
            await UsageBook(self._store, tenant).trim(day_of(now_ms))
            await AuditLog(self._store, tenant).trim(day_of(now_ms))

    async def _measure(self, tenant: str, now_ms: int) -> None:
        book = UsageBook(self._store, tenant)
        if await book.is_measured(now_ms):
            return
        stored: Counter[str] = Counter()
        for record in await self._catalog.checkpoints(tenant):
            is_kept = record.expires_ms is None or record.expires_ms > now_ms
            if is_kept and record.size_bytes is not None:
                stored[record.base_model] += record.size_bytes
        await book.measure(stored, now_ms)
