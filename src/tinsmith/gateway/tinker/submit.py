"""Promises of the Tinker wire, refusals among them.

Callers of this wire count their seq ids on whether we accept or not, so where model and seq are known, a refusal becomes a future that
failed at birth and the lane is told that this seq will never come. Not so for what the caller sends again under the same seq (see
`errors.is_resent`), nor for a model that is not the caller's.
"""

import hashlib
from collections.abc import Awaitable, Callable

from tinsmith.gateway import submission
from tinsmith.gateway.deps import Services
from tinsmith.gateway.errors import is_resent
from tinsmith.gateway.submission import Turn
from tinsmith.gateway.tinker.refusals import check_not_refused
from tinsmith.protocol.errors import TinsmithError
from tinsmith.protocol.futures import Failure
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import CreateModel, Kind, LoadWeights, TrainingCommand
from tinsmith.protocol.wire_bounds import Head

Build = Callable[[ModelRecord], Awaitable[TrainingCommand]]


async def submit_turn(services: Services, tenant: str, head: Head, kind: Kind, build: Build) -> dict[str, object]:
    """Build the command and queue it; answers the promise. `kind` is that of a refusal, where no command comes to be.

    Raises NotFound for a model that is not the caller's, SessionEnded for one that is closed, RequestRejected for a seq that was used
    for something else, and whatever the caller is to send again.
    """
    turn = await submission.turn_of(services, tenant, head)
    try:
        command = await build(turn.model)
    except TinsmithError as refusal:
        if is_resent(refusal):
            raise
        await _refuse(services, turn, kind, refusal)
    else:
        await submission.queue(services, turn, command)
    return {"request_id": turn.rid, "model_id": turn.model.model_id}


async def submit_creation(services: Services, rid: str, model: ModelRecord, command: CreateModel | LoadWeights) -> dict[str, object]:
    """Queue entry 0 of the model's own lane; answers the promise. Raises as `submission.submit_creation`, and RequestRejected for a number
    that was refused before."""
    await check_not_refused(services, model.tenant, model.model_id)
    await submission.submit_creation(services, rid, model, command)
    return {"request_id": rid, "model_id": model.model_id}


async def _refuse(services: Services, turn: Turn, kind: Kind, refusal: TinsmithError) -> None:
    # The same refusal again is a repeat; there is no command whose digest could tell.
    digest = hashlib.sha256(f"refused\0{refusal.message}".encode()).hexdigest()
    await services.lanes.void(submission.submission(turn, kind, digest, b"", 0), Failure.of(refusal))
