"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`.

`code` is the reason code of this server, but where that API has a name that clients look for. `param` is the field that the message names.
A request that is at fault is a 400 here, whatever its status elsewhere; what would be sent again by itself keeps its status.
"""

import re
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from tinsmith.protocol.errors import (
    EndpointUnavailable,
    InputTokensExceeded,
    NotFound,
    ReasonCode,
    SessionEnded,
    TinsmithError,
    Unauthenticated,
    ValidationFailed,
)
from tinsmith.protocol.futures import one_line

PREFIX = "/v1"

# The session of this face is the server's business: whoever finds it ended sends the request again and gets a new one.
_STATUS: Mapping[ReasonCode, int] = {
    ValidationFailed.reason: 400,
    InputTokensExceeded.reason: 400,
    EndpointUnavailable.reason: 400,
    SessionEnded.reason: 503,
}
_CODE: Mapping[ReasonCode, str] = {
    InputTokensExceeded.reason: "context_length_exceeded",
    EndpointUnavailable.reason: "unsupported_parameter",
    Unauthenticated.reason: "invalid_api_key",
}
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")
_MODEL = "model"


class ErrorBody(BaseModel):
    model_config = ConfigDict(frozen=True)

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    model_config = ConfigDict(frozen=True)

    error: ErrorBody


def is_openai(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def status_of(error: TinsmithError) -> int:
    return _STATUS.get(error.reason, error.status)


def answer_of(error: TinsmithError, status: int | None = None) -> ErrorAnswer:
    """`status`: where it is not the reason's own."""
    message = one_line(error.message)
    named = _FIELD.match(message)
    param = None if named is None else named.group(1)
    code = _CODE.get(error.reason, error.reason.value)
    if isinstance(error, NotFound) and param == _MODEL:
        code = "model_not_found"
    status = status_of(error) if status is None else status
    return ErrorAnswer(error=ErrorBody(message=message, type=_type(status), param=param, code=code))


def _type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
