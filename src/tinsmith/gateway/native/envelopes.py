"""From the stored record of a command to its envelope: the one place where the two meet.

A record serves both faces, whichever it was submitted on. Metrics and log-probs that are no finite numbers travel as Python's NaN and
Infinity.
"""

import json

from pydantic import JsonValue
from starlette.responses import Response

from tinsmith.gateway import bodies
from tinsmith.gateway.auth import JSON
from tinsmith.gateway.deps import Services
from tinsmith.gateway.errors import NATIVE_STATUS
from tinsmith.gateway.native import results
from tinsmith.gateway.waiting import queue_state
from tinsmith.protocol.envelopes import ErrorPayload, TaskEnvelope
from tinsmith.protocol.errors import NotFound, SessionEnded, UserError
from tinsmith.protocol.futures import FutureRecord, State
from tinsmith.protocol.training import Kind

_INLINE_BYTES = 64 * 1024  # of a result: decoding more than this leaves the event loop


async def envelope_of(services: Services, record: FutureRecord) -> TaskEnvelope:
    """Raises SessionEnded for a result that went with its session or model, NotFound for one past its retention."""
    state, reason = (None, None) if record.state.is_terminal else await queue_state(services, record)
    failure = record.failure
    return TaskEnvelope(
        request_id=record.rid,
        status=record.state,
        result=await _result(services, record) if record.state is State.COMPLETED else None,
        error=None
        if failure is None
        else ErrorPayload.of_failure(failure, error_code=NATIVE_STATUS[failure.reason], request_id=record.rid),
        queue_state=state,
        queue_state_reason=reason,
    )


def unloaded(rid: str, model_id: str) -> TaskEnvelope:
    """Of an unload, which leaves no record."""
    return TaskEnvelope(request_id=rid, status=State.COMPLETED, result={"model_id": model_id})


async def respond(services: Services, record: FutureRecord) -> Response:
    """The envelope as an answer."""
    envelope = await envelope_of(services, record)
    return await written(envelope.model_dump(), is_large=_is_large(record))


async def written(tree: dict[str, object], *, is_large: bool) -> Response:
    """A tree of plain data as an answer, encoded off the loop where that would hold it."""
    content = await bodies.off_loop(lambda: json.dumps(tree, separators=(",", ":")).encode(), is_large=is_large)
    return Response(content, media_type=JSON)


def _is_large(record: FutureRecord) -> bool:
    return record.result_size is not None and record.result_size > _INLINE_BYTES


async def _result(services: Services, record: FutureRecord) -> JsonValue:
    stored = await services.lanes.result(record.tenant, record.rid)
    if stored is None:
        raise await _gone(services, record)
    to_text = await _to_text(services, record) if record.kind is Kind.SAMPLE else None
    return await bodies.off_loop(lambda: results.decode(record, stored, to_text), is_large=_is_large(record))


async def _gone(services: Services, record: FutureRecord) -> UserError:
    """Why a completed command has no result any more."""
    rid = record.rid
    try:
        if (await services.catalog.session(record.tenant, record.session)).ended_ms is not None:
            return SessionEnded(
                f"session {record.session} has ended, the result of request {rid} is no longer kept; begin a new one and load a checkpoint"
            )
        if record.kind is not Kind.SAMPLE and (await services.catalog.model(record.tenant, record.lane)).ended_ms is not None:
            return SessionEnded(
                f"model {record.lane} was unloaded, the result of request {rid} is no longer kept; load a checkpoint into a new model"
            )
    except NotFound:  # they are forgotten in their turn
        pass
    return NotFound(f"request {rid}: its result is no longer kept; run it again")


async def _to_text(services: Services, record: FutureRecord) -> results.ToText | None:
    """Of the base model that was sampled: the record names its sampler."""
    sampler = await services.catalog.sampler(record.tenant, str(record.seq).rpartition("/")[0])
    base = services.base_models.get(sampler.base_model)
    renderer = None if base is None else await services.renderers.find(base)
    return None if renderer is None else renderer.decode
