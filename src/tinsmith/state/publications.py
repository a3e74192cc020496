"""Publications: which checkpoints their owners let every tenant read, over a `Store`.

The one table of the store that is looked up without a tenant: a path leads to its owner. It names the artifact that was published, so a
checkpoint that is saved anew under the name is private until it is published in its turn, and a publication that its checkpoint has left
behind gives nothing away.
"""

from tinsmith.protocol.sessions import CheckpointRecord, Kept
from tinsmith.state.catalog import split_path
from tinsmith.state.store import Store

_TABLE = "system/published"


class Publication(Kept):
    """`path` of the checkpoint; `tenant`: its owner."""

    path: str
    tenant: str
    artifact: str

    @property
    def run_id(self) -> str:
        return split_path(self.path)[0]

    def covers(self, record: CheckpointRecord) -> bool:
        """Whether the checkpoint is what was published."""
        return (record.tenant, record.path, record.artifact) == (self.tenant, self.path, self.artifact)


class Publications:
    """By path. Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def publish(self, record: CheckpointRecord) -> None:
        """Idempotent."""
        publication = Publication(path=record.path, tenant=record.tenant, artifact=record.artifact)
        await self._store.put(_TABLE, record.path, publication.model_dump_json().encode())

    async def unpublish(self, record: CheckpointRecord) -> None:
        """Idempotent."""
        await self._store.delete(_TABLE, record.path)

    async def find(self, path: str) -> Publication | None:
        held = await self._store.get(_TABLE, path)
        return None if held is None else Publication.model_validate_json(held.value)

    async def all(self) -> dict[str, Publication]:
        """By path."""
        return {path: Publication.model_validate_json(held.value) for path, held in (await self._store.list(_TABLE)).items()}
