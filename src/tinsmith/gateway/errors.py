"""The one map from exceptions to HTTP answers. Routes raise; nothing else in the gateway chooses a status.

A body is `{"detail": <one line>, "reason": <reason code>, "category": ...}`; it is never empty, since clients take an empty 400 for
a proxy's fault. It has no key `error`: that marks a failed future.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tinsmith.protocol.errors import (
    LEAVES,
    InternalError,
    InvalidRequest,
    NotFound,
    ReasonCode,
    ServerError,
    TinsmithError,
)
from tinsmith.protocol.futures import one_line

_log = logging.getLogger(__name__)

HOLD_S = 1.0  # how long an answer is held after which clients ask again at once: a 5xx on their long poll

_RESENT = frozenset({408, 409, 429})  # statuses that clients send again by themselves, beside the 5xx

# Clients of the Tinker wire send a 5xx again, for minutes: what this server will never do is a plain refusal there.
TINKER_STATUS: Mapping[ReasonCode, int] = {leaf.reason: leaf.status for leaf in LEAVES} | {ReasonCode.ENDPOINT_UNAVAILABLE: 400}


def is_resent(error: TinsmithError) -> bool:
    """Whether a client answers this refusal by sending the same request again, under the same seq."""
    return error.status in _RESENT or isinstance(error, ServerError)


def error_response(error: TinsmithError) -> JSONResponse:
    content = {"detail": one_line(error.message), "reason": error.reason.value, "category": error.category.value}
    return JSONResponse(content, status_code=TINKER_STATUS[error.reason])


def install(app: FastAPI) -> None:
    """Register the map."""
    app.add_exception_handler(TinsmithError, _of_ours)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(ClientDisconnect, _of_disconnect)
    app.add_exception_handler(Exception, _of_bug)


async def _of_ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)  # noqa: S101 - the framework dispatches by type
    return error_response(error)


async def _of_framework(request: Request, error: Exception) -> Response:
    """The router's own answers: no such path, or no such method there."""
    assert isinstance(error, HTTPException)  # noqa: S101 - the framework dispatches by type
    if error.status_code == NotFound.status:
        return error_response(NotFound(f"{request.url.path[:200]!r} is no path of this server"))
    mapped = error_response(InvalidRequest(f"{request.method} {request.url.path[:200]}: {error.detail}"))
    mapped.status_code = error.status_code
    return mapped


async def _of_disconnect(_: Request, __: Exception) -> Response:
    """Nobody is there to read it."""
    return Response(status_code=499)


async def _of_bug(_: Request, error: Exception) -> Response:
    """The traceback goes to the log, under an id that the caller can quote."""
    incident = uuid.uuid4().hex
    _log.error("incident %s", incident, exc_info=error)
    await asyncio.sleep(HOLD_S)
    return error_response(InternalError(f"the server failed; its log has the details under {incident}"))
