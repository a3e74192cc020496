"""Routes of models: create (anew, or on a checkpoint), unload, look up."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.checkpoints import check_same_optimizer, training_checkpoint
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata
from tinsmith.gateway.models import unload
from tinsmith.gateway.native.admission import check_operation, check_optimizer
from tinsmith.gateway.native.commands import lora_of
from tinsmith.gateway.native.documents import answering, taking
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.native.tasks import promise
from tinsmith.gateway.submission import new_model_id, submit_creation
from tinsmith.protocol import training
from tinsmith.protocol.envelopes import TaskEnvelope
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.native import CreateModel, UnloadModel
from tinsmith.protocol.native_answers import ModelInfo, ModelList
from tinsmith.protocol.sessions import CheckpointRecord, ModelRecord
from tinsmith.protocol.training import LoadWeights

router = APIRouter()


@router.post(CreateModel.path, **taking(CreateModel, TaskEnvelope))
async def create_model(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """The model takes requests from now on; they run once it is there."""
    body = await read(request, CreateModel)
    model_id, rid = await new_model_id(services, tenant, body.session_id, body.model_seq)
    checkpoint = None
    if body.checkpoint is not None:
        checkpoint = await training_checkpoint(services, tenant, body.checkpoint, base_model=body.base_model, field="checkpoint")
    model = await _record(services, tenant, body, model_id, rid, checkpoint)
    command: training.CreateModel | LoadWeights = training.CreateModel(lora=model.lora)
    if checkpoint is not None:
        command = LoadWeights(path=checkpoint.path, artifact=checkpoint.artifact, optimizer=body.load_optimizer, lora=model.lora)
    check_operation(services, model.base_model, command.kind)
    if model.optimizer is not None:
        check_optimizer(services, model.base_model, model.optimizer)
    await submit_creation(services, rid, model, command)
    return await promise(services, tenant, rid)


@router.post(UnloadModel.path, **taking(UnloadModel, ModelInfo))
async def unload_model(request: Request, services: ServicesDep, tenant: TenantDep) -> ModelInfo:
    """Closes the model at once; pending requests of it fail. Idempotent."""
    body = await read(request, UnloadModel)
    await unload(services, tenant, body.model_id)
    return _info(await services.catalog.model(tenant, body.model_id), next_seq=None)


@router.get("/models", **answering(ModelList))
async def list_models(services: ServicesDep, tenant: TenantDep) -> ModelList:
    """The caller's, in order of their creation."""
    records = sorted(await services.catalog.models(tenant), key=lambda record: (record.created_ms, record.model_id))
    return ModelList(models=tuple(_info(record, next_seq=None) for record in records))


@router.get("/models/{model_id}", **answering(ModelInfo))
async def get_model(model_id: str, services: ServicesDep, tenant: TenantDep) -> ModelInfo:
    """Answered from the catalog, so a model that is being restored answers too."""
    record = await services.catalog.model(tenant, model_id)
    lane = await services.lanes.lane(model_id)
    return _info(record, next_seq=None if lane is None else lane.last_seq + 1)


async def _record(
    services: Services, tenant: str, body: CreateModel, model_id: str, rid: str, checkpoint: CheckpointRecord | None
) -> ModelRecord:
    """What the request leaves open comes from the checkpoint. Raises NotFound, ValidationFailed."""
    base_model = body.base_model if checkpoint is None else checkpoint.base_model
    if base_model is None:
        raise ValidationFailed("base_model, checkpoint: send one of them")
    optimizer = None if body.optimizer is None else body.optimizer.params()
    schedule = body.schedule
    if checkpoint is not None:
        optimizer = checkpoint.optimizer if optimizer is None else optimizer
        schedule = checkpoint.schedule if schedule is None else schedule
        if body.load_optimizer:
            check_same_optimizer(checkpoint, optimizer, field="checkpoint")
    return ModelRecord(
        tenant=tenant,
        session_id=body.session_id,
        model_id=model_id,
        base_model=services.base_model(base_model).name,
        lora=lora_of(body.lora, rid) if checkpoint is None else checkpoint.lora,
        optimizer=optimizer,
        schedule=schedule,
        created_ms=await services.store.now_ms(),
        user_metadata=checked_metadata(body.metadata),
    )


def _info(record: ModelRecord, *, next_seq: int | None) -> ModelInfo:
    return ModelInfo(
        model_id=record.model_id,
        session_id=record.session_id,
        base_model=record.base_model,
        lora_rank=record.lora.rank,
        optimizer=record.optimizer,
        schedule=record.schedule,
        metadata=record.user_metadata,
        created_ms=record.created_ms,
        ended_ms=record.ended_ms,
        next_seq=next_seq,
    )
