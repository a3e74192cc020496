"""The session that a face keeps for a tenant whose protocol knows none: which one it is now. One record a tenant and face.

What belongs to a session (its samplers) ends with it, so a face begins a new one now and then; the old one ends by its silence. Knows
nothing of requests.
"""

from dataclasses import dataclass

from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import Kept
from tinsmith.state.store import Store


class FaceSession(Kept):
    tenant: str
    face: str
    session_id: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class Held:
    """`version` 0: there is none."""

    record: FaceSession | None
    version: int


class FaceSessions:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def current(self, tenant: str, face: str) -> Held:
        held = await self._store.get(_table(tenant), face)
        return Held(None, 0) if held is None else Held(FaceSession.model_validate_json(held.value), held.version)

    async def replace(self, record: FaceSession, seen: Held) -> FaceSession:
        """Make it the current one, unless another process was first: the answer is the one that is current now. Raises StateContention
        while the store is away."""
        try:
            await self._store.put(_table(record.tenant), record.face, record.model_dump_json().encode(), expect=seen.version)
        except StateContention:
            found = await self.current(record.tenant, record.face)
            if found.record is None or found.version == seen.version:
                raise
            return found.record
        return record


def _table(tenant: str) -> str:
    return f"{tenant}/face_sessions"
