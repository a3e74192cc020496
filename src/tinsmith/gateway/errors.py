"""The maps from exceptions to HTTP answers, one a protocol. Routes raise; nothing else in the gateway chooses a status.

The path decides the protocol. On the Tinker wire a body is `{"detail": <one line>, "reason": <reason code>, "category": ...}`; it is
never empty, since clients take an empty 400 for a proxy's fault, and it has no key `error`: that marks a failed future. On the native
protocol a body is an `ErrorPayload`, its fields at the top level, with the id of the HTTP request. Under /v1 it has the form of OpenAI's
API. No answer holds a traceback.
"""

import asyncio
import logging
from collections.abc import Mapping
from math import ceil

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from tinsmith.gateway.openai.errors import answer_of, is_openai, status_of
from tinsmith.gateway.request_ids import HEADER, request_id_of
from tinsmith.protocol import native
from tinsmith.protocol.envelopes import ErrorPayload
from tinsmith.protocol.errors import (
    LEAVES,
    Cancelled,
    InternalError,
    InvalidRequest,
    NotFound,
    RateLimited,
    ReasonCode,
    ServerError,
    TinsmithError,
    ValidationFailed,
)
from tinsmith.protocol.futures import one_line

_log = logging.getLogger(__name__)

HOLD_S = 1.0  # how long an answer is held after which clients ask again at once: a 5xx on their long poll

_RESENT = frozenset({408, 409, 429})  # statuses that clients send again by themselves, beside the 5xx
_RETRY_AFTER = frozenset({429, 503})  # statuses that tell when to come again
_RETRY_AFTER_S = 1  # where nothing tells better

NATIVE_STATUS: Mapping[ReasonCode, int] = {leaf.reason: leaf.status for leaf in LEAVES}
# Clients of the Tinker wire send a 5xx again, for minutes: what this server will never do is a plain refusal there.
TINKER_STATUS: Mapping[ReasonCode, int] = {**NATIVE_STATUS, ReasonCode.ENDPOINT_UNAVAILABLE: 400}


def is_resent(error: TinsmithError) -> bool:
    """Whether a client answers this refusal by sending the same request again, under the same seq."""
    return error.status in _RESENT or isinstance(error, ServerError)


def error_response(error: TinsmithError, status: int | None = None) -> JSONResponse:
    """On the Tinker wire. `status`: where it is not the reason's own."""
    content = {"detail": one_line(error.message), "reason": error.reason.value, "category": error.category.value}
    status = TINKER_STATUS[error.reason] if status is None else status
    return JSONResponse(content, status_code=status, headers=_retry_after(error, status))


def payload_response(error: TinsmithError, request_id: str, status: int | None = None) -> JSONResponse:
    """On the native protocol. `status`: where it is not the reason's own."""
    error_code = NATIVE_STATUS[error.reason] if status is None else status
    details = error.details if isinstance(error, ValidationFailed) else None
    payload = ErrorPayload.of(error, error_code=error_code, request_id=request_id, details=details)
    return JSONResponse(payload.model_dump(mode="json"), status_code=error_code, headers=_retry_after(error, error_code))


def openai_response(error: TinsmithError, status: int | None = None) -> JSONResponse:
    """Under /v1. `status`: where it is not the reason's own."""
    error_code = status_of(error) if status is None else status
    content = answer_of(error, status).model_dump(mode="json")
    return JSONResponse(content, status_code=error_code, headers=_retry_after(error, error_code))


def answer(scope: Scope, error: TinsmithError, status: int | None = None) -> JSONResponse:
    """In the protocol that the path belongs to. `status`: where it is not the reason's own."""
    if is_native(scope["path"]):
        return payload_response(error, request_id_of(scope), status)
    if is_openai(scope["path"]):
        return openai_response(error, status)
    return error_response(error, status)


def is_native(path: str) -> bool:
    return path == native.PREFIX or path.startswith(f"{native.PREFIX}/")


def install(app: FastAPI) -> None:
    """Register the maps."""
    app.add_exception_handler(TinsmithError, _of_ours)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(ClientDisconnect, _of_disconnect)
    app.add_exception_handler(Exception, _of_bug)


async def _of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)  # noqa: S101 - the framework dispatches by type
    return answer(request.scope, error)


async def _of_framework(request: Request, error: Exception) -> Response:
    """The router's own answers: no such path, or no such method there."""
    assert isinstance(error, HTTPException)  # noqa: S101 - the framework dispatches by type
    path = request.url.path
    if error.status_code == NotFound.status:
        return answer(request.scope, NotFound(f"{path[:200]!r} is no path of this server; /openapi.json lists the native ones"))
    headers = dict(error.headers or {})
    remedy = f"use {headers['Allow']}" if "Allow" in headers else "mend the request"
    mapped = answer(request.scope, InvalidRequest(f"{request.method} {path[:200]}: {error.detail}; {remedy}"), error.status_code)
    mapped.headers.update(headers)
    return mapped


async def _of_disconnect(request: Request, _: Exception) -> Response:
    """Nobody is there to read it."""
    if is_native(request.url.path):
        return payload_response(
            Cancelled("the connection was closed before the request had come; send it again"), request_id_of(request.scope)
        )
    return Response(status_code=Cancelled.status)


async def _of_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, under the request's id, which the caller can quote. The framework calls this outside of our own
    middleware."""
    request_id = request_id_of(request.scope)
    _log.error("incident %s", request_id, exc_info=error, extra={"request_id": request_id})
    await asyncio.sleep(HOLD_S)
    failed = answer(request.scope, InternalError(f"the server failed; its log has the details under {request_id}"))
    failed.headers[HEADER] = request_id
    return failed


def _retry_after(error: TinsmithError, status: int) -> dict[str, str] | None:
    if status not in _RETRY_AFTER:
        return None
    known = error.retry_after_s if isinstance(error, RateLimited) else None
    return {"Retry-After": str(_RETRY_AFTER_S if known is None else max(1, ceil(known)))}
