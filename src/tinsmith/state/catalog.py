"""Catalog: what the cluster knows of sessions, models, samplers and checkpoints, by tenant, over a `Store`.

Every look-up takes the tenant, so a foreign id is unknown by construction. Records that belong to a command (a model to its creation, a
checkpoint to its save) are not written here but together with the lane's own change: `*_write` builds them.
"""

from dataclasses import dataclass
from typing import TypeVar

from tinsmith.protocol.errors import NotFound, SessionEnded, StateContention, ValidationFailed
from tinsmith.protocol.futures import Write
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, Kept, ModelRecord, SamplerRecord, SessionRecord
from tinsmith.state.store import Store

_TENANTS = "system/tenants"
_SCHEME = "tinker://"
_PIN_MARK = "#"
_Record = TypeVar("_Record", bound=Kept)


def model_write(record: ModelRecord) -> Write:
    return _write(f"{record.tenant}/models", record.model_id, record)


def ended_model_writes(record: ModelRecord) -> tuple[Write, ...]:
    """Ended models lie apart, so that who looks after the live ones reads no others."""
    return _write(f"{record.tenant}/ended_models", record.model_id, record), Write(f"{record.tenant}/models", record.model_id, None)


def sampler_write(record: SamplerRecord) -> Write:
    return _write(f"{record.tenant}/samplers", record.sampler_id, record)


def checkpoint_write(record: CheckpointRecord) -> Write:
    return _write(f"{record.tenant}/checkpoints", f"{record.run_id}/{record.kind}/{record.name}", record)


@dataclass(frozen=True, slots=True)
class Pin:
    """Entry `seq` of the lane loads the artifact. A replay may do so again until the lane's floor has passed the entry, whatever became of
    the checkpoint by then."""

    tenant: str
    lane: str
    seq: int
    artifact: str


def pin_write(pin: Pin) -> Write:
    return Write(f"{pin.tenant}/pins", _pin_id(pin), pin.artifact.encode())


