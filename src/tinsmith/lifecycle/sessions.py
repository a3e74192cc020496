"""End of sessions: by their client, or by the janitor after a silence. Ending closes the session's lanes and deletes nothing durable: what
a model had learned by its newest snapshot can be loaded for another day.

Knows the catalog and the lanes; nothing of HTTP, engines or processes. Every step may be repeated: a process that dies between two of
them leaves work that the next sweep finishes.
"""

import logging
from dataclasses import dataclass

from tinsmith.protocol.errors import Category, NotFound, ReasonCode, StateContention
from tinsmith.protocol.futures import Failure, Write
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, ModelRecord, SessionRecord
from tinsmith.state.audit import AuditEntry, AuditEvent, note
from tinsmith.state.catalog import Catalog, checkpoint_write, ended_model_writes
from tinsmith.state.lanes import LaneInfo, Lanes, Swept
from tinsmith.state.quotas import MODEL_LEASE_MS, model_quota
from tinsmith.state.store import Store

LEADER = "janitor"  # the lease of the one process that sweeps
EXPIRED = "expired"
SESSION_END = "session-end"  # the name of the checkpoint that the end of a session leaves of a model
SESSION_END_KEPT_MS = 24 * 3600 * 1000
_NO_LIMIT = 2**31

_log = logging.getLogger(__name__)


async def end_session(catalog: Catalog, lanes: Lanes, tenant: str, session_id: str, *, reason: str, now_ms: int) -> SessionRecord:
    """Mark the session as ended and fail its pending work; the first reason stays. Idempotent. Raises NotFound."""
    record = await catalog.session(tenant, session_id)
    ending = record if record.ended_ms is not None else record.model_copy(update={"end_reason": reason})
    # Before the mark: whoever comes after the mark finds the models that are still open by it, but no sample.
    await lanes.close_session(tenant, session_id, session_ended(ending))
    record = await catalog.end_session(tenant, session_id, reason=reason, now_ms=now_ms)
    await note(catalog.store, _end_of(record, now_ms))
    await _close_models(catalog, lanes, record, now_ms=now_ms)
    return record


def _end_of(record: SessionRecord, now_ms: int) -> AuditEntry:
    """The same for each that ends the session: the first one's moment and reason."""
    at_ms = now_ms if record.ended_ms is None else record.ended_ms
    details = {} if record.end_reason is None else {"reason": record.end_reason}
    return AuditEntry(tenant=record.tenant, at_ms=at_ms, event=AuditEvent.SESSION_END, subject=record.session_id, details=details)


async def close_model(catalog: Catalog, lanes: Lanes, model: ModelRecord, failure: Failure, *, now_ms: int) -> None:
    """Fail the model's pending work and free its slot and its unit of the quota. Idempotent."""
    await lanes.close(model.tenant, model.model_id, failure, writes=ended_model_writes(_ended(model, now_ms)))
    await catalog.store.unreserve(model_quota(model.tenant), model.model_id)


def session_ended(record: SessionRecord) -> Failure:
    return Failure(
        reason=ReasonCode.SESSION_ENDED,
        message=f"session {record.session_id} has ended ({record.end_reason}); create a new one",
        category=Category.USER,
    )


async def _end_model(catalog: Catalog, lanes: Lanes, model: ModelRecord, session: SessionRecord, *, now_ms: int) -> None:
    """As `close_model`, and its newest snapshot becomes a checkpoint, in the same step. A snapshot that is committed meanwhile is a newer
    one, and its owner deletes the one before."""
    is_closed = False
    while not is_closed:
        info = await lanes.lane(model.model_id)
        checkpoint = await _session_end_write(catalog, model, info, now_ms)
        writes = (*ended_model_writes(_ended(model, now_ms)), *checkpoint)
        is_closed = await lanes.close(model.tenant, model.model_id, session_ended(session), writes, seen=info)
    await catalog.store.unreserve(model_quota(model.tenant), model.model_id)


async def _session_end_write(catalog: Catalog, model: ModelRecord, lane: LaneInfo | None, now_ms: int) -> tuple[Write, ...]:
    """Nothing where there is no snapshot, or where the caller has a checkpoint of that name."""
    if lane is None or lane.snapshot is None:
        return ()
    record = CheckpointRecord(
        tenant=model.tenant,
        session_id=model.session_id,
        run_id=model.model_id,
        kind=CheckpointKind.TRAINING,
        name=SESSION_END,
        artifact=lane.snapshot,
        base_model=model.base_model,
        lora=model.lora,
        optimizer=model.optimizer,
        schedule=model.schedule,
        created_ms=now_ms,
        size_bytes=None,
        expires_ms=now_ms + SESSION_END_KEPT_MS,
    )
    try:
        held = await catalog.checkpoint(model.tenant, record.path)
    except NotFound:
        return (checkpoint_write(record),)
    has_expired = held.expires_ms is not None and held.expires_ms <= now_ms
    return (checkpoint_write(record),) if has_expired else ()


