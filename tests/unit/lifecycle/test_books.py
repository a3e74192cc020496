"""The hourly measurement, and who makes it."""

from tinsmith.lifecycle.books import BookSweep
from tinsmith.lifecycle.sessions import LEADER
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, SessionRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state.audit import KEPT_DAYS, AuditEntry, AuditEvent, AuditLog, note
from tinsmith.state.catalog import Catalog, checkpoint_write
from tinsmith.state.days import DAY_MS, HOUR_MS
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.usage import Stored, UsageBook


def keep(store: MemoryStore, name: str, *, base: str = "b", size: int | None = 5, expires_ms: int | None = None) -> None:
    record = CheckpointRecord(
        tenant="t",
        session_id="s",
        run_id="s:train:0",
        kind=CheckpointKind.TRAINING,
        name=name,
        artifact=name,
        base_model=base,
        lora=LoraConfig(rank=8, seed=0),
        created_ms=0,
        size_bytes=size,
        expires_ms=expires_ms,
    )
    store.apply([checkpoint_write(record)])


async def test_each_hour_is_measured_by_its_first_pass() -> None:
    now = [HOUR_MS]
    store = MemoryStore(lambda: now[0])
    await Catalog(store).add_session(SessionRecord(tenant="t", session_id="s", created_ms=0))
    keep(store, "a")
    keep(store, "b")
    keep(store, "c", base="other")
    keep(store, "expired", expires_ms=HOUR_MS)
    keep(store, "unmeasured", size=None)
    sweep = BookSweep(store, holder="me", lease_ms=1000)
    await sweep.run()
    keep(store, "late")
    now[0] += HOUR_MS // 2
    await sweep.run()
    stored = UsageBook(store, "t")
    assert set(await stored.stored(0, 9)) == {Stored(1, "b", 10), Stored(1, "other", 5)}
    now[0] += HOUR_MS
    await sweep.run()
    assert Stored(2, "b", 15) in await stored.stored(0, 9)


async def test_old_days_go_and_only_the_leader_sweeps() -> None:
    store = MemoryStore(lambda: KEPT_DAYS * DAY_MS)
    await Catalog(store).add_session(SessionRecord(tenant="t", session_id="s", created_ms=0))
    await note(store, AuditEntry(tenant="t", at_ms=5, event=AuditEvent.SESSION_CREATE, subject="s"))
    await store.lease(LEADER, "another", 1000)
    await BookSweep(store, holder="me", lease_ms=1000).run()
    assert len(await AuditLog(store, "t").day(0)) == 1
    await store.unlease(LEADER, "another")
    await BookSweep(store, holder="me", lease_ms=1000).run()
    assert await AuditLog(store, "t").day(0) == []
