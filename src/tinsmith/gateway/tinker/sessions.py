"""Routes of the service and its sessions: client configuration, capabilities, session life, health, telemetry."""

import uuid

from fastapi import APIRouter, Request
from pydantic import Field

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata, checked_text
from tinsmith.gateway.sessions import open_session
from tinsmith.lifecycle.sessions import end_session
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import MAX_TAGS, SessionRecord
from tinsmith.protocol.wire_json import Body

router = APIRouter()

# Absent flags take the SDK's defaults; these are stated since the server relies on them.
CLIENT_CONFIG: dict[str, bool | int] = {
    "parallel_fwdbwd_chunks": True,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_join_sampling_session": True,
}
DYNAMIC_CONFIG: dict[str, bool | int] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


class CreateSessionBody(Body):
    tags: list[str] = Field(default=[], max_length=MAX_TAGS)
    user_metadata: dict[str, object] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(Body):
    session_id: str


class FinishReason(Body):
    type: str = "success"


class FinishBody(Body):
    reason: FinishReason = FinishReason()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(request: Request, services: ServicesDep) -> dict[str, bool | int]:
    await bodies.receive(request)
    return CLIENT_CONFIG | {
        "custom_loss_server_side": services.config.gateway.custom_losses,
        "pjwt_auth_enabled": services.config.auth.has_tokens,
        "fwdbwd_max_chunk_len": services.config.gateway.max_chunk_len,
        "proto_compress_fwdbwd": services.config.gateway.compress_uploads,
        "sample_use_retrieve_futures": services.config.gateway.session_poller,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> dict[str, bool | int]:
    await bodies.receive(request)
    return DYNAMIC_CONFIG


@router.get("/get_server_capabilities")
async def get_server_capabilities(services: ServicesDep) -> dict[str, object]:
    models = sorted(services.base_models.values(), key=lambda info: info.name)
    return {
        "supported_models": [
            {"model_name": info.name, "max_context_length": info.max_context, "trainable": True, "sampleable": True} for info in models
        ]
    }


@router.post("/create_session")
async def create_session(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    body = await bodies.read(request, CreateSessionBody)
    record = SessionRecord(
        tenant=tenant,
        session_id=str(uuid.uuid4()),
        created_ms=await services.store.now_ms(),
        tags=[checked_text("tags", tag) for tag in body.tags],
        user_metadata=checked_metadata(body.user_metadata),
        sdk_version=checked_text("sdk_version", body.sdk_version),
        project_id=checked_text("project_id", body.project_id),
        display_name=checked_text("display_name", body.display_name),
    )
    await open_session(services, record)
    return {"session_id": record.session_id, "type": "create_session"}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, str]:
    """410 once the session has ended: the client then stops beating."""
    body = await bodies.read(request, HeartbeatBody)
    await services.catalog.live_session(tenant, body.session_id)
    await services.catalog.beat(tenant, body.session_id, await services.store.now_ms())
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Idempotent; the first reason stays."""
    body = await bodies.read(request, FinishBody)
    if body.reason.type not in ("success", "errored", "interrupted"):
        raise ValidationFailed(f"reason.type: {body.reason.type[:40]!r} is no reason; send success, errored or interrupted")
    await end_session(services.catalog, services.lanes, tenant, session_id, reason=body.reason.type, now_ms=await services.store.now_ms())
    return {}


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Read and dropped: events can hold the caller's request headers, its key among them."""
    await bodies.receive(request)
    return {"status": "accepted"}
