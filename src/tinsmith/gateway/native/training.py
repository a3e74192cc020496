"""Routes of a model's calls: passes, steps, saves and loads. Each answers the envelope of a command in the model's lane.

A call that is refused leaves nothing behind, so its seq id is still free: the client gives it to its next call.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway import bodies
from tinsmith.gateway.checkpoints import check_fits, optimizer_type, training_checkpoint
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata
from tinsmith.gateway.native.admission import check_engine_fields, check_loss, check_operation, check_optimizer, training_engine
from tinsmith.gateway.native.commands import compute_of, num_ids, step_of, text_form
from tinsmith.gateway.native.documents import taking
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.native.tasks import promise
from tinsmith.gateway.native.text_bounds import check_data
from tinsmith.gateway.submission import INLINE_TOKENS, queue, turn_of
from tinsmith.protocol import ids, training
from tinsmith.protocol.envelopes import TaskEnvelope
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.native import (
    AdamWConfig,
    Evaluate,
    Forward,
    ForwardBackward,
    LoadWeights,
    ModelRequest,
    OptimStep,
    PassRequest,
    PublishSamplerWeights,
    SaveWeights,
    SgdConfig,
    TrainStep,
)
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import Compute, Kind, TrainingCommand
from tinsmith.protocol.wire_bounds import Head

router = APIRouter()

_Call = TypeVar("_Call", bound=ModelRequest)


@router.post(Forward.path, **taking(Forward, TaskEnvelope))
async def forward(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    return await _submit(request, services, tenant, Forward, Kind.FORWARD, partial(_pass, request))


@router.post(ForwardBackward.path, **taking(ForwardBackward, TaskEnvelope))
async def forward_backward(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    return await _submit(request, services, tenant, ForwardBackward, Kind.FORWARD_BACKWARD, partial(_pass, request))


@router.post(Evaluate.path, **taking(Evaluate, TaskEnvelope))
async def evaluate(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    return await _submit(request, services, tenant, Evaluate, Kind.EVALUATE, partial(_pass, request))


@router.post(OptimStep.path, **taking(OptimStep, TaskEnvelope))
async def optim_step(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    async def build(services: Services, model: ModelRecord, body: OptimStep) -> training.OptimStep:
        return _step(services, model, body.optimizer)

    return await _submit(request, services, tenant, OptimStep, Kind.OPTIM_STEP, build)


@router.post(TrainStep.path, **taking(TrainStep, TaskEnvelope))
async def train_step(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    async def build(services: Services, model: ModelRecord, body: TrainStep) -> training.TrainStep:
        step = _step(services, model, body.optimizer)
        return training.TrainStep(await _pass(request, services, model, body), step)

    return await _submit(request, services, tenant, TrainStep, Kind.TRAIN_STEP, build)


@router.post(SaveWeights.path, **taking(SaveWeights, TaskEnvelope))
async def save_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    async def build(_: Services, __: ModelRecord, body: SaveWeights) -> training.SaveWeights:
        return training.SaveWeights(
            name=ids.check_name(body.name, "name"),
            overwrite=body.overwrite,
            ttl_seconds=body.ttl_s,
            user_metadata=checked_metadata(body.metadata),
        )

    return await _submit(request, services, tenant, SaveWeights, Kind.SAVE_WEIGHTS, build)


@router.post(LoadWeights.path, **taking(LoadWeights, TaskEnvelope))
async def load_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    async def build(services: Services, model: ModelRecord, body: LoadWeights) -> training.LoadWeights:
        checkpoint = await training_checkpoint(services, tenant, body.checkpoint, base_model=None, field="checkpoint")
        check_fits(checkpoint, model, with_optimizer=body.load_optimizer, field="checkpoint")
        return training.LoadWeights(path=checkpoint.path, artifact=checkpoint.artifact, optimizer=body.load_optimizer)

    return await _submit(request, services, tenant, LoadWeights, Kind.LOAD_WEIGHTS, build)


@router.post(PublishSamplerWeights.path, **taking(PublishSamplerWeights, TaskEnvelope))
async def publish_sampler_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    async def build(_: Services, model: ModelRecord, body: PublishSamplerWeights) -> training.SaveWeightsForSampler:
        sampler_id = None if body.sampler_seq is None else ids.sampling_session_id(model.session_id, body.sampler_seq)
        return training.SaveWeightsForSampler(
            name=None if body.name is None else ids.check_name(body.name, "name"),
            sampling_session_id=sampler_id,
            ttl_seconds=body.ttl_s,
            user_metadata=checked_metadata(body.metadata),
        )

    return await _submit(request, services, tenant, PublishSamplerWeights, Kind.SAVE_WEIGHTS_FOR_SAMPLER, build)


async def _submit(
    request: Request,
    services: Services,
    tenant: str,
    kind: type[_Call],
    operation: Kind,
    build: Callable[[Services, ModelRecord, _Call], Awaitable[TrainingCommand]],
) -> Response:
    body = await read(request, kind)
    turn = await turn_of(services, tenant, Head(body.model_id, body.seq_id))
    check_operation(services, turn.model.base_model, operation)
    engine, capability = training_engine(services, turn.model.base_model)
    check_engine_fields(body, capability.fields, engine)
    await queue(services, turn, await build(services, turn.model, body))
    return await promise(services, tenant, turn.rid)


async def _pass(request: Request, services: Services, model: ModelRecord, body: PassRequest) -> Compute:
    """Rendering and packing leave the event loop, but for the smallest."""
    base = services.base_model(model.base_model)
    check_loss(services, base.name, body.loss)
    field = text_form(body)
    if field is None:
        return await bodies.off_loop(lambda: compute_of(body, base, None), is_large=_is_large(body))
    texts = await services.renderers.need(base, field)
    check_data(body, base, texts)
    return await services.renderers.run(request, lambda: compute_of(body, base, texts))


def _step(services: Services, model: ModelRecord, asked: AdamWConfig | SgdConfig | None) -> training.OptimStep:
    step = step_of(asked, model)
    check_optimizer(services, model.base_model, step.optimizer)
    if step.optimizer.type != optimizer_type(model.optimizer):
        raise ValidationFailed(f"optimizer: the model uses {optimizer_type(model.optimizer)}; send its settings, or leave optimizer out")
    return step


def _is_large(body: PassRequest) -> bool:
    return body.batch is not None and num_ids(body.batch.input_ids) > INLINE_TOKENS
