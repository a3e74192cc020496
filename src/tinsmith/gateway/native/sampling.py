"""Routes of sampling: samplers, and samples as queued commands."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.native.admission import check_engine_fields, sampling_engine
from tinsmith.gateway.native.commands import prompt_of, sampling_of
from tinsmith.gateway.native.documents import taking
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.native.tasks import promise
from tinsmith.gateway.native.text_bounds import check_prompt
from tinsmith.gateway.preflight import check_sample
from tinsmith.gateway.samplers import adapter_of, open_sampler
from tinsmith.gateway.submission import submit_sample
from tinsmith.protocol import native, sampling
from tinsmith.protocol.envelopes import TaskEnvelope
from tinsmith.protocol.errors import InvalidRequest, ValidationFailed
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.inputs import ModelInput
from tinsmith.protocol.native import CreateSampler, Sample
from tinsmith.protocol.native_answers import SamplerInfo
from tinsmith.protocol.sessions import BaseModelInfo, SamplerRecord
from tinsmith.state.lanes import Submitted

router = APIRouter()


@router.post(CreateSampler.path, **taking(CreateSampler, SamplerInfo))
async def create_sampler(request: Request, services: ServicesDep, tenant: TenantDep) -> SamplerInfo:
    """Idempotent by the number in the session."""
    body = await read(request, CreateSampler)
    await services.catalog.live_session(tenant, body.session_id)
    checkpoint = None if body.checkpoint is None else await services.checkpoint(tenant, body.checkpoint, field="checkpoint")
    base_model = body.base_model if checkpoint is None else checkpoint.base_model
    if base_model is None:
        raise InvalidRequest("base_model, checkpoint: send one of them")
    if body.base_model not in (None, base_model):
        raise ValidationFailed(f"base_model: the checkpoint belongs to {base_model}; leave base_model out")
    record = await open_sampler(services, tenant, body.session_id, body.sampler_seq, base_model, checkpoint, field="sampler_seq")
    return SamplerInfo(sampler_id=record.sampler_id, base_model=record.base_model, checkpoint=record.model_path)


@router.post(Sample.path, **taking(Sample, TaskEnvelope))
async def sample(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """The same seq id again is a repeat and answers the same command."""
    checked = await check(request, services, tenant, await read(request, Sample))
    await submit(services, checked)
    return await promise(services, tenant, checked.rid)


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """A sample that may be queued. `room`: as in `submit_sample`."""

    sampler: SamplerRecord
    seq_id: int
    rid: str
    command: sampling.Sample
    room: int


async def check(request: Request, services: Services, tenant: str, body: Sample) -> CheckedSample:
    """Raises NotFound, SessionEnded, ValidationFailed, InputTokensExceeded, PayloadTooLarge; ClientDisconnect as `Renderers.run` does."""
    sampler = await services.catalog.sampler(tenant, body.sampler_id)
    await services.catalog.live_session(tenant, sampler.session_id)
    base = services.base_model(sampler.base_model)
    engine, capability = sampling_engine(services, base.name)
    check_engine_fields(body, capability.fields, engine)
    rid = await services.request_id(WorkKind.SAMPLING, tenant, sampler.sampler_id, body.seq_id)
    command = await _command(request, services, body, base, rid, await adapter_of(services, sampler))
    check_sample(command, base)
    return CheckedSample(sampler, body.seq_id, rid, command, base.max_context - len(command.prompt))


async def submit(services: Services, checked: CheckedSample, *, reply_to: str = "") -> Submitted:
    """`reply_to`: the topic that its tokens are told to while they are drawn. Raises what a queue refuses for."""
    return await submit_sample(
        services, checked.sampler, checked.seq_id, checked.rid, checked.command, room=checked.room, reply_to=reply_to
    )


async def _command(
    request: Request, services: Services, body: native.Sample, base: BaseModelInfo, rid: str, adapter: str | None
) -> sampling.Sample:
    return sampling.Sample(
        prompt=await _prompt(request, services, body, base),
        params=sampling_of(body, rid),
        num_samples=body.num_samples,
        adapter=adapter,
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


async def _prompt(request: Request, services: Services, body: native.Sample, base: BaseModelInfo) -> ModelInput:
    """Text is rendered off the event loop."""
    if body.prompt_ids is not None:
        return prompt_of(body, None)
    texts = await services.renderers.need(base, "text" if body.messages is None else "messages")
    check_prompt(body, base, texts)
    return await services.renderers.run(request, lambda: prompt_of(body, texts))
