"""From a decoded request to its place in a lane: the common path of every route that answers a promise.

A refused request stores no work. Callers of the Tinker wire count their seq ids on whether we accept or not, so where model and seq are
known, a refusal becomes a future that failed at birth and the lane is told that this seq will never come. Not so for what the caller
sends again under the same seq (see `errors.is_resent`), nor for a model that is not the caller's.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinsmith.gateway.bodies import off_loop
from tinsmith.gateway.deps import Services
from tinsmith.gateway.errors import is_resent
from tinsmith.protocol import ids, wire
from tinsmith.protocol.errors import QuotaExceeded, RequestRejected, TinsmithError, ValidationFailed
from tinsmith.protocol.futures import Failure, Write
from tinsmith.protocol.ids import Work
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import ModelRecord, SamplerRecord
from tinsmith.protocol.training import Compute, CreateModel, Kind, LoadWeights, TrainingCommand
from tinsmith.protocol.wire_bounds import MAX_SEQ, Head
from tinsmith.state.catalog import Pin, model_write, pin_write
from tinsmith.state.lanes import PoolSubmission, Submission, Submitted

MAX_SEED = 2**31 - 1
BARRIER_TOKENS = 1  # what a command without data counts in the fair queue
INLINE_TOKENS = 16_384  # checking or encoding more than this leaves the event loop

Build = Callable[[ModelRecord], Awaitable[TrainingCommand]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A caller's right to one seq of one of its models."""

    model: ModelRecord
    seq: int
    rid: str


async def submit_turn(services: Services, tenant: str, head: Head, kind: Kind, build: Build) -> dict[str, object]:
    """Build the command and queue it; answers the promise. `kind` is that of a refusal, where no command comes to be.

    Raises NotFound for a model that is not the caller's, SessionEnded for one that is closed, RequestRejected for a seq that was used
    for something else, and whatever the caller is to send again.
    """
    turn = await _turn(services, tenant, head)
    try:
        command = await build(turn.model)
    except TinsmithError as refusal:
        if is_resent(refusal):
            raise
        await _refuse(services, turn, kind, refusal)
    else:
        await _queue(services, turn, command)
    return {"request_id": turn.rid, "model_id": turn.model.model_id}


async def new_model_id(services: Services, tenant: str, session_id: str, model_seq_id: int) -> tuple[str, str]:
    """Model id and request id of a model that the session may create now, or has created. Raises NotFound, SessionEnded,
    QuotaExceeded."""
    await services.catalog.live_session(tenant, session_id)
    model_id = ids.model_id(session_id, model_seq_id)
    models = {model.model_id: model for model in await services.catalog.models(tenant)}
    num_live = sum(model.ended_ms is None for model in models.values())
    bound = services.config.limits.max_models
    if model_id not in models and num_live >= bound:
        raise QuotaExceeded(f"{num_live} models are live, the bound is {bound}; end a session that you do not need")
    return model_id, await services.request_id(Work.TRAINING, tenant, model_id, 0)


async def submit_creation(services: Services, rid: str, model: ModelRecord, command: CreateModel | LoadWeights) -> dict[str, object]:
    """Queue entry 0 of the model's own lane; the model is in the catalog from then on.

    Raises RequestRejected for a number that was used for something else, another base model included, which no command names.
    """
    submitted = await _queue(services, Turn(model, 0, rid), command, writes=(model_write(model),))
    if not submitted.fresh and (await services.catalog.model(model.tenant, model.model_id)).base_model != model.base_model:
        raise RequestRejected(f"model_seq_id: {model.model_id} was created on another base model; count on")
    return {"request_id": rid, "model_id": model.model_id}


async def submit_sample(services: Services, sampler: SamplerRecord, seq_id: int, rid: str, sample: Sample, *, room: int) -> None:
    """Queue a sample in the pool of its base model. `room`: tokens that the context has left for each of its sequences."""
    body = wire.encode_command(sample)
    max_tokens = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
    submission = PoolSubmission(
        tenant=sampler.tenant,
        session=sampler.session_id,
        base=sampler.base_model,
        key=f"{sampler.sampler_id}/{seq_id}",
        rid=rid,
        digest=wire.digest_of(Kind.SAMPLE, body),
        body=body,
        tokens=len(sample.prompt) + sample.num_samples * max_tokens,
    )
    await services.lanes.pool_submit(submission)


def is_long(command: TrainingCommand) -> bool:
    """Whether checking or encoding the command would hold the loop."""
    return isinstance(command, Compute) and command.num_tokens > INLINE_TOKENS


def derived_seed(rid: str) -> int:
    """The seed of a request that brought none: a function of its id, so a repeat of the submit is the same command."""
    return int.from_bytes(hashlib.sha256(rid.encode()).digest()[:4], "big") & MAX_SEED


async def _turn(services: Services, tenant: str, head: Head) -> Turn:
    if head.model_id is None or head.seq_id is None:
        missing = "model_id" if head.model_id is None else "seq_id"
        raise ValidationFailed(f"{missing}: missing or of the wrong type; send the model's id and a seq_id from 1 to {MAX_SEQ}")
    model = await services.catalog.model(tenant, head.model_id)
    if head.seq_id < 1:
        raise ValidationFailed(f"seq_id: {head.seq_id} is below 1; count a model's requests from 1")
    rid = await services.request_id(Work.TRAINING, tenant, model.model_id, head.seq_id)
    return Turn(model, head.seq_id, rid)


async def _queue(services: Services, turn: Turn, command: TrainingCommand, writes: tuple[Write, ...] = ()) -> Submitted:
    tokens = command.num_tokens if isinstance(command, Compute) else BARRIER_TOKENS
    body, digest = await off_loop(lambda: _encoded(command), is_large=is_long(command))
    return await services.lanes.submit(_submission(turn, command.kind, digest, body, tokens, (*writes, *_pins(turn, command))))


def _pins(turn: Turn, command: TrainingCommand) -> tuple[Write, ...]:
    """A load keeps its artifact, from the step that queues it on."""
    if not isinstance(command, LoadWeights):
        return ()
    return (pin_write(Pin(turn.model.tenant, turn.model.model_id, turn.seq, command.artifact)),)


async def _refuse(services: Services, turn: Turn, kind: Kind, refusal: TinsmithError) -> None:
    # The same refusal again is a repeat; there is no command whose digest could tell.
    digest = hashlib.sha256(f"refused\0{refusal.message}".encode()).hexdigest()
    await services.lanes.void(_submission(turn, kind, digest, b"", 0, ()), Failure.of(refusal))


def _submission(turn: Turn, kind: Kind, digest: str, body: bytes, tokens: int, writes: tuple[Write, ...]) -> Submission:
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
    )


def _encoded(command: TrainingCommand) -> tuple[bytes, str]:
    body = wire.encode_command(command)
    return body, wire.digest_of(command.kind, body)
