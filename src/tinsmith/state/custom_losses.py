"""The losses that callers have uploaded, by tenant, over a `Store`.

A loss belongs to the session that created it. Its id is that of the request that did, so one look-up serves both.
"""

from collections.abc import Collection

from tinsmith.protocol.custom_losses import CustomLoss
from tinsmith.protocol.errors import NotFound, RequestRejected, StateContention
from tinsmith.protocol.sessions import Kept
from tinsmith.state.store import Store


class CustomLossRecord(Kept):
    tenant: str
    session_id: str
    loss_id: str
    loss: CustomLoss
    created_ms: int


class CustomLosses:
    """Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, record: CustomLossRecord) -> None:
        """Idempotent, also for several that come at once. Raises RequestRejected where another loss has the id."""
        held = await self.find(record.tenant, record.loss_id)
        if held is None:
            try:
                await self._store.put(_table(record.tenant), record.loss_id, record.model_dump_json().encode(), expect=0)
                return
            except StateContention:
                held = await self.find(record.tenant, record.loss_id)
                if held is None:
                    raise
        if held.loss.encoded() != record.loss.encoded():
            raise RequestRejected("custom_loss_seq_id: the session has created another loss under this number; count on")

    async def find(self, tenant: str, loss_id: str) -> CustomLossRecord | None:
        held = await self._store.get(_table(tenant), loss_id)
        return None if held is None else CustomLossRecord.model_validate_json(held.value)

    async def of_session(self, tenant: str, session_id: str, loss_id: str) -> CustomLoss:
        """Raises NotFound, also for a loss of another session."""
        record = await self.find(tenant, loss_id)
        if record is None or record.session_id != session_id:
            raise NotFound(f"loss {loss_id[:100]!r} is unknown in this session; use the loss_id that create_custom_loss answered in it")
        return record.loss

    async def forget(self, tenant: str, sessions: Collection[str]) -> None:
        """Those of the sessions. Idempotent."""
        for loss_id, held in (await self._store.list(_table(tenant))).items():
            if CustomLossRecord.model_validate_json(held.value).session_id in sessions:
                await self._store.delete(_table(tenant), loss_id)


def _table(tenant: str) -> str:
    return f"{tenant}/custom_losses"
