"""Routes about sessions that a client does not hold itself: list, look up, search, move to a project.

Knows the catalog alone. A tenant sees its own sessions and no other: "accessible" is the same as "owned", and a search for another owner's
finds nothing. Ended sessions are found for as long as the catalog keeps them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import AwareDatetime, Field

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.readable import own_checkpoints
from tinsmith.gateway.tinker.queries import MAX_PAGE, check_scope, ms_of, number, text_of
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound, StateContention
from tinsmith.protocol.sessions import MAX_TEXT, CheckpointRecord, SessionRecord
from tinsmith.protocol.wire_bounds import MAX_SEQ
from tinsmith.protocol.wire_json import Body
from tinsmith.state.audit import AuditEntry, AuditEvent, note

DEFAULT_PROJECT = "default"  # of a session that was put into none: the wire wants a name in a summary
_FINISHED = ("success", "errored", "interrupted")  # what a client may report; every other reason is the server's own
_PAGE = 20
_ATTEMPTS = 3  # at a record that others change at the same time

FinishType = Literal["success", "errored", "interrupted"]

router = APIRouter()


def owner_urn(tenant: str) -> str:
    """Who a tenant is for clients of this wire, as `whoami` shows its organization."""
    return f"tml:organization:{tenant}"


class ProjectBody(Body):
    project_id: str = Field(max_length=MAX_TEXT)


class OwnOwner(Body):
    type: Literal["own"]


class AccessibleOwner(Body):
    type: Literal["accessible"]


class UserOwner(Body):
    type: Literal["user"]
    owner_urns: list[str] = Field(min_length=1, max_length=10)


class StatusQuery(Body):
    """`reasons`: of a client's own report alone; None matches every one."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[FinishType] | None = Field(default=None, min_length=1)

    def matches(self, record: SessionRecord) -> bool:
        return status_type(record) == self.type and (self.reasons is None or record.end_reason in self.reasons)


class Cursor(Body):
    """The last session of the page before."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchBody(Body):
    """Filters hold together, with one exception that the wire has: a session id and a display name are alternatives."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default={})
    display_name: str | None = Field(default=None, min_length=1)
    owner: Annotated[OwnOwner | AccessibleOwner | UserOwner, Field(discriminator="type")] = OwnOwner(type="own")
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: Cursor | None = None

    def matches(self, record: SessionRecord) -> bool:
        return (
            self._names(record)
            and (self.project_ids is None or project_of(record) in self.project_ids)
            and all((record.user_metadata or {}).get(key) == value for key, value in self.user_metadata.items())
            and (not isinstance(self.owner, UserOwner) or owner_urn(record.tenant) in self.owner.owner_urns)
            and (self.statuses is None or any(status.matches(record) for status in self.statuses))
        )

    def is_after_cursor(self, record: SessionRecord) -> bool:
        """Newest first, and of one moment the greatest id first."""
        if self.cursor is None:
            return True
        return _place(record) < (ms_of(self.cursor.last_created_at), self.cursor.last_session_id)

    def _names(self, record: SessionRecord) -> bool:
        if self.session_id is None and self.display_name is None:
            return True
        return record.session_id == self.session_id or self._shows(record)

    def _shows(self, record: SessionRecord) -> bool:
        """Every word, somewhere in the name, in either case."""
        if self.display_name is None or record.display_name is None:
            return False
        shown = record.display_name.casefold()
        return all(word in shown for word in self.display_name.casefold().split())


