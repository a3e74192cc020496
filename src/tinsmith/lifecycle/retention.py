"""The sweep of the catalog: what it says of sessions goes a day after their end.

A run that a checkpoint still names stays, and so does one of which artifacts lie on disk: the sweep of artifacts touches those of known
models alone. Knows neither HTTP nor processes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith.lifecycle.checkpoints import Checkpoints, folder_of, model_folder
from tinsmith.lifecycle.sessions import LEADER
from tinsmith.protocol.sessions import CheckpointRecord, ModelRecord, SamplerRecord, SessionRecord
from tinsmith.state.catalog import Catalog
from tinsmith.state.custom_losses import CustomLosses
from tinsmith.state.inflight import InflightTargets
from tinsmith.state.publications import Publications
from tinsmith.state.refusals import Refusals
from tinsmith.state.sampler_clients import SamplerClients
from tinsmith.state.store import Store

KEPT_MS = 24 * 3600 * 1000  # after the end of the session, as long as its requests' records


@dataclass(frozen=True, slots=True)
class _Shelf:
    """A tenant's records, by what they belong to."""

    models: dict[str, list[ModelRecord]]  # by session
    samplers: dict[str, list[SamplerRecord]]  # by session
    checkpoints: dict[str, list[CheckpointRecord]]  # by run


class CatalogSweep:
    """One pass at a time, in the process that holds the leader's lease. It lists all that the catalog holds, so passes are rare."""

    def __init__(self, store: Store, checkpoints: Checkpoints, *, holder: str, lease_ms: int) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._publications = Publications(store)
        self._checkpoints = checkpoints
        self._holder = holder
        self._lease_ms = lease_ms

    async def run(self) -> int:
        """One pass. Answers how many sessions it forgot; none where another process leads. Raises StateContention while the store is away,
        OSError where the directory of artifacts cannot be listed."""
        if not await self._store.lease(LEADER, self._holder, self._lease_ms):
            return 0
        now_ms = await self._store.now_ms()
        num_forgotten = 0
        for tenant in await self._catalog.tenants():
            sessions = await self._catalog.sessions(tenant)
            old = [record for record in sessions if record.ended_ms is not None and record.ended_ms <= now_ms - KEPT_MS]
            if old:
                ended = {record.session_id for record in old}
                await CustomLosses(self._store).forget(tenant, ended)
                await Refusals(self._store).forget(tenant, ended)
                num_forgotten += await self._forget(tenant, old, now_ms)
        return num_forgotten

    async def _forget(self, tenant: str, sessions: Iterable[SessionRecord], now_ms: int) -> int:
        shelf = await self._shelf(tenant)
        on_disk = await asyncio.to_thread(lambda: {folder_of(artifact) for artifact in self._checkpoints.artifacts()})
        num_forgotten = 0
        for session in sessions:
            kept = [model for model in shelf.models[session.session_id] if not await self._forget_model(model, shelf, on_disk, now_ms)]
            for sampler in shelf.samplers[session.session_id]:
                await self._forget_sampler(sampler)
            if not kept:
                await self._catalog.forget_session(session)
                num_forgotten += 1
        return num_forgotten

    async def _forget_sampler(self, sampler: SamplerRecord) -> None:
        await SamplerClients(self._store).forget(sampler.tenant, sampler.sampler_id)
        if sampler.inflight is not None:
            await InflightTargets(self._store).forget(sampler.inflight)
        await self._catalog.forget_sampler(sampler)

    async def _forget_model(self, model: ModelRecord, shelf: _Shelf, on_disk: set[str], now_ms: int) -> bool:
        """False where somebody may still want the run. Its expired checkpoints go in any case: since the run has ended, no other can have
        taken their names."""
        if model.ended_ms is None:
            return False
        named = shelf.checkpoints[model.model_id]
        expired = [record for record in named if record.expires_ms is not None and record.expires_ms <= now_ms]
        for record in expired:
            await self._publications.unpublish(record)
            await self._catalog.forget_checkpoint(record)
        if len(expired) < len(named) or model_folder(model.tenant, model.model_id) in on_disk:
            return False
        await self._catalog.forget_model(model)
        return True

    async def _shelf(self, tenant: str) -> _Shelf:
        models, samplers, checkpoints = defaultdict(list), defaultdict(list), defaultdict(list)
        for model in await self._catalog.models(tenant):
            models[model.session_id].append(model)
        for sampler in await self._catalog.samplers(tenant):
            samplers[sampler.session_id].append(sampler)
        for checkpoint in await self._catalog.checkpoints(tenant):
            checkpoints[checkpoint.run_id].append(checkpoint)
        return _Shelf(models, samplers, checkpoints)
