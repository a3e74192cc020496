"""From a checked command to its place in a lane: the common path of every route that answers a promise, on each face.

A refused request stores no work. What a face tells its callers about a refusal is its own business. Everything here may be repeated: a
repeat of a submit, also a concurrent one, answers the first request id.
"""

import hashlib
from dataclasses import dataclass, replace

from tinsmith import telemetry
from tinsmith.gateway.bodies import off_loop
from tinsmith.gateway.deps import Services
from tinsmith.gateway.storage import check_save
from tinsmith.protocol import ids, wire
from tinsmith.protocol.errors import NotFound, QuotaExceeded, RequestRejected, UserError, ValidationFailed
from tinsmith.protocol.futures import Write
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import ModelRecord, SamplerRecord
from tinsmith.protocol.training import Compute, CreateModel, Kind, LoadWeights, TrainingCommand, TrainStep
from tinsmith.protocol.wire_bounds import MAX_SEQ, Head
from tinsmith.state.audit import AuditEntry, AuditEvent, audit_writes
from tinsmith.state.catalog import Pin, model_write, pin_write
from tinsmith.state.lanes import PoolSubmission, Submission, Submitted
from tinsmith.state.quotas import MODEL_LEASE_MS, model_quota

_MAX_DRAWN_SEED = 2**31 - 1  # of the seeds that are drawn here
BARRIER_TOKENS = 1  # what a command without data counts in the fair queue
INLINE_TOKENS = 16_384  # checking or encoding more than this leaves the event loop


@dataclass(frozen=True, slots=True)
class Turn:
    """A caller's right to one seq of one of its models."""

    model: ModelRecord
    seq: int
    rid: str


async def turn_of(services: Services, tenant: str, head: Head) -> Turn:
    """Raises ValidationFailed where the head says too little, NotFound for a model that is not the caller's."""
    if head.model_id is None or head.seq_id is None:
        missing = "model_id" if head.model_id is None else "seq_id"
        raise ValidationFailed(f"{missing}: missing or of the wrong type; send the model's id and a seq_id from 1 to {MAX_SEQ}")
    model = await services.catalog.model(tenant, head.model_id)
    if head.seq_id < 1:
        raise ValidationFailed(f"seq_id: {head.seq_id} is below 1; count a model's requests from 1")
    rid = await services.request_id(WorkKind.TRAINING, tenant, model.model_id, head.seq_id)
    return Turn(model, head.seq_id, rid)


async def queue(services: Services, turn: Turn, command: TrainingCommand, writes: tuple[Write, ...] = ()) -> Submitted:
    """Raises what `Lanes.submit` raises, RateLimited, and QuotaExceeded for a save; nothing is written then."""
    await check_save(services, turn.model.tenant, turn.rid, command)
    tokens = command.num_tokens if isinstance(command, Compute | TrainStep) else BARRIER_TOKENS
    body, digest = await off_loop(lambda: _encoded(command), is_large=is_long(command))
    await services.budgets.admit(turn.model.tenant, tokens)
    return await services.lanes.submit(submission(turn, command.kind, digest, body, tokens, (*writes, *_pins(turn, command))))


async def new_model_id(services: Services, tenant: str, session_id: str, model_seq_id: int) -> tuple[str, str]:
    """Model id and request id of a model that the session may create now, or has created. Raises NotFound, SessionEnded."""
    await services.catalog.live_session(tenant, session_id)
    model_id = ids.model_id(session_id, model_seq_id)
    return model_id, await services.request_id(WorkKind.TRAINING, tenant, model_id, 0)


async def submit_creation(services: Services, rid: str, model: ModelRecord, command: CreateModel | LoadWeights) -> None:
    """Queue entry 0 of the model's own lane; the model is in the catalog from then on.

    Raises QuotaExceeded where the tenant has as many models as it may; RequestRejected for a number that was used for something else,
    another base model included, which no command names.
    """
    await _reserve(services, model)
    try:
        writes = (model_write(model), *audit_writes(_creation_of(model)))
        submitted = await queue(services, Turn(model, 0, rid), command, writes=writes)
    except UserError:
        # After a fault of the store nobody knows whether the model exists: its unit then runs out by itself.
        await _give_back(services, model)
        raise
    if not submitted.is_fresh and (await services.catalog.model(model.tenant, model.model_id)).base_model != model.base_model:
        raise RequestRejected(f"model_seq_id: {model.model_id} was created on another base model; count on")


