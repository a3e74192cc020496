"""Shelf: what becomes of a checkpoint after its save: another time to live, its end, a copy in a run of its own. Over a `Store`.

Bytes are not touched here: a copy shares the artifact of its source, and the sweep frees an artifact that no record names any more.
"""

from tinsmith.protocol.errors import NotFound, StateContention
from tinsmith.protocol.futures import Write
from tinsmith.protocol.sessions import CheckpointRecord, ModelRecord
from tinsmith.state.catalog import checkpoint_write, ended_model_writes
from tinsmith.state.store import Store


class Shelf:
    """Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set_expiry(self, record: CheckpointRecord, expires_ms: int | None) -> None:
        """None: the checkpoint stays until it is deleted. Raises NotFound for one that was deleted or saved anew meanwhile."""
        write = checkpoint_write(record.model_copy(update={"expires_ms": expires_ms}))
        held = await self._store.get(write.table, write.id)
        if held is None or CheckpointRecord.model_validate_json(held.value).artifact != record.artifact:
            raise NotFound(f"checkpoint {record.path!r} was deleted or saved anew meanwhile; look it up again")
        await self._store.put(write.table, write.id, _value(write), expect=held.version)

    async def remove(self, record: CheckpointRecord) -> None:
        """Idempotent."""
        write = checkpoint_write(record)
        await self._store.delete(write.table, write.id)

    async def add_copy(self, run: ModelRecord, checkpoint: CheckpointRecord) -> ModelRecord:
        """Write a run that has ended and the one checkpoint that it holds. The run comes last: whoever finds it finds the checkpoint too.
        Answers the run that was there first, where another came before."""
        write = checkpoint_write(checkpoint)
        await self._store.put(write.table, write.id, _value(write))
        entry, _ = ended_model_writes(run)
        try:
            await self._store.put(entry.table, entry.id, _value(entry), expect=0)
        except StateContention:
            held = await self._store.get(entry.table, entry.id)
            if held is None:
                raise
            return ModelRecord.model_validate_json(held.value)
        return run


def _value(write: Write) -> bytes:
    if write.value is None:
        raise ValueError(f"{write.table}: {write.id!r} is a deletion")
    return write.value
