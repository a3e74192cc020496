"""Routes of the service itself: what it can do, how it fares, how much of it is taken, and an operator's order to drain a process.

A tenant sees the queues of its own; the capacity sums those of all, without naming one.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version

from fastapi import APIRouter, Request

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.native.admission import sampling_engine, training_engine
from tinsmith.gateway.native.documents import answering, taking
from tinsmith.gateway.native.requests import read
from tinsmith.protocol.errors import NotFound, RequestRejected
from tinsmith.protocol.losses import LOSSES, LossSpec
from tinsmith.protocol.native import MAX_RETRIEVED, PROTOCOL_VERSION, Drain
from tinsmith.protocol.native_answers import (
    BaseModelCapability,
    Capabilities,
    Capacity,
    LossCapability,
    ProcessStatus,
    QueueStatus,
    RoleCapacity,
    ServerStatus,
)
from tinsmith.protocol.sampling import MAX_NUM_SAMPLES
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import MAX_LORA_RANK
from tinsmith.protocol.wire_bounds import MAX_COMMAND, MAX_DATUMS, MAX_WIRE
from tinsmith.state import inbox
from tinsmith.state.inbox import DrainOrder
from tinsmith.state.lanes import GATEWAYS, QueueInfo, Replica, Role, inbox_topic

FEATURES = (
    "cancel",
    "conversations",
    "evaluate",
    "lr_schedules",
    "retrieve_futures",
    "sample_stream",
    "train_step",
)

router = APIRouter()


@router.get("/capabilities", **answering(Capabilities))
async def capabilities(services: ServicesDep) -> Capabilities:
    """What this server speaks, serves and bounds."""
    bases = sorted(services.base_models.values(), key=lambda base: base.name)
    return Capabilities(
        protocol_version=PROTOCOL_VERSION,
        server_version=version("tinsmith"),
        features=FEATURES,
        losses={name: _loss(spec) for name, spec in sorted(LOSSES.items())},
        base_models=tuple([await _base_model(services, base) for base in bases]),
        limits=_limits(services),
    )


@router.get("/status", **answering(ServerStatus))
async def status(services: ServicesDep, tenant: TenantDep) -> ServerStatus:
    """The living processes, where the caller is an operator, and the caller's queues."""
    now_ms = await services.store.now_ms()
    queues = [queue for base in sorted(services.base_models) for queue in await services.lanes.queues(base) if queue.tenant == tenant]
    return ServerStatus(
        server_version=version("tinsmith"),
        store=services.config.store.kind,
        processes=tuple(map(_process, await _replicas(services))) if services.config.auth.is_operator(tenant) else (),
        queues=tuple(_queue(queue, now_ms) for queue in queues),
    )


@router.get("/capacity", **answering(Capacity))
async def capacity(services: ServicesDep) -> Capacity:
    """How much of each base model's workers is taken, over all tenants."""
    now_ms = await services.store.now_ms()
    found: dict[str, dict[str, RoleCapacity]] = {}
    for base in sorted(services.base_models):
        replicas, queues = await services.lanes.replicas(base), await services.lanes.queues(base)
        found[base] = {
            role.value: _role(
                [replica for replica in replicas if replica.role is role], [queue for queue in queues if queue.role is role], now_ms
            )
            for role in (Role.TRAINER, Role.SAMPLER)
        }
    return Capacity(base_models=found)


@router.post(Drain.path, **taking(Drain, ProcessStatus))
async def drain(request: Request, services: ServicesDep, tenant: TenantDep) -> ProcessStatus:
    """Answers the process as it is now; it drains from the moment on in which it hears the order. For operators alone."""
    if not services.config.auth.is_operator(tenant):
        raise RequestRejected(f"tenant {tenant!r} is no operator of this server; list it in auth.operators, or use the key of one that is")
    body = await read(request, Drain)
    living = {replica.id: replica for replica in await _replicas(services)}
    if body.process_id not in living:
        raise NotFound(f"process_id: {body.process_id[:100]!r} is no living process; /status lists them")
    await services.lanes.post(inbox_topic(body.process_id), [inbox.encode(DrainOrder())])
    return _process(living[body.process_id])


async def _replicas(services: Services) -> list[Replica]:
    """All living processes: gateways first, then workers by base model."""
    found = [await services.lanes.replicas(base) for base in (GATEWAYS, *sorted(services.base_models))]
    return [replica for group in found for replica in sorted(group, key=lambda replica: (replica.role, replica.id))]


async def _base_model(services: Services, base: BaseModelInfo) -> BaseModelCapability:
    training_name, training = training_engine(services, base.name)
    sampling_name, sampling = sampling_engine(services, base.name)
    texts = await services.renderers.find(base)
    return BaseModelCapability(
        name=base.name,
        max_context=base.max_context,
        vocab_size=base.vocab_size,
        training_engine=training_name,
        sampling_engine=sampling_name,
        operations=tuple(sorted(training.operations)),
        losses=tuple(sorted(training.losses)),
        engine_fields=tuple(sorted(training.fields | sampling.fields)),
        has_chat=texts is not None and texts.has_chat,
        numerics="exact",
        sample_logprobs=services.config.model(base.name).sampler.logprobs,
    )


def _loss(spec: LossSpec) -> LossCapability:
    inputs = {name if wanted.is_required else f"{name}?": wanted.dtype.value for name, wanted in sorted(spec.inputs.items())}
    return LossCapability(inputs=inputs, config=spec.config, is_paired=spec.is_paired, output=spec.output)


def _limits(services: Services) -> dict[str, float]:
    config = services.config
    return {
        "inline_wait_s": config.execution.inline_wait_s,
        "long_poll_s": config.execution.long_poll_s,
        "max_body_bytes": MAX_WIRE,
        "max_command_bytes": MAX_COMMAND,
        "max_lora_rank": MAX_LORA_RANK,
        "max_models": config.limits.max_models,
        "max_num_samples": MAX_NUM_SAMPLES,
        "max_retrieved": MAX_RETRIEVED,
        "max_sequences": MAX_DATUMS,
        "requests_per_s": config.limits.requests_per_s,
        "session_timeout_s": config.execution.session_timeout_s,
        "tokens_per_s": config.limits.tokens_per_s,
    }


def _process(replica: Replica) -> ProcessStatus:
    return ProcessStatus(
        process_id=replica.id,
        role=replica.role.value,
        base_model=None if replica.base == GATEWAYS else replica.base,
        node=replica.node,
        pid=replica.pid,
        is_healthy=replica.is_healthy,
        is_draining=replica.is_draining,
        num_used=replica.num_used,
        num_slots=replica.num_slots,
    )


def _queue(queue: QueueInfo, now_ms: int) -> QueueStatus:
    return QueueStatus(
        lane=queue.lane,
        base_model=queue.base,
        role=queue.role.value,
        owner=queue.owner,
        num_pending=queue.num_pending,
        age_s=_age_s(queue, now_ms),
    )


def _role(replicas: Sequence[Replica], queues: Iterable[QueueInfo], now_ms: int) -> RoleCapacity:
    waiting = list(queues)
    return RoleCapacity(
        num_processes=len(replicas),
        num_healthy=sum(replica.is_healthy for replica in replicas),
        num_used=sum(replica.num_used for replica in replicas),
        num_slots=sum(replica.num_slots for replica in replicas),
        num_pending=sum(queue.num_pending for queue in waiting),
        age_s=max((_age_s(queue, now_ms) for queue in waiting), default=0.0),
    )


def _age_s(queue: QueueInfo, now_ms: int) -> float:
    return 0.0 if queue.oldest_ms is None else max(0, now_ms - queue.oldest_ms) / 1000
