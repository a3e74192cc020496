"""Routes of sessions: create, keep alive, end, look up."""

import uuid

from fastapi import APIRouter, Request

from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata
from tinsmith.gateway.native.documents import answering, taking
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.sessions import open_session
from tinsmith.lifecycle.sessions import end_session
from tinsmith.protocol.native import CreateSession, EndSession, Heartbeat
from tinsmith.protocol.native_answers import SessionInfo, SessionList
from tinsmith.protocol.sessions import SessionRecord

router = APIRouter()


@router.post(CreateSession.path, **taking(CreateSession, SessionInfo))
async def create_session(request: Request, services: ServicesDep, tenant: TenantDep) -> SessionInfo:
    body = await read(request, CreateSession)
    record = SessionRecord(
        tenant=tenant,
        session_id=str(uuid.uuid4()),
        created_ms=await services.store.now_ms(),
        tags=list(body.tags),
        user_metadata=checked_metadata(body.metadata),
        project_id=body.project_id,
        display_name=body.display_name,
    )
    await open_session(services, record)
    return _info(record)


@router.post(Heartbeat.path, **taking(Heartbeat, SessionInfo))
async def heartbeat(request: Request, services: ServicesDep, tenant: TenantDep) -> SessionInfo:
    """410 once the session has ended."""
    body = await read(request, Heartbeat)
    record = await services.catalog.live_session(tenant, body.session_id)
    await services.catalog.beat(tenant, body.session_id, await services.store.now_ms())
    return _info(record)


@router.post(EndSession.path, **taking(EndSession, SessionInfo))
async def end(request: Request, services: ServicesDep, tenant: TenantDep) -> SessionInfo:
    """Idempotent; the first reason stays."""
    body = await read(request, EndSession)
    now_ms = await services.store.now_ms()
    return _info(await end_session(services.catalog, services.lanes, tenant, body.session_id, reason=body.reason, now_ms=now_ms))


@router.get("/sessions", **answering(SessionList))
async def list_sessions(services: ServicesDep, tenant: TenantDep) -> SessionList:
    """The caller's, in order of their creation."""
    records = sorted(await services.catalog.sessions(tenant), key=lambda record: (record.created_ms, record.session_id))
    return SessionList(sessions=tuple(map(_info, records)))


@router.get("/sessions/{session_id}", **answering(SessionInfo))
async def get_session(session_id: str, services: ServicesDep, tenant: TenantDep) -> SessionInfo:
    """One of the caller's."""
    return _info(await services.catalog.session(tenant, session_id))


def _info(record: SessionRecord) -> SessionInfo:
    return SessionInfo(
        session_id=record.session_id,
        created_ms=record.created_ms,
        tags=tuple(record.tags),
        metadata=record.user_metadata,
        project_id=record.project_id,
        display_name=record.display_name,
        ended_ms=record.ended_ms,
        end_reason=record.end_reason,
    )
