"""Models that were refused at birth, by tenant, over a `Store`: nothing of them exists but the answer to their promise.

A refusal is found under the id of that promise. How many a tenant can leave is bounded: beyond the bound nothing is kept.
"""

from collections.abc import Collection

from tinsmith.protocol.errors import RequestRejected, StateContention
from tinsmith.protocol.futures import Failure
from tinsmith.protocol.sessions import Kept
from tinsmith.state.store import Store

MAX_KEPT = 1024  # refusals of a tenant in a day
_DAY_MS = 24 * 3600 * 1000


class RefusedCreation(Kept):
    tenant: str
    session_id: str
    model_id: str
    rid: str
    failure: Failure


class Refusals:
    """Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, record: RefusedCreation) -> bool:
        """Idempotent, also for several that come at once. False, with nothing kept, where the tenant's bound is reached. Raises
        RequestRejected where the model was refused for something else."""
        held = await self.find(record.tenant, record.rid)
        if held is None:
            if not await self._store.reserve(f"{record.tenant}/refusals", record.rid, limit=MAX_KEPT, ttl_ms=_DAY_MS):
                return False
            try:
                await self._store.put(_table(record.tenant), record.rid, record.model_dump_json().encode(), expect=0)
                return True
            except StateContention:
                held = await self.find(record.tenant, record.rid)
                if held is None:
                    raise
        # The same refusal again is a repeat: there is no command that could tell.
        if held.failure != record.failure:
            raise RequestRejected(f"model_seq_id: {record.model_id} was refused for something else; count on")
        return True

    async def find(self, tenant: str, rid: str) -> RefusedCreation | None:
        held = await self._store.get(_table(tenant), rid)
        return None if held is None else RefusedCreation.model_validate_json(held.value)

    async def forget(self, tenant: str, sessions: Collection[str]) -> None:
        """Those of the sessions. Idempotent."""
        for rid, held in (await self._store.list(_table(tenant))).items():
            if RefusedCreation.model_validate_json(held.value).session_id in sessions:
                await self._store.delete(_table(tenant), rid)


def _table(tenant: str) -> str:
    return f"{tenant}/refused_creations"
