"""Routes by which checkpoints leave their run: an external save, links to its files, an archive, a copy.

Links are signed for the caller and need no key (`gateway.downloads`): SDKs fetch them without one.
"""

import asyncio
from email.utils import formatdate
from typing import Annotated

from fastapi import APIRouter, Header, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from tinsmith.gateway import bodies
from tinsmith.gateway.auth import JSON
from tinsmith.gateway.checkpoints import checked_ttl, reader_of
from tinsmith.gateway.copying import Copying
from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.downloads import link_to
from tinsmith.gateway.metadata import checked_metadata, checked_text
from tinsmith.gateway.signing import ARCHIVE, Links
from tinsmith.gateway.tinker.checkpoints import CHECKPOINT, FIELD, path_of
from tinsmith.gateway.tinker.queries import text_of
from tinsmith.gateway.tinker.submit import submit_turn
from tinsmith.protocol import ids, wire_json
from tinsmith.protocol.errors import InvalidRequest, ValidationFailed
from tinsmith.protocol.sessions import CheckpointKind, ModelRecord
from tinsmith.protocol.training import Kind, SaveWeightsExternal
from tinsmith.protocol.wire_json import Body, Count

MAX_KEY = 256  # characters of an idempotency key

router = APIRouter()


class SaveExternalBody(Body):
    path: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, object] | None = None
    age_encryption_recipients: list[str] = Field(default=[])

    def decode(self) -> SaveWeightsExternal:
        """Raises ValidationFailed."""
        if self.age_encryption_recipients:
            raise ValidationFailed("age_encryption_recipients: encryption is not offered; leave it out, and encrypt what you download")
        return SaveWeightsExternal(
            name=ids.check_name(self.path, "path"),
            ttl_seconds=checked_ttl(self.ttl_seconds),
            user_metadata=checked_metadata(self.user_metadata),
        )


class CopyBody(Body):
    """Into a project, or into the run of a number in a session."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    ttl_seconds: int | None = None


@router.post("/save_weights_external")
async def save_weights_external(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """A PEFT folder under a name that cannot be used twice."""
    tree = await bodies.read_tree(request)

    async def build(_: ModelRecord) -> SaveWeightsExternal:
        return wire_json.validate(SaveExternalBody, tree).decode()

    return await submit_turn(services, tenant, wire_json.json_head(tree), Kind.SAVE_WEIGHTS_EXTERNAL, build)


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> dict[str, object]:
    """A link to each file, by its name."""
    record = await services.checkpoint(tenant, path_of(run_id, kind, name), field=FIELD)
    if record.kind is not CheckpointKind.EXTERNAL:
        raise ValidationFailed(f"{FIELD}: {record.path} has no external weights; save them with save_weights_external")
    manifest = await asyncio.to_thread(services.artifacts.manifest, record.artifact)
    expires_s = await Links(services.store).expiry_s()
    urls = {file: await link_to(services, request, tenant, record.artifact, file, expires_s) for file in manifest.files}
    return {"urls": urls, "expires": text_of(1000 * expires_s)}


@router.get(f"{CHECKPOINT}/archive")
async def archive(run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """A link to the adapter's files as one archive: in JSON for whoever accepts that, else as a redirect."""
    record = await services.checkpoint(tenant, path_of(run_id, kind, name), field=FIELD)
    await asyncio.to_thread(services.artifacts.manifest, record.artifact)  # a link to nothing would be of no use
    expires_s = await Links(services.store).expiry_s()
    url = await link_to(services, request, tenant, record.artifact, ARCHIVE, expires_s)
    if JSON in request.headers.get("accept", ""):
        return JSONResponse({"url": url, "expires": text_of(1000 * expires_s)})
    return Response(status_code=302, headers={"Location": url, "Expires": formatdate(expires_s, usegmt=True)})


@router.post("/copy_weights")
async def copy_weights(
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> dict[str, object]:
    """Done when it answers; the same request under the same key again finds the copy."""
    body = await bodies.read(request, CopyBody)
    ttl_s = checked_ttl(body.ttl_seconds)
    reader = await reader_of(services, tenant, x_tinker_weights_access_token)
    copying = Copying(services, tenant, body.source_path, reader=reader)
    if body.destination_project_id is None and body.session_id is not None and body.model_seq_id is not None:
        return {"tinker_path": await copying.into_session(body.session_id, body.model_seq_id, ttl_s)}
    if body.destination_project_id is None or body.session_id is not None or body.model_seq_id is not None:
        raise InvalidRequest("destination_project_id, session_id, model_seq_id: send a project, or a session with a number")
    if x_idempotency_key is None or not 0 < len(x_idempotency_key) <= MAX_KEY:
        raise InvalidRequest(f"X-Idempotency-Key: missing or too long; send 1 to {MAX_KEY} characters, the same ones with each repeat")
    project_id = checked_text("destination_project_id", body.destination_project_id)
    return {"tinker_path": await copying.into_project(project_id, x_idempotency_key, ttl_s)}
