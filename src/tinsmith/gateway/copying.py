"""Copies of checkpoints: a new run that holds one checkpoint, shares its bytes with the source, and is never trained.

A copy is where its caller, or its idempotency key, says; so the same request again finds the copy and needs no record of its own. It does
not look at the source then, which may be gone by now.
"""

import hashlib
import hmac
import uuid

from tinsmith.gateway.deps import Services
from tinsmith.gateway.storage import check_room
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound, RequestRejected
from tinsmith.protocol.sessions import CheckpointRecord, ModelRecord, SessionRecord, checkpoint_path
from tinsmith.state.audit import AuditEntry, AuditEvent, note
from tinsmith.state.catalog import split_path
from tinsmith.state.shelf import Shelf

COPIED = "copied"  # why the session of a copy has ended

FIELD = "source_path"


class Copying:
    """One copy. `reader`: the tenant as which the source is read, whose credential the caller sent where it is another one."""

    def __init__(self, services: Services, tenant: str, source_path: str, *, reader: str) -> None:
        self._services = services
        self._tenant = tenant
        self._source_path = source_path
        self._reader = reader

    async def into_session(self, session_id: str, model_seq_id: int, ttl_s: int | None) -> str:
        """The copy's path, in the run of that number. Raises ValidationFailed (malformed path), NotFound, SessionEnded, QuotaExceeded, and
        RequestRejected for a number that was used for something else."""
        await self._services.catalog.live_session(self._tenant, session_id)
        run_id = ids.model_id(session_id, model_seq_id)
        copied = await self._repeated(run_id)
        return copied if copied is not None else await self._copy(session_id, run_id, ttl_s)

    async def into_project(self, project_id: str, key: str, ttl_s: int | None) -> str:
        """The copy's path, in a session of its own, which has ended. `key`: the caller's, for this request. Raises as `into_session`;
        RequestRejected for a key that was used for another copy."""
        session_id = await self._session_id(key)
        run_id = ids.model_id(session_id, 0)
        copied = await self._repeated(run_id)
        if copied is not None:
            return await self._of_project(copied, session_id, project_id)
        await self._source()  # before a session for nothing
        await self._open(session_id, project_id)
        return await self._copy(session_id, run_id, ttl_s)

    async def _copy(self, session_id: str, run_id: str, ttl_s: int | None) -> str:
        source, now_ms = await self._source(), await self._services.store.now_ms()
        await check_room(self._services, self._tenant)
        run = ModelRecord(
            tenant=self._tenant,
            session_id=session_id,
            model_id=run_id,
            base_model=source.base_model,
            lora=source.lora,
            optimizer=source.optimizer,
            schedule=source.schedule,
            created_ms=now_ms,
            ended_ms=now_ms,
            copied_from=source.path,
        )
        expires_ms = None if ttl_s is None else now_ms + 1000 * ttl_s
        place = {"tenant": self._tenant, "session_id": session_id, "run_id": run_id, "created_ms": now_ms, "expires_ms": expires_ms}
        copy = source.model_copy(update=place)
        held = await Shelf(self._services.store).add_copy(run, copy)
        await self._note(copy)
        return self._path_in(held)

    async def _source(self) -> CheckpointRecord:
        return await self._services.checkpoint(self._reader, self._source_path, field=FIELD)

    async def _repeated(self, run_id: str) -> str | None:
        """The path of the copy that is there already. Raises RequestRejected where there is something else."""
        split_path(self._source_path, FIELD)
        try:
            return self._path_in(await self._services.catalog.model(self._tenant, run_id))
        except NotFound:
            return None

    def _path_in(self, run: ModelRecord) -> str:
        if run.copied_from != self._source_path:
            raise RequestRejected(f"{run.model_id} was used for something else; send another model_seq_id, or another X-Idempotency-Key")
        _, kind, name = split_path(self._source_path, FIELD)
        return checkpoint_path(run.model_id, kind, name)

    async def _of_project(self, path: str, session_id: str, project_id: str) -> str:
        session = await self._services.catalog.session(self._tenant, session_id)
        if session.project_id != project_id:
            raise RequestRejected("X-Idempotency-Key: was used for a copy into another project; send another key")
        return path

    async def _open(self, session_id: str, project_id: str) -> None:
        """A session that ends as it begins: nothing can be done in it. Idempotent."""
        catalog, now_ms = self._services.catalog, await self._services.store.now_ms()
        try:
            await catalog.session(self._tenant, session_id)
        except NotFound:
            await catalog.add_session(SessionRecord(tenant=self._tenant, session_id=session_id, created_ms=now_ms, project_id=project_id))
        await catalog.end_session(self._tenant, session_id, reason=COPIED, now_ms=now_ms)

    async def _session_id(self, key: str) -> str:
        """Follows from tenant and key, and cannot be guessed from them."""
        secret = (await self._services.identity.current()).secret
        digest = hmac.new(secret, f"copy\0{self._tenant}\0{key}".encode(), hashlib.sha256).digest()
        return str(uuid.UUID(bytes=digest[:16], version=4))

    async def _note(self, copy: CheckpointRecord) -> None:
        details = {"session_id": copy.session_id, "model_id": copy.run_id, "base_model": copy.base_model, "copied_from": self._source_path}
        entry = AuditEntry(tenant=copy.tenant, at_ms=copy.created_ms, event=AuditEvent.CHECKPOINT_SAVE, subject=copy.path, details=details)
        await note(self._services.store, entry)
