"""The audit log of a tenant: what happened to its sessions, models, checkpoints and keys, by day.

Append-only: an entry is never changed, and goes only with its day or as one of a day that has more than its bound (`trim`). An entry's
place follows from what it says, so noting the same event of the same moment again changes nothing. What happens in a lane is noted in the
lane's own step (`audit_writes`), everything else right after it was done (`note`). Knows nothing of who may read it.
"""

from collections.abc import Sequence
from enum import StrEnum

from pydantic import Field

from tinsmith.protocol.futures import Write
from tinsmith.protocol.sessions import Kept
from tinsmith.state.days import day_of, day_table
from tinsmith.state.keyring import KeyRecord
from tinsmith.state.store import Store

KEPT_DAYS = 90
MAX_ENTRIES = 10_000  # of a tenant's day, when it has been trimmed: about 3 MB


class AuditEvent(StrEnum):
    """ "<resource>_<action>"; the resource is what a reader filters by."""

    SESSION_CREATE = "session_create"
    SESSION_END = "session_end"
    MODEL_CREATE = "model_create"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_PUBLISH = "checkpoint_publish"
    CHECKPOINT_UNPUBLISH = "checkpoint_unpublish"
    CHECKPOINT_TTL = "checkpoint_ttl"
    CHECKPOINT_DELETE = "checkpoint_delete"
    PROJECT_SESSION_SET = "project_session_set"
    KEY_ADD = "key_add"
    KEY_REVOKE = "key_revoke"


class AuditEntry(Kept):
    """`subject`: the id of what it happened to, a tinker:// path for a checkpoint. `details`: facts that a caller may read, never a
    credential."""

    tenant: str
    at_ms: int
    event: AuditEvent
    subject: str
    details: dict[str, str] = Field(default={})


def audit_writes(entry: AuditEntry) -> tuple[Write, Write]:
    """The entry, and its day in the list of days."""
    table, day = f"{entry.tenant}/audit", day_of(entry.at_ms)
    place = f"{entry.at_ms:015d}/{entry.event}/{entry.subject}"
    return Write(day_table(table, day), place, entry.model_dump_json().encode()), Write(table, str(day), b"")


async def note(store: Store, entry: AuditEntry) -> None:
    """Append an entry. Idempotent. Raises StateContention while the store is away."""
    for write in audit_writes(entry):
        await store.put(write.table, write.id, b"" if write.value is None else write.value)


def key_added(record: KeyRecord) -> AuditEntry:
    return _of_key(record, AuditEvent.KEY_ADD, record.created_ms)


def key_revoked(record: KeyRecord) -> AuditEntry:
    """Of a record that says when; a key that is revoked again is noted no second time."""
    if record.revoked_ms is None:
        raise ValueError(f"key {record.key_id} is not revoked")
    return _of_key(record, AuditEvent.KEY_REVOKE, record.revoked_ms)


def _of_key(record: KeyRecord, event: AuditEvent, at_ms: int) -> AuditEntry:
    """By its id, which is no secret, and the name that people know it by."""
    details = {"name": record.name} if record.name else {}
    return AuditEntry(tenant=record.tenant, at_ms=at_ms, event=event, subject=record.key_id, details=details)


class AuditLog:
    """One tenant's log. Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._table = f"{tenant}/audit"

    async def day(self, day: int) -> list[AuditEntry]:
        """Oldest first. `day`: as in `days`."""
        held = await self._store.list(day_table(self._table, day))
        return [AuditEntry.model_validate_json(held[place].value) for place in sorted(held)]

    async def trim(self, today: int) -> int:
        """Delete the days that are too old, and the oldest entries of those that have too many. Answers how many entries went."""
        num_gone = 0
        for day in sorted(int(text) for text in await self._store.list(self._table)):
            table = day_table(self._table, day)
            places = sorted(await self._store.list(table))
            is_over = day <= today - KEPT_DAYS
            num_gone += await self._delete(table, places if is_over else places[:-MAX_ENTRIES])
            if is_over:
                await self._store.delete(self._table, str(day))
        return num_gone

    async def _delete(self, table: str, places: Sequence[str]) -> int:
        for place in places:
            await self._store.delete(table, place)
        return len(places)
