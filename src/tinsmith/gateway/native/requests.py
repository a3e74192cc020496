"""Reading a native request: the byte bounds first, then one strict pass, each fault in a line of its own.

Nothing relaxes this: no field of the configuration, no header. A large body is read off the event loop.
"""

from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from tinsmith.gateway import bodies
from tinsmith.gateway.auth import JSON, content_type
from tinsmith.protocol.errors import InvalidRequest, ValidationFailed
from tinsmith.protocol.futures import one_line
from tinsmith.protocol.native import StrictRequest
from tinsmith.protocol.wire_bounds import check_json

MAX_DETAILS = 64  # faults that an answer lists
MAX_SHOWN = 3  # of these, in its one line
_MAX_DETAIL = 300  # characters of one
_OURS = "Value error, "  # what pydantic puts before a message of our own
_KINDS = {"Tuple": "list", "Dictionary": "object"}  # as a message names what is too short or too long

AnyRequest = TypeVar("AnyRequest", bound=StrictRequest)


async def read(request: Request, kind: type[AnyRequest]) -> AnyRequest:
    """Raises PayloadTooLarge, InvalidRequest (no JSON), ValidationFailed."""
    media_type = content_type(request.headers)
    if media_type != JSON:
        raise InvalidRequest(f"Content-Type: {media_type[:100]!r} is not accepted here; send {JSON}")
    received = await bodies.receive(request)
    return await bodies.off_loop(lambda: validate(kind, received.decoded()), is_large=received.is_large)


def validate(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Raises PayloadTooLarge, InvalidRequest, ValidationFailed with its details."""
    check_json(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = _without_echoes(error.errors(include_url=False, include_input=False))
        if faults[0]["type"] == "json_invalid":
            raise InvalidRequest(f"body: no valid JSON ({faults[0]['msg']}); send a JSON object") from error
        details = [_line(fault) for fault in faults[:MAX_DETAILS]]
        hidden = f" (and {len(faults) - MAX_SHOWN} more)" if len(faults) > MAX_SHOWN else ""
        raise ValidationFailed("; ".join(details[:MAX_SHOWN]) + hidden, details) from error


def _without_echoes(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """A list whose items are at fault is empty once they are dropped; that it is too short is then not the caller's fault."""
    above = {fault["loc"][:depth] for fault in faults for depth in range(1, len(fault["loc"]))}
    return [fault for fault in faults if not (fault["type"] == "too_short" and fault["loc"] in above)]


def _line(fault: ErrorDetails) -> str:
    """`field: message`. A check of several fields names them itself."""
    where = ".".join(map(str, fault["loc"]))
    message = _message(fault)
    if not where:
        where = "" if fault["type"] == "value_error" else "body"
    return one_line(f"{where}: {message}" if where else message)[:_MAX_DETAIL]


def _message(fault: ErrorDetails) -> str:
    """In words of JSON, where pydantic speaks of Python's classes."""
    message = fault["msg"].removeprefix(_OURS)
    match fault["type"]:
        case "extra_forbidden":
            return "no such field; leave it out"
        case "too_short" | "too_long":
            kind, _, rest = message.partition(" ")
            return f"{_KINDS.get(kind, kind)} {rest.replace(' after validation', '')}"
        case _:
            return message
