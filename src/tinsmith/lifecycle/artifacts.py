"""The sweep of artifacts: which of those on disk somebody may still want, and the end of the others.

Wanted is what a checkpoint's record names until it expires, a sampler's record while its session lives, the snapshot of an open lane, and
what a load that a replay may run again has pinned; and for inflight samplers the newest save of their model, with those that it replaced
for as long as a sample that was queued with one may wait. The rest is left over: what a fenced owner wrote, a snapshot that was not
committed or whose lane is closed, a checkpoint that was overwritten, the ephemeral save of a session that has ended.

Two rules keep what is on its way to a name. An artifact is young for `min_age_s`, which covers the time from its writing to its settle. And
it goes only if two passes in a row found no name for it, since a name may travel: a gateway that has read a checkpoint's record is about
to pin its artifact, an outcome is settled when the store has come back.

Artifacts of models that the catalog does not know are never touched: another server may share the directory, and checkpoints outlive a
store that was emptied. Knows neither HTTP nor processes.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from tinsmith.lifecycle.checkpoints import Checkpoints, model_folder
from tinsmith.lifecycle.sessions import LEADER
from tinsmith.protocol.sessions import InflightTarget, ModelRecord, SamplerRecord
from tinsmith.state.catalog import Catalog
from tinsmith.state.inflight import InflightTargets
from tinsmith.state.lanes import LaneInfo, Lanes
from tinsmith.state.store import Store

MARGIN_S = 3600.0  # for slow disks, clocks that differ, a gate that is shut

_log = logging.getLogger(__name__)


def min_age_s(timeout_s: float, snapshot_engine_s: float) -> float:
    """How long an artifact may lie without a name. The longest way is that of a save which a rebuild publishes again: it is settled when
    the whole replay has run, which is as long as the engine time that calls for a snapshot, and the one call that passed it."""
    return MARGIN_S + snapshot_engine_s + timeout_s


class ArtifactSweep:
    """One pass at a time, in the process that holds the leader's lease. Passes must lie further apart than a gateway takes from reading a
    record to submitting what it names."""

    def __init__(self, store: Store, lanes: Lanes, checkpoints: Checkpoints, *, holder: str, lease_ms: int, min_age_s: float) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._inflight = InflightTargets(store)
        self._lanes = lanes
        self._checkpoints = checkpoints
        self._holder = holder
        self._lease_ms = lease_ms
        self._min_age_s = min_age_s
        self._suspects: set[str] = set()  # what the last pass found no name for

    async def run(self) -> int:
        """One pass. Answers how many artifacts and abandoned writes went; none where another process leads. Raises StateContention while
        the store is away, OSError where the directory cannot be listed."""
        suspects, self._suspects = self._suspects, set()
        if not await self._store.lease(LEADER, self._holder, self._lease_ms):
            return 0
        unnamed = await self._unnamed()
        num_gone = await asyncio.to_thread(self._delete, unnamed & suspects)
        self._suspects = unnamed
        return num_gone + await asyncio.to_thread(self._checkpoints.sweep_abandoned, min_age_s=self._min_age_s)

    async def _unnamed(self) -> set[str]:
        live: set[str] = set()
        models: set[str] = set()
        now_ms = await self._store.now_ms()
        for tenant in await self._catalog.tenants():
            pinned = await self._catalog.pins(tenant)  # before the models: a load may bring its own
            records = await self._catalog.models(tenant)
            lanes = await self._open_lanes(records)
            live |= await self._named(tenant, now_ms)
            live |= {info.snapshot for info in lanes.values() if info.snapshot is not None}
            models |= {model_folder(tenant, record.model_id) for record in records}
            for pin in pinned:
                if _is_ahead(pin.seq, lanes.get(pin.lane)):
                    live.add(pin.artifact)
                else:
                    await self._catalog.unpin(pin)
        return await asyncio.to_thread(self._checkpoints.unnamed, live, models, min_age_s=self._min_age_s)

    async def _open_lanes(self, models: Iterable[ModelRecord]) -> Mapping[str, LaneInfo]:
        infos = [await self._lanes.lane(model.model_id) for model in models if model.ended_ms is None]
        return {info.lane: info for info in infos if info is not None and info.is_open}

    async def _named(self, tenant: str, now_ms: int) -> set[str]:
        """What the tenant's checkpoints and samplers name."""
        ended = {record.session_id for record in await self._catalog.sessions(tenant) if record.ended_ms is not None}
        samplers = [record for record in await self._catalog.samplers(tenant) if record.session_id not in ended]
        checkpoints = await self._catalog.checkpoints(tenant)
        kept = {record.artifact for record in checkpoints if record.expires_ms is None or record.expires_ms > now_ms}
        frozen = {record.artifact for record in samplers if record.artifact is not None and record.inflight is None}
        return kept | frozen | await self._shared(samplers) | await self._replaced(tenant, now_ms)

    async def _shared(self, samplers: Iterable[SamplerRecord]) -> set[str]:
        """What inflight samplers sample from."""
        newest: dict[str, InflightTarget] = {}
        for own in (record.inflight for record in samplers if record.inflight is not None):
            if own.model_id not in newest or newest[own.model_id].seq < own.seq:
                newest[own.model_id] = own
        return {(await self._inflight.current(own)).artifact for own in newest.values()}

    async def _replaced(self, tenant: str, now_ms: int) -> set[str]:
        """What they have sampled from, not long ago."""
        replaced = await self._inflight.replaced(tenant)
        old = {artifact for artifact, replaced_ms in replaced.items() if replaced_ms < now_ms - 1000 * self._min_age_s}
        await self._inflight.forget_replaced(tenant, old)
        return replaced.keys() - old

    def _delete(self, artifacts: Collection[str]) -> int:
        """Answers how many went. One that cannot be deleted keeps no other."""
        num_gone = 0
        for artifact in artifacts:
            try:
                num_gone += self._checkpoints.delete(artifact)
            except OSError:
                _log.warning("artifact %s could not be deleted", artifact, exc_info=True)
        return num_gone


def _is_ahead(seq: int, lane: LaneInfo | None) -> bool:
    """Whether a replay of the lane may still run the entry."""
    return lane is not None and lane.durable < seq
