"""What the native protocol answers about work: the envelope of a task and the payload of an error, for server and client alike."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tinsmith.protocol.errors import Category, ReasonCode, TinsmithError
from tinsmith.protocol.futures import MAX_MESSAGE, Failure, State, one_line


class QueueState(StrEnum):
    """Why a task that has not ended is where it is."""

    ACTIVE = "active"
    PAUSED_CAPACITY = "paused_capacity"  # it waits for a worker with room
    PAUSED_RATE_LIMIT = "paused_rate_limit"


class Answer(BaseModel):
    """Base of what the server says. A reader ignores fields that it does not know, so an older client reads a newer server."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class ErrorPayload(Answer):
    """One failure, of a request or of a task. `error` is one line; `error_code` an HTTP status from 400 to 599. `traceback` is never set
    for a caller: it lies in the server's log under `request_id`."""

    error: str = Field(max_length=MAX_MESSAGE)
    reason: ReasonCode
    category: Category
    error_code: int = Field(ge=400, le=599)
    request_id: str | None = None
    traceback: str | None = None
    details: list[str] | None = None

    @classmethod
    def of(
        cls, error: TinsmithError, *, error_code: int, request_id: str | None = None, details: list[str] | None = None
    ) -> "ErrorPayload":
        return cls(
            error=one_line(error.message),
            reason=error.reason,
            category=error.category,
            error_code=error_code,
            request_id=request_id,
            traceback=None,  # set, so that lines of a stream, which hold what was set alone, have every field
            details=details,
        )

    @classmethod
    def of_failure(cls, failure: Failure, *, error_code: int, request_id: str) -> "ErrorPayload":
        return cls(
            error=one_line(failure.message),
            reason=failure.reason,
            category=failure.category,
            error_code=error_code,
            request_id=request_id,
            traceback=None,
            details=failure.details,
        )


class TaskEnvelope(Answer):
    """The state of one submitted command. `result` only when completed (null is a result too), `error` only when failed or cancelled."""

    request_id: str
    status: State
    result: JsonValue = None
    error: ErrorPayload | None = None
    queue_state: QueueState | None = None
    queue_state_reason: str | None = None
