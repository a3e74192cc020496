"""The audit log of a tenant."""

import pytest

from tinsmith.state import audit
from tinsmith.state.audit import KEPT_DAYS, AuditEntry, AuditEvent, AuditLog, note
from tinsmith.state.days import DAY_MS
from tinsmith.state.memory_store import MemoryStore


def entry(at_ms: int, subject: str = "s", tenant: str = "t") -> AuditEntry:
    return AuditEntry(tenant=tenant, at_ms=at_ms, event=AuditEvent.SESSION_CREATE, subject=subject)


async def test_a_day_is_read_oldest_first() -> None:
    store = MemoryStore()
    for at_ms in (DAY_MS + 20, DAY_MS + 3, DAY_MS - 1, 2 * DAY_MS):
        await note(store, entry(at_ms))
    await note(store, entry(DAY_MS, tenant="other"))
    log = AuditLog(store, "t")
    assert [held.at_ms for held in await log.day(1)] == [DAY_MS + 3, DAY_MS + 20]
    assert [held.at_ms for held in await log.day(0)] == [DAY_MS - 1]
    assert await log.day(7) == []


async def test_the_same_event_of_one_moment_is_one_entry() -> None:
    store = MemoryStore()
    for _ in range(2):
        await note(store, entry(5))
    await note(store, entry(5, subject="another"))
    assert len(await AuditLog(store, "t").day(0)) == 2


async def test_days_that_are_too_old_go_and_others_stay() -> None:
    store = MemoryStore()
    for day in (0, 1, 2):
        await note(store, entry(day * DAY_MS))
    log = AuditLog(store, "t")
    assert await log.trim(KEPT_DAYS + 1) == 2
    assert [len(await log.day(day)) for day in (0, 1, 2)] == [0, 0, 1]
    assert set(await store.list("t/audit")) == {"2"}


async def test_of_a_day_with_too_many_entries_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_ENTRIES", 2)
    store = MemoryStore()
    for at_ms in (1, 2, 3):
        await note(store, entry(at_ms))
    log = AuditLog(store, "t")
    assert await log.trim(0) == 1
    assert [held.at_ms for held in await log.day(0)] == [2, 3]