def _ended(model: ModelRecord, now_ms: int) -> ModelRecord:
    return model if model.ended_ms is not None else model.model_copy(update={"ended_ms": now_ms})


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Ids of the sessions that one sweep ended, and what the lanes freed."""

    expired: tuple[str, ...]
    swept: Swept


class SessionSweep:
    """The janitor's work, one pass at a time. One process sweeps: the holder of a lease.

    Time in which the store was away is no silence: a beat could not be written then. So nothing expires before `timeout_ms` have passed
    since this process began to sweep, or since the store came back.
    """

    def __init__(self, store: Store, lanes: Lanes, *, holder: str, timeout_ms: int, stuck_ms: int, orphan_ms: int, lease_ms: int) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._lanes = lanes
        self._holder = holder
        self._timeout_ms = timeout_ms
        self._stuck_ms = stuck_ms
        self._orphan_ms = orphan_ms
        self._lease_ms = lease_ms
        self._heard_since_ms: int | None = None  # the store has been there without a break since then
        self._is_cut_off = False

    async def run(self) -> SweepReport | None:
        """One pass; None where another process leads. Raises StateContention while the store is away."""
        try:
            if self._is_cut_off:
                await self._store.open()  # it may have come back empty; a sweep remembers nothing and goes on in it
            report = await self._run()
        except StateContention:
            self._heard_since_ms, self._is_cut_off = None, True
            raise
        self._is_cut_off = False
        return report

    async def _run(self) -> SweepReport | None:
        if not await self._store.lease(LEADER, self._holder, self._lease_ms):
            self._heard_since_ms = None
            return None
        now_ms = await self._store.now_ms()
        if self._heard_since_ms is None:
            self._heard_since_ms = now_ms
        expired: list[str] = []
        for tenant in await self._catalog.tenants():
            expired += await self._expire(tenant, now_ms, self._heard_since_ms)
            await self._look_after_models(tenant, now_ms)
        return SweepReport(tuple(expired), await self._lanes.sweep(stuck_ms=self._stuck_ms, orphan_ms=self._orphan_ms))

    async def _expire(self, tenant: str, now_ms: int, heard_since_ms: int) -> list[str]:
        """End the sessions that have been silent for too long."""
        beats = await self._catalog.beats(tenant)
        silent = [session_id for session_id, beat_ms in beats.items() if now_ms - max(beat_ms, heard_since_ms) > self._timeout_ms]
        for session_id in silent:
            _log.info("session %s of %s has been silent for %d ms and ends", session_id, tenant, now_ms - beats[session_id])
            try:
                await end_session(self._catalog, self._lanes, tenant, session_id, reason=EXPIRED, now_ms=now_ms)
            except NotFound:
                await self._store.delete(f"{tenant}/beats", session_id)  # a beat that came after its session's end
        return silent

    async def _look_after_models(self, tenant: str, now_ms: int) -> None:
        """Keep the live models' units of the quota, and close those of sessions whose end was cut short. A live session has a beat."""
        beats = await self._catalog.beats(tenant)
        for model in await self._catalog.live_models(tenant):
            session = None if model.session_id in beats else await self._ended_session(model)
            if session is None:
                await self._hold_unit(model)
            else:
                await _end_model(self._catalog, self._lanes, model, session, now_ms=now_ms)

    async def _ended_session(self, model: ModelRecord) -> SessionRecord | None:
        try:
            session = await self._catalog.session(model.tenant, model.session_id)
        except NotFound:
            return None
        return session if session.ended_ms is not None else None

    async def _hold_unit(self, model: ModelRecord) -> None:
        """A model that lives holds its unit, whatever the limit is by now; one that has just ended gets none anew."""
        quota = model_quota(model.tenant)
        if await self._store.reserve(quota, model.model_id, limit=0, ttl_ms=MODEL_LEASE_MS):
            return
        if (await self._catalog.model(model.tenant, model.model_id)).ended_ms is None:
            await self._store.reserve(quota, model.model_id, limit=_NO_LIMIT, ttl_ms=MODEL_LEASE_MS)


async def _close_models(catalog: Catalog, lanes: Lanes, record: SessionRecord, *, now_ms: int) -> None:
    for model in await catalog.live_models(record.tenant):
        if model.session_id == record.session_id:
            await _end_model(catalog, lanes, model, record, now_ms=now_ms)
