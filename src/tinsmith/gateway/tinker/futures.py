"""retrieve_future, the long poll behind every promise, and cancel_future.

What an id answers when its record is gone follows from the id alone: it tells the kind of work and the epoch.
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tinsmith.gateway import bodies
from tinsmith.gateway.aborting import stop_running
from tinsmith.gateway.auth import JSON, PROTOBUF
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep, unknown_request
from tinsmith.gateway.errors import HOLD_S, error_response
from tinsmith.gateway.models import unloaded_model
from tinsmith.gateway.tinker.custom_losses import created_loss
from tinsmith.gateway.tinker.refusals import refusal_of
from tinsmith.gateway.waiting import queue_state, settled
from tinsmith.protocol import wire
from tinsmith.protocol.errors import Category, SessionEnded, StateContention
from tinsmith.protocol.futures import FutureRecord, State
from tinsmith.protocol.ids import RequestId, WorkKind
from tinsmith.protocol.training import Kind
from tinsmith.protocol.wire_bounds import MIB
from tinsmith.protocol.wire_json import Body

METADATA_BYTES = MIB  # of a result, over which its size is told first, so that the client can reserve room
LOOP_ENCODES_BYTES = 16 * 1024  # takes about 2 ms as JSON; a way through a thread takes as long where the loop is busy

_PROTOBUF_KINDS = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.EVALUATE, Kind.TRAIN_STEP, Kind.SAMPLE})

router = APIRouter()


class RetrieveBody(Body):
    request_id: str
    allow_metadata_only: bool = False


class CancelBody(Body):
    request_id: str


@router.post("/retrieve_future")
async def retrieve_future(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """The result, its failure, or 408 with the queue's state when the window ends. May be repeated."""
    body = await bodies.read(request, RetrieveBody)
    accept = request.headers.get("accept", JSON)
    try:
        return await _retrieve(services, tenant, body, accept)
    except StateContention as error:
        await asyncio.sleep(HOLD_S)
        return error_response(error)


@router.post("/cancel_future")
async def cancel_future(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Drops what has not started, and has a sample that runs stopped, which frees its rows; everything else is reported unchanged."""
    body = await bodies.read(request, CancelBody)
    rid, _ = await services.parse_request_id(body.request_id, tenant)
    state = await services.lanes.cancel(tenant, body.request_id)
    if state is None:
        raise unknown_request(body.request_id)
    if state is State.RUNNING and rid.work is WorkKind.SAMPLING:
        await stop_running(services, tenant, rid.text)
    return {"cancelled": state is State.CANCELLED, "state": state.value}


async def _retrieve(services: Services, tenant: str, body: RetrieveBody, accept: str) -> Response:
    rid, is_current = await services.parse_request_id(body.request_id, tenant)
    if not is_current:
        return _lost(rid)
    if rid.work is WorkKind.CONTROL:
        return await _control(services, tenant, rid)
    record = await settled(services, tenant, rid.text, services.config.execution.long_poll_s)
    if record is None:
        return await _without_record(services, rid)
    if rid.work is WorkKind.SAMPLING and await _has_ended(services, record):
        raise unknown_request(rid.text)
    if not record.state.is_terminal:
        return await _pending(services, record)
    if record.state is State.COMPLETED:
        return await _completed(services, record, body, accept)
    return _failed(record)


async def _control(services: Services, tenant: str, rid: RequestId) -> Response:
    refusal = await refusal_of(services, tenant, rid.text)
    if refusal is not None:
        return _failure(refusal.message, refusal.category)
    loss = await created_loss(services, tenant, rid.text)
    if loss is not None:
        return JSONResponse(loss)
    model_id = await unloaded_model(services, tenant, rid.text)
    if model_id is None:
        raise unknown_request(rid.text)
    return JSONResponse({"model_id": model_id, "type": "unload_model"})


async def _completed(services: Services, record: FutureRecord, body: RetrieveBody, accept: str) -> Response:
    if body.allow_metadata_only and record.result_size is not None and record.result_size > METADATA_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": record.result_size})
    result = await services.lanes.result(record.tenant, record.rid)
    if result is None:
        return await _freed(services, record)
    return await _encoded(record.kind, result, accept)


async def _encoded(kind: Kind, result: bytes, accept: str) -> Response:
    """As the caller reads it: passes and samples lie as protobuf, everything else as JSON."""
    if kind not in _PROTOBUF_KINDS:
        return Response(result, media_type=JSON)
    if PROTOBUF in accept:
        return Response(result, media_type=PROTOBUF)
    to_json = wire.sample_output_json if kind is Kind.SAMPLE else wire.compute_output_json
    text = await bodies.off_loop(lambda: to_json(result), is_large=len(result) > LOOP_ENCODES_BYTES)
    return Response(text, media_type=JSON)


async def _pending(services: Services, record: FutureRecord) -> Response:
    state, reason = await queue_state(services, record)
    why = {} if reason is None else {"queue_state_reason": reason}
    return JSONResponse({"type": "try_again", "request_id": record.rid, "queue_state": state.value, **why}, status_code=408)


async def _without_record(services: Services, rid: RequestId) -> Response:
    """A genuine id whose record is gone: past retention, or of a store that was emptied a moment ago."""
    info = await services.identity.refreshed()
    if info.epoch != rid.epoch:
        return _lost(rid)
    if rid.work is WorkKind.SAMPLING:
        return _gone("the result is no longer kept; sample again")
    return _failure("the result is no longer kept: its retention has passed", Category.USER)


async def _freed(services: Services, record: FutureRecord) -> Response:
    """Completed, but the result was freed: with its session, or some time after it was first fetched."""
    if record.kind is Kind.SAMPLE:
        return _gone("the result was fetched and is no longer kept; sample again")
    if await _has_ended(services, record):
        return _failure(f"session {record.session} has ended; its results are no longer kept", Category.USER)
    return _failure("the result was fetched and is no longer kept: its retention has passed", Category.USER)


async def _has_ended(services: Services, record: FutureRecord) -> bool:
    return (await services.catalog.session(record.tenant, record.session)).ended_ms is not None


def _lost(rid: RequestId) -> Response:
    """An id of another epoch: nothing of it exists."""
    if rid.work is WorkKind.SAMPLING:
        return _gone("the request was lost by a restart; sample again")
    return _failure("the request was lost by a restart; load the last checkpoint", Category.SERVER)


def _failed(record: FutureRecord) -> Response:
    failure = record.failure
    if failure is None:
        raise ValueError(f"record {record.rid} is {record.state} without a failure")
    return _failure(failure.message, failure.category)


def _failure(message: str, category: Category) -> Response:
    """The key `error` marks a failed future; clients never ask again."""
    return JSONResponse({"error": message, "category": category.value})


def _gone(message: str) -> Response:
    """Clients submit a lost sample again by themselves."""
    return JSONResponse({"detail": message, "reason": SessionEnded.reason.value, "category": Category.SERVER.value}, status_code=410)
