"""Routes of submitted commands: retrieve one or several, cancel. And the short wait with which every submit answers its envelope."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep, unknown_request
from tinsmith.gateway.models import unloaded_model
from tinsmith.gateway.native import envelopes
from tinsmith.gateway.native.documents import taking
from tinsmith.gateway.native.requests import read
from tinsmith.gateway.waiting import any_settled, settled
from tinsmith.protocol.envelopes import TaskEnvelope
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.futures import FutureRecord, State
from tinsmith.protocol.ids import RequestId, WorkKind
from tinsmith.protocol.native import CancelFuture, RetrieveFuture, RetrieveFutures
from tinsmith.protocol.native_answers import CancelAnswer, TaskList

router = APIRouter()


async def promise(services: Services, tenant: str, rid: str) -> Response:
    """The envelope of a command that was submitted a moment ago; one that ends within the short wait needs no further request."""
    record = await settled(services, tenant, rid, services.config.execution.inline_wait_s)
    if record is None:
        raise unknown_request(rid)
    return await envelopes.respond(services, record)


@router.post(RetrieveFuture.path, **taking(RetrieveFuture, TaskEnvelope))
async def retrieve_future(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Waits for the end of the command, one window long. May be repeated; 404 for an id that this server has nothing of."""
    body = await read(request, RetrieveFuture)
    rid = await _issued(services, tenant, body.request_id)
    if rid.work is WorkKind.CONTROL:
        return await _unloaded(services, tenant, rid)
    record = await settled(services, tenant, body.request_id, services.config.execution.long_poll_s)
    return await envelopes.respond(services, _known(record, body.request_id))


@router.post(RetrieveFutures.path, **taking(RetrieveFutures, TaskList))
async def retrieve_futures(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Waits for the end of any of the commands, one window long. 404 where one of the ids is unknown: it is named."""
    body = await read(request, RetrieveFutures)
    for request_id in body.request_ids:
        await _issued(services, tenant, request_id)
    records = await any_settled(services, tenant, body.request_ids, services.config.execution.long_poll_s)
    known = [_known(record, request_id) for record, request_id in zip(records, body.request_ids, strict=True)]
    tasks = [(await envelopes.envelope_of(services, record)).model_dump() for record in known]
    return await envelopes.written({"tasks": tasks}, is_large=True)


@router.post(CancelFuture.path, **taking(CancelFuture, CancelAnswer))
async def cancel(request: Request, services: ServicesDep, tenant: TenantDep) -> CancelAnswer:
    """Drops what has not started; everything else is reported unchanged."""
    body = await read(request, CancelFuture)
    await services.parse_request_id(body.request_id, tenant)
    state = await services.lanes.cancel(tenant, body.request_id)
    if state is None:
        raise unknown_request(body.request_id)
    return CancelAnswer(cancelled=state is State.CANCELLED, state=state.value)


async def _unloaded(services: Services, tenant: str, rid: RequestId) -> Response:
    """The promise of an unload, which the Tinker wire gives; it was done at once."""
    model_id = await unloaded_model(services, tenant, rid.text)
    if model_id is None:
        raise unknown_request(rid.text)
    return await envelopes.written(envelopes.unloaded(rid.text, model_id).model_dump(), is_large=False)


async def _issued(services: Services, tenant: str, request_id: str) -> RequestId:
    """Raises NotFound for an id that was never issued to the tenant, and for one of a store that was emptied since."""
    rid, is_current = await services.parse_request_id(request_id, tenant)
    if not is_current:
        raise NotFound(f"request {rid.text} was lost by a restart; load the last checkpoint")
    return rid


def _known(record: FutureRecord | None, request_id: str) -> FutureRecord:
    """Raises NotFound for a record past its retention."""
    if record is None:
        raise NotFound(f"request {request_id[:100]!r} is unknown, or its retention has passed; run its command again")
    return record
