"""The one tree of errors. Engines, queue and state raise these; the gateway maps them; nothing else invents a status.

    TinsmithError
    ├── UserError                     the caller can mend it (category "user")
    │   ├── InvalidRequest            400 invalid_request
    │   ├── RequestRejected           400 request_rejected
    │   ├── Unauthenticated           401 unauthenticated
    │   ├── NotFound                  404 resource_not_found
    │   ├── ExclusiveBusy             409 exclusive_busy
    │   ├── SessionEnded              410 session_ended
    │   ├── PayloadTooLarge           413 payload_too_large
    │   ├── InputTokensExceeded       422 input_tokens_exceeded
    │   ├── ValidationFailed          422 validation_failed
    │   ├── RateLimited               429 rate_limit_exceeded
    │   ├── QuotaExceeded             429 resource_quota_exceeded
    │   ├── Cancelled                 499 cancelled
    │   └── EndpointUnavailable       501 endpoint_unavailable
    └── ServerError                   the server's fault or state (category "server")
        ├── DeadlineExceeded          500 deadline_exceeded
        ├── InternalError             500 internal_error
        ├── StateContention           503 state_contention (contention, or the store is away)
        ├── GateUnavailable           503 backend_gate_unavailable
        ├── OrphanedReplica           503 orphaned_replica
        └── ExecutionTimeout          504 execution_timeout

A message is one line that names the field or bound and the remedy. Faults of the configuration are `config.ConfigError`: they stop a
start and never reach a caller.
"""

from enum import StrEnum
from typing import ClassVar


class Category(StrEnum):
    """Who can act on a failure; lower case on every wire."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class ReasonCode(StrEnum):
    """The closed set of reasons for which a request or a command can fail."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHENTICATED = "unauthenticated"
    REQUEST_REJECTED = "request_rejected"
    SESSION_ENDED = "session_ended"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    RESOURCE_NOT_FOUND = "resource_not_found"
    EXCLUSIVE_BUSY = "exclusive_busy"
    INPUT_TOKENS_EXCEEDED = "input_tokens_exceeded"
    VALIDATION_FAILED = "validation_failed"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    RESOURCE_QUOTA_EXCEEDED = "resource_quota_exceeded"
    CANCELLED = "cancelled"
    ENDPOINT_UNAVAILABLE = "endpoint_unavailable"
    STATE_CONTENTION = "state_contention"
    BACKEND_GATE_UNAVAILABLE = "backend_gate_unavailable"
    ORPHANED_REPLICA = "orphaned_replica"
    EXECUTION_TIMEOUT = "execution_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL_ERROR = "internal_error"


class TinsmithError(Exception):
    """Root of the tree. Raise a leaf, never this class."""

    reason: ClassVar[ReasonCode]
    status: ClassVar[int]
    category: ClassVar[Category]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[type["TinsmithError"], tuple[object, ...]]:
        return (type(self), (self.message,))


class UserError(TinsmithError):
    category = Category.USER


class ServerError(TinsmithError):
    category = Category.SERVER


class InvalidRequest(UserError):
    reason, status = ReasonCode.INVALID_REQUEST, 400


class RequestRejected(UserError):
    reason, status = ReasonCode.REQUEST_REJECTED, 400


class Unauthenticated(UserError):
    reason, status = ReasonCode.UNAUTHENTICATED, 401


class NotFound(UserError):
    reason, status = ReasonCode.RESOURCE_NOT_FOUND, 404


class ExclusiveBusy(UserError):
    reason, status = ReasonCode.EXCLUSIVE_BUSY, 409


class SessionEnded(UserError):
    reason, status = ReasonCode.SESSION_ENDED, 410


class PayloadTooLarge(UserError):
    reason, status = ReasonCode.PAYLOAD_TOO_LARGE, 413


class InputTokensExceeded(UserError):
    reason, status = ReasonCode.INPUT_TOKENS_EXCEEDED, 422


class ValidationFailed(UserError):
    """`details`: one line a fault, where the request as a whole was checked."""

    reason, status = ReasonCode.VALIDATION_FAILED, 422

    def __init__(self, message: str, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.details = details

    def __reduce__(self) -> tuple[type["TinsmithError"], tuple[object, ...]]:
        return (type(self), (self.message, self.details))


class RateLimited(UserError):
    """`retry_after_s`: when the budget will hold what was asked for, where that is known."""

    reason, status = ReasonCode.RATE_LIMIT_EXCEEDED, 429

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["TinsmithError"], tuple[object, ...]]:
        return (type(self), (self.message, self.retry_after_s))


class QuotaExceeded(UserError):
    reason, status = ReasonCode.RESOURCE_QUOTA_EXCEEDED, 429


class Cancelled(UserError):
    reason, status = ReasonCode.CANCELLED, 499


class EndpointUnavailable(UserError):
    reason, status = ReasonCode.ENDPOINT_UNAVAILABLE, 501


class DeadlineExceeded(ServerError):
    reason, status = ReasonCode.DEADLINE_EXCEEDED, 500


class InternalError(ServerError):
    reason, status = ReasonCode.INTERNAL_ERROR, 500


class StateContention(ServerError):
    reason, status = ReasonCode.STATE_CONTENTION, 503


class GateUnavailable(ServerError):
    reason, status = ReasonCode.BACKEND_GATE_UNAVAILABLE, 503


class OrphanedReplica(ServerError):
    reason, status = ReasonCode.ORPHANED_REPLICA, 503


class ExecutionTimeout(ServerError):
    reason, status = ReasonCode.EXECUTION_TIMEOUT, 504


LEAVES: tuple[type[TinsmithError], ...] = (
    InvalidRequest,
    RequestRejected,
    Unauthenticated,
    NotFound,
    ExclusiveBusy,
    SessionEnded,
    PayloadTooLarge,
    InputTokensExceeded,
    ValidationFailed,
    RateLimited,
    QuotaExceeded,
    Cancelled,
    EndpointUnavailable,
    DeadlineExceeded,
    InternalError,
    StateContention,
    GateUnavailable,
    OrphanedReplica,
    ExecutionTimeout,
)

_BY_REASON: dict[ReasonCode, type[TinsmithError]] = {leaf.reason: leaf for leaf in LEAVES}


def error_of(reason: ReasonCode, message: str) -> TinsmithError:
    """The exception that stands for a stored reason code."""
    return _BY_REASON[reason](message)