@router.get("/sessions")
async def list_sessions(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, list[str]]:
    """Ids, newest first."""
    check_scope(request.query_params)
    limit = number(request.query_params, "limit", _PAGE, least=0, most=MAX_PAGE)
    offset = number(request.query_params, "offset", 0, least=0, most=MAX_SEQ)
    records = _newest_first(await services.catalog.sessions(tenant))
    return {"sessions": [record.session_id for record in records[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Runs and samplers in the order of their creation."""
    check_scope(request.query_params)
    record = await services.catalog.session(tenant, session_id)
    models = [model for model in await services.catalog.models(tenant) if model.session_id == session_id]
    samplers = [sampler for sampler in await services.catalog.samplers(tenant) if sampler.session_id == session_id]
    return {
        "training_run_ids": [model.model_id for model in sorted(models, key=lambda model: (model.created_ms, model.model_id))],
        "sampler_ids": [sampler.sampler_id for sampler in sorted(samplers, key=lambda sampler: (sampler.created_ms, sampler.sampler_id))],
        "user_metadata": record.user_metadata,
        "display_name": record.display_name,
    }


@router.put("/sessions/{session_id}/project")
async def assign_project(session_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """A project is a name that a tenant gives; it need not exist before. Runs and samplers follow their session."""
    body = await bodies.read(request, ProjectBody)
    project_id = ids.check_name(body.project_id, "project_id")
    await _put_into(services, tenant, session_id, project_id)
    details = {"project_id": project_id}
    now_ms = await services.store.now_ms()
    await note(
        services.store,
        AuditEntry(tenant=tenant, at_ms=now_ms, event=AuditEvent.PROJECT_SESSION_SET, subject=session_id, details=details),
    )
    return {}


@router.post("/sessions/search")
async def search_sessions(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """One page, newest first; the cursor names its last session, so sessions that begin or go meanwhile shift nothing."""
    body = await bodies.read(request, SearchBody)
    found = [record for record in await services.catalog.sessions(tenant) if body.matches(record) and body.is_after_cursor(record)]
    page = _newest_first(found)[: body.limit]
    stored = await _stored(services, tenant) if page else {}
    answer: dict[str, object] = {"sessions": [_summary(record, stored.get(record.session_id, _Stored())) for record in page]}
    if len(found) > len(page):
        answer["next_cursor"] = {"last_created_at": text_of(page[-1].created_ms), "last_session_id": page[-1].session_id}
    return answer


def project_of(record: SessionRecord) -> str:
    return DEFAULT_PROJECT if record.project_id is None else record.project_id


def status_type(record: SessionRecord) -> Literal["active", "cancelled", "client_finished"]:
    """A session fails by no request here, so nothing has the wire's status "failed"."""
    if record.ended_ms is None:
        return "active"
    return "client_finished" if record.end_reason in _FINISHED else "cancelled"


@dataclass(frozen=True, slots=True)
class _Stored:
    """Checkpoints of one session that have not expired."""

    num: int = 0
    num_bytes: int = 0


def _status(record: SessionRecord) -> dict[str, object]:
    """`detail` of a session that the server ended: why."""
    match kind := status_type(record):
        case "client_finished":
            return {"type": kind, "reason": {"type": record.end_reason}}
        case "cancelled":
            return {"type": kind, "detail": record.end_reason}
        case _:
            return {"type": kind}


def _summary(record: SessionRecord, stored: _Stored) -> dict[str, object]:
    return {
        "session_id": record.session_id,
        "created_at": text_of(record.created_ms),
        "owner": owner_urn(record.tenant),
        "project_id": project_of(record),
        "status": _status(record),
        "checkpoints_count": stored.num,
        "checkpoint_storage_bytes": stored.num_bytes,
        "display_name": record.display_name,
        "user_metadata": record.user_metadata,
    }


async def _stored(services: Services, tenant: str) -> dict[str, _Stored]:
    by_session: defaultdict[str, list[CheckpointRecord]] = defaultdict(list)
    for record in await own_checkpoints(services, tenant):
        by_session[record.session_id].append(record)
    return {session_id: _Stored(len(records), num_bytes_of(records)) for session_id, records in by_session.items()}


def num_bytes_of(records: Iterable[CheckpointRecord]) -> int:
    """A checkpoint whose size nobody has measured counts as none."""
    return sum(record.size_bytes for record in records if record.size_bytes is not None)


def _place(record: SessionRecord) -> tuple[int, str]:
    return record.created_ms, record.session_id


def _newest_first(records: Iterable[SessionRecord]) -> list[SessionRecord]:
    return sorted(records, key=_place, reverse=True)


async def _put_into(services: Services, tenant: str, session_id: str, project_id: str) -> None:
    """Raises NotFound; StateContention where others keep changing the session."""
    table = f"{tenant}/sessions"
    for attempt in range(1, _ATTEMPTS + 1):
        held = await services.store.get(table, session_id)
        if held is None:
            raise NotFound(f"session {session_id!r} is unknown; use the id that its creation answered")
        record = SessionRecord.model_validate_json(held.value).model_copy(update={"project_id": project_id})
        try:
            await services.store.put(table, session_id, record.model_dump_json().encode(), expect=held.version)
        except StateContention:
            if attempt == _ATTEMPTS:
                raise
        else:
            return
