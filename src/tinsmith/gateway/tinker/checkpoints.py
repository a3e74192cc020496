"""Routes of checkpoints that exist: lists, what one holds, its time to live, its publication, its end.

Reading is for the owner, and for everybody where the checkpoint is published; changing is for the owner alone, and to others it is unknown.
The id of a checkpoint on this wire is "<kind>/<name>", its slash unescaped.
"""

from collections.abc import Sequence

from fastapi import APIRouter, Request

from tinsmith.gateway import bodies
from tinsmith.gateway.checkpoints import checked_ttl, optimizer_type
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.readable import own_checkpoints, published_checkpoints
from tinsmith.gateway.tinker.listing import Page, knows_external, newest_first, shown
from tinsmith.protocol import wire_json
from tinsmith.protocol.errors import NotFound, ValidationFailed
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord
from tinsmith.protocol.wire_json import Body
from tinsmith.state.audit import AuditEntry, AuditEvent, note
from tinsmith.state.shelf import Shelf

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
FIELD = "checkpoint_id"  # what this wire calls the path of a checkpoint, for messages

router = APIRouter()


class WeightsInfoBody(Body):
    tinker_path: str


class TtlBody(Body):
    """None, which must be sent as null: no time to live."""

    ttl_seconds: int | None = None


@router.post("/weights_info")
async def weights_info(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    body = await bodies.read(request, WeightsInfoBody)
    checkpoint = await services.checkpoint(tenant, body.tinker_path, field="tinker_path")
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": checkpoint.lora.rank,
        "train_unembed": checkpoint.lora.train_unembed,
        "train_mlp": checkpoint.lora.train_mlp,
        "train_attn": checkpoint.lora.train_attn,
        "optimizer_config": {"type": optimizer_type(checkpoint.optimizer)},
    }


@router.get("/checkpoints")
async def list_checkpoints(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """The caller's own, newest first."""
    page = Page.of(request.query_params, default=100)
    records = _offered(request, await own_checkpoints(services, tenant))
    listed = await shown(services, page.cut(records), await services.publications.all())
    return {"checkpoints": [entry.json() for entry in listed], "cursor": page.cursor(len(records))}


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints_of_run(run_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """All of an own run, newest first; of another tenant's run those that are published, if any is."""
    published = await services.publications.all()
    try:
        await services.catalog.model(tenant, run_id)
    except NotFound:
        records = await published_checkpoints(services, tenant, published, run_id)
        if not records:
            raise
    else:
        records = [record for record in await own_checkpoints(services, tenant) if record.run_id == run_id]
    listed = await shown(services, _offered(request, records), published)
    return {"checkpoints": [entry.json() for entry in listed]}


@router.delete(CHECKPOINT)
async def delete_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Unknown from now on; the sweep frees its bytes. Private before it is gone, so that a save under the name begins private."""
    record = await own(services, tenant, run_id, kind, name)
    await services.publications.unpublish(record)
    await Shelf(services.store).remove(record)
    await _noted(services, record, AuditEvent.CHECKPOINT_DELETE)
    return {}


@router.post(f"{CHECKPOINT}/publish")
async def publish(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Idempotent: clients send a 409 again for minutes."""
    record = await own(services, tenant, run_id, kind, name)
    await services.publications.publish(record)
    await _noted(services, record, AuditEvent.CHECKPOINT_PUBLISH)
    return {}


@router.delete(f"{CHECKPOINT}/publish")
async def unpublish(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Idempotent."""
    record = await own(services, tenant, run_id, kind, name)
    await services.publications.unpublish(record)
    await _noted(services, record, AuditEvent.CHECKPOINT_UNPUBLISH)
    return {}


@router.put(f"{CHECKPOINT}/ttl")
async def set_ttl(run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """From now on; null removes it."""
    tree = await bodies.read_tree(request)
    if not isinstance(tree, dict) or "ttl_seconds" not in tree:
        raise ValidationFailed("ttl_seconds: missing; send a number of seconds, or null for a checkpoint that does not expire")
    ttl_s = checked_ttl(wire_json.validate(TtlBody, tree).ttl_seconds)
    record = await own(services, tenant, run_id, kind, name)
    expires_ms = None if ttl_s is None else await services.store.now_ms() + 1000 * ttl_s
    await Shelf(services.store).set_expiry(record, expires_ms)
    await _noted(services, record, AuditEvent.CHECKPOINT_TTL, ttl_seconds="none" if ttl_s is None else str(ttl_s))
    return {}


async def own(services: Services, tenant: str, run_id: str, kind: str, name: str) -> CheckpointRecord:
    """Raises NotFound; ValidationFailed for a kind that is none."""
    return await services.own_checkpoint(tenant, path_of(run_id, kind, name), field=FIELD)


def path_of(run_id: str, kind: str, name: str) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


async def _noted(services: Services, record: CheckpointRecord, event: AuditEvent, **details: str) -> None:
    at_ms = await services.store.now_ms()
    await note(services.store, AuditEntry(tenant=record.tenant, at_ms=at_ms, event=event, subject=record.path, details=details))


def _offered(request: Request, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """What the caller's SDK can read, newest first."""
    with_external = knows_external(request.headers)
    return newest_first([record for record in records if with_external or record.kind is not CheckpointKind.EXTERNAL])