class Catalog:
    """Typed look-ups and the few writes that are no part of a command."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store

    async def tenants(self) -> list[str]:
        return sorted(await self._store.list(_TENANTS))

    async def add_session(self, record: SessionRecord) -> None:
        await self._store.put(_TENANTS, record.tenant, b"")
        await self._store.put(f"{record.tenant}/sessions", record.session_id, _encode(record), expect=0)
        await self.beat(record.tenant, record.session_id, record.created_ms)

    async def session(self, tenant: str, session_id: str) -> SessionRecord:
        """Raises NotFound."""
        return await self._get(f"{tenant}/sessions", session_id, SessionRecord, "session")

    async def live_session(self, tenant: str, session_id: str) -> SessionRecord:
        """Raises NotFound, SessionEnded."""
        record = await self.session(tenant, session_id)
        if record.ended_ms is not None:
            raise SessionEnded(f"session {session_id} has ended ({record.end_reason}); create a new one")
        return record

    async def sessions(self, tenant: str) -> list[SessionRecord]:
        return await self._all(f"{tenant}/sessions", SessionRecord)

    async def end_session(self, tenant: str, session_id: str, *, reason: str, now_ms: int) -> SessionRecord:
        """Mark the session as ended; the first reason wins. Raises NotFound, StateContention."""
        table = f"{tenant}/sessions"
        held = await self._store.get(table, session_id)
        if held is None:
            raise NotFound(f"session {session_id!r} is unknown; create one")
        record = SessionRecord.model_validate_json(held.value)
        if record.ended_ms is None:
            record = record.model_copy(update={"ended_ms": now_ms, "end_reason": reason})
            await self._store.put(table, session_id, _encode(record), expect=held.version)
        await self._store.delete(f"{tenant}/beats", session_id)
        return record

    async def beat(self, tenant: str, session_id: str, now_ms: int) -> None:
        """Note a sign of life."""
        await self._store.put(f"{tenant}/beats", session_id, b"%d" % now_ms)

    async def beats(self, tenant: str) -> dict[str, int]:
        """Last sign of life of each live session, ms."""
        return {session_id: int(held.value) for session_id, held in (await self._store.list(f"{tenant}/beats")).items()}

    async def model(self, tenant: str, model_id: str) -> ModelRecord:
        """Live or ended. Raises NotFound."""
        held = await self._store.get(f"{tenant}/models", model_id)
        if held is not None:
            return ModelRecord.model_validate_json(held.value)
        return await self._get(f"{tenant}/ended_models", model_id, ModelRecord, "model")

    async def models(self, tenant: str) -> list[ModelRecord]:
        """Live and ended."""
        live = await self._all(f"{tenant}/models", ModelRecord)
        ended = await self._all(f"{tenant}/ended_models", ModelRecord)  # read last: a model that ends meanwhile is in one of them
        return list({record.model_id: record for record in (*live, *ended)}.values())

    async def live_models(self, tenant: str) -> list[ModelRecord]:
        return await self._all(f"{tenant}/models", ModelRecord)

    async def forget_model(self, record: ModelRecord) -> None:
        """Of an ended model. Idempotent."""
        await self._store.delete(f"{record.tenant}/ended_models", record.model_id)

    async def forget_session(self, record: SessionRecord) -> None:
        """Idempotent."""
        await self._store.delete(f"{record.tenant}/sessions", record.session_id)

    async def forget_sampler(self, record: SamplerRecord) -> None:
        """Idempotent."""
        await self._store.delete(f"{record.tenant}/samplers", record.sampler_id)

    async def forget_checkpoint(self, record: CheckpointRecord) -> None:
        """Idempotent. Of a run that has ended: no other can have taken the name."""
        write = checkpoint_write(record)
        await self._store.delete(write.table, write.id)

    async def add_sampler(self, record: SamplerRecord) -> SamplerRecord:
        """Idempotent: the first record of an id stays, also of several that come at once. Answers the one that stayed. Raises
        StateContention while the store is away."""
        table, sampler_id = f"{record.tenant}/samplers", record.sampler_id
        if await self._store.get(table, sampler_id) is None:
            try:
                await self._store.put(table, sampler_id, _encode(record), expect=0)
            except StateContention:
                if await self._store.get(table, sampler_id) is None:
                    raise
        return await self.sampler(record.tenant, sampler_id)

    async def sampler(self, tenant: str, sampler_id: str) -> SamplerRecord:
        """Raises NotFound."""
        return await self._get(f"{tenant}/samplers", sampler_id, SamplerRecord, "sampling session")

    async def samplers(self, tenant: str) -> list[SamplerRecord]:
        return await self._all(f"{tenant}/samplers", SamplerRecord)

    async def checkpoint(self, tenant: str, path: str, *, field: str = "path") -> CheckpointRecord:
        """Resolve "tinker://<run>/<kind>/<name>". `field`: what the caller calls the path, for messages. Raises ValidationFailed
        (malformed), NotFound."""
        run_id, kind, name = split_path(path, field)
        return await self._get(f"{tenant}/checkpoints", f"{run_id}/{kind}/{name}", CheckpointRecord, "checkpoint")

    async def checkpoints(self, tenant: str) -> list[CheckpointRecord]:
        return await self._all(f"{tenant}/checkpoints", CheckpointRecord)

    async def pins(self, tenant: str) -> list[Pin]:
        return [_pin(tenant, pin_id, held.value) for pin_id, held in (await self._store.list(f"{tenant}/pins")).items()]

    async def unpin(self, pin: Pin) -> None:
        """Idempotent."""
        await self._store.delete(f"{pin.tenant}/pins", _pin_id(pin))

    async def _get(self, table: str, id: str, kind: type[_Record], what: str) -> _Record:
        held = await self._store.get(table, id)
        if held is None:
            raise NotFound(f"{what} {id!r} is unknown; use the id that its creation answered")
        return kind.model_validate_json(held.value)

    async def _all(self, table: str, kind: type[_Record]) -> list[_Record]:
        return [kind.model_validate_json(held.value) for held in (await self._store.list(table)).values()]


def split_path(path: str, field: str = "path") -> tuple[str, CheckpointKind, str]:
    """(run id, kind, name) of a tinker:// path. Raises ValidationFailed naming `field`."""
    segments = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(segments) != 3 or segments[1] not in list(CheckpointKind):
        raise ValidationFailed(f"{field}: {path[:200]!r} is no checkpoint; send tinker://<run>/<{'|'.join(CheckpointKind)}>/<name>")
    return segments[0], CheckpointKind(segments[1]), segments[2]


def _pin_id(pin: Pin) -> str:
    return f"{pin.lane}{_PIN_MARK}{pin.seq}"


def _pin(tenant: str, pin_id: str, value: bytes) -> Pin:
    lane, _, seq = pin_id.rpartition(_PIN_MARK)
    return Pin(tenant, lane, int(seq), value.decode())


def _encode(record: Kept) -> bytes:
    return record.model_dump_json().encode()


def _write(table: str, id: str, record: Kept) -> Write:
    return Write(table, id, _encode(record))
