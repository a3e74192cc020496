"""End of sessions: by their client, or by the janitor after a silence. Ending closes the session's lanes and deletes nothing durable.

Knows the catalog and the lanes; nothing of HTTP, engines or processes. Every step may be repeated: a process that dies between two of
them leaves work that the next sweep finishes.
"""

import logging
from dataclasses import dataclass

from tinsmith.protocol.errors import Category, NotFound, ReasonCode, StateContention
from tinsmith.protocol.futures import Failure
from tinsmith.protocol.sessions import ModelRecord, SessionRecord
from tinsmith.state.catalog import Catalog, model_write
from tinsmith.state.lanes import Lanes, Swept
from tinsmith.state.store import Store

LEADER = "janitor"  # the lease of the one process that sweeps
EXPIRED = "expired"

_log = logging.getLogger(__name__)


async def end_session(catalog: Catalog, lanes: Lanes, tenant: str, session_id: str, *, reason: str, now_ms: int) -> SessionRecord:
    """Mark the session as ended and fail its pending work; the first reason stays. Idempotent. Raises NotFound."""
    record = await catalog.session(tenant, session_id)
    ending = record if record.ended_ms is not None else record.model_copy(update={"end_reason": reason})
    # Before the mark: whoever comes after the mark finds the models that are still open by it, but no sample.
    await lanes.close_session(tenant, session_id, session_ended(ending))
    record = await catalog.end_session(tenant, session_id, reason=reason, now_ms=now_ms)
    await _close_models(catalog, lanes, record, now_ms=now_ms)
    return record


async def close_model(lanes: Lanes, model: ModelRecord, failure: Failure, *, now_ms: int) -> None:
    """Fail the model's pending work and free its slot. Idempotent."""
    ended = model if model.ended_ms is not None else model.model_copy(update={"ended_ms": now_ms})
    await lanes.close(model.tenant, model.model_id, failure, writes=(model_write(ended),))


def session_ended(record: SessionRecord) -> Failure:
    return Failure(
        reason=ReasonCode.SESSION_ENDED,
        message=f"session {record.session_id} has ended ({record.end_reason}); create a new one",
        category=Category.USER,
    )


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

    def __init__(self, store: Store, lanes: Lanes, *, holder: str, timeout_ms: int, stuck_ms: int, lease_ms: int) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._lanes = lanes
        self._holder = holder
        self._timeout_ms = timeout_ms
        self._stuck_ms = stuck_ms
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
            await self._finish_ends(tenant, now_ms)
        return SweepReport(tuple(expired), await self._lanes.sweep(stuck_ms=self._stuck_ms))

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

    async def _finish_ends(self, tenant: str, now_ms: int) -> None:
        """Close the lanes of sessions whose end was cut short."""
        ended = {record.session_id: record for record in await self._catalog.sessions(tenant) if record.ended_ms is not None}
        for model in await self._catalog.models(tenant):
            record = ended.get(model.session_id)
            if record is not None and model.ended_ms is None:
                await close_model(self._lanes, model, session_ended(record), now_ms=now_ms)


async def _close_models(catalog: Catalog, lanes: Lanes, record: SessionRecord, *, now_ms: int) -> None:
    for model in await catalog.models(record.tenant):
        if model.session_id == record.session_id and model.ended_ms is None:
            await close_model(lanes, model, session_ended(record), now_ms=now_ms)