async def submit_sample(
    services: Services,
    sampler: SamplerRecord,
    seq_id: int,
    rid: str,
    sample: Sample,
    *,
    room: int,
    reply_to: str = "",
    feed: str = "",
    max_waiting: int | None = None,
) -> Submitted:
    """Queue a sample in the pool of its base model. `room`: tokens that the context has left for each of its sequences. `reply_to`, `feed`,
    `max_waiting`: as in `PoolSubmission`."""
    body = wire.encode_command(sample)
    told_apart_by = body if sample.adapter == sampler.artifact else _as_first_saved(sampler, sample)
    max_tokens = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
    tokens = len(sample.prompt) + sample.num_samples * max_tokens
    await services.budgets.admit(sampler.tenant, tokens)
    return await services.lanes.pool_submit(
        PoolSubmission(
            tenant=sampler.tenant,
            session=sampler.session_id,
            base=sampler.base_model,
            key=f"{sampler.sampler_id}/{seq_id}",
            rid=rid,
            digest=wire.digest_of(Kind.SAMPLE, told_apart_by),
            body=body,
            tokens=tokens,
            trace=telemetry.current_trace(),
            reply_to=reply_to,
            feed=feed,
            max_waiting=max_waiting,
        )
    )


def submission(turn: Turn, kind: Kind, digest: str, body: bytes, tokens: int, writes: tuple[Write, ...] = ()) -> Submission:
    """What goes into the lane at the caller's turn."""
    return Submission(
        tenant=turn.model.tenant,
        session=turn.model.session_id,
        lane=turn.model.model_id,
        base=turn.model.base_model,
        seq=turn.seq,
        kind=kind,
        rid=turn.rid,
        digest=digest,
        body=body,
        tokens=tokens,
        writes=writes,
        trace=telemetry.current_trace(),
    )


def is_long(command: TrainingCommand) -> bool:
    """Whether checking or encoding the command would hold the loop."""
    return isinstance(command, Compute | TrainStep) and command.num_tokens > INLINE_TOKENS


def derived_seed(rid: str) -> int:
    """The seed of a request that brought none: a function of its id, so a repeat of the submit is the same command."""
    return int.from_bytes(hashlib.sha256(rid.encode()).digest()[:4], "big") & _MAX_DRAWN_SEED


def _creation_of(model: ModelRecord) -> AuditEntry:
    details = {"session_id": model.session_id, "base_model": model.base_model}
    return AuditEntry(tenant=model.tenant, at_ms=model.created_ms, event=AuditEvent.MODEL_CREATE, subject=model.model_id, details=details)


async def _reserve(services: Services, model: ModelRecord) -> None:
    """One unit of the tenant's quota for a model that is new. Raises QuotaExceeded."""
    if await _exists(services, model):
        return
    bound = services.config.limits.max_models
    if not await services.store.reserve(model_quota(model.tenant), model.model_id, limit=bound, ttl_ms=MODEL_LEASE_MS):
        raise QuotaExceeded(f"{bound} models are live, the bound is {bound}; end a session that you do not need")


async def _give_back(services: Services, model: ModelRecord) -> None:
    """The unit of a model that did not come to be; one that a concurrent repeat has created keeps it."""
    if not await _exists(services, model):
        await services.store.unreserve(model_quota(model.tenant), model.model_id)


async def _exists(services: Services, model: ModelRecord) -> bool:
    """Raises RequestRejected where a copy has the number."""
    try:
        held = await services.catalog.model(model.tenant, model.model_id)
    except NotFound:
        return False
    if held.copied_from is not None:
        raise RequestRejected(f"model_seq_id: {model.model_id} holds a copy of {held.copied_from}, which is not trained; count on")
    return True


def _as_first_saved(sampler: SamplerRecord, sample: Sample) -> bytes:
    """What tells a sample of an inflight sampler from another: a repeat is the same one, whatever was saved meanwhile."""
    return wire.encode_command(replace(sample, adapter=sampler.artifact))


def _pins(turn: Turn, command: TrainingCommand) -> tuple[Write, ...]:
    """A load keeps its artifact, from the step that queues it on."""
    if not isinstance(command, LoadWeights):
        return ()
    return (pin_write(Pin(turn.model.tenant, turn.model.model_id, turn.seq, command.artifact)),)


def _encoded(command: TrainingCommand) -> tuple[bytes, str]:
    body = wire.encode_command(command)
    return body, wire.digest_of(command.kind, body)
