"""The one tree of errors that the client raises.

    ClientError
    ├── ClientValidationError    an argument is wrong (`field` names it); nothing was sent
    ├── ClientClosed             the client was closed before this call
    ├── ConnectionFailed         no answer, also after the retries
    ├── UnexpectedAnswer         an answer that this client cannot read
    ├── WaitTimedOut             the task has not ended in time; it goes on
    ├── RecordLost               the server does not know the task (any more)
    └── ReportedError            the server said why: reason, category, error_code, request_id, details
        ├── HttpError            it refused the request (`status`)
        ├── TaskFailed           it took the command, and the command failed
        └── TaskCancelled        the command was cancelled before it started

No message and no attribute ever holds an API key. Every error can be copied, and sent to another process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from tinsmith.protocol.envelopes import ErrorPayload
from tinsmith.protocol.errors import Category, ReasonCode


class ClientError(Exception):
    """Root of the tree."""


class ClientValidationError(ClientError):
    """`field` is the argument, dotted where the fault lies inside it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class ClientClosed(ClientError):
    def __str__(self) -> str:
        return "the client is closed; open another one"


class ConnectionFailed(ClientError):
    """`may_have_arrived`: the server may have acted on the request although no answer came."""

    def __init__(self, problem: str, may_have_arrived: bool = False) -> None:
        super().__init__(problem, may_have_arrived)
        self.problem = problem
        self.may_have_arrived = may_have_arrived

    def __str__(self) -> str:
        return self.problem


class UnexpectedAnswer(ClientError):
    pass


class WaitTimedOut(ClientError):
    def __init__(self, request_id: str, waited_s: float) -> None:
        super().__init__(request_id, waited_s)
        self.request_id = request_id
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"task {self.request_id} has not ended within {self.waited_s:g} s; it goes on: wait again, or cancel it"


class RecordLost(ClientError):
    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"task {self.request_id} is unknown to the server: it was never issued to this key, or its record is gone; submit it again"


@dataclass(frozen=True, slots=True)
class Report:
    """What the server said of a failure. `reason` None: it gave none that this client knows."""

    message: str
    reason: ReasonCode | None
    category: Category
    error_code: int
    request_id: str | None = None
    details: tuple[str, ...] | None = None

    @classmethod
    def of(cls, payload: ErrorPayload) -> "Report":
        return cls(
            message=payload.error,
            reason=payload.reason,
            category=payload.category,
            error_code=payload.error_code,
            request_id=payload.request_id,
            details=None if payload.details is None else tuple(payload.details),
        )


class ReportedError(ClientError):
    """Base of what the server reports: catch it to treat a refusal and a failed task alike."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    @property
    def message(self) -> str:
        return self.report.message

    @property
    def reason(self) -> ReasonCode | None:
        return self.report.reason

    @property
    def category(self) -> Category:
        """`user`: the caller can mend it; `server`: the same call may succeed later."""
        return self.report.category

    @property
    def error_code(self) -> int:
        """An HTTP status, 400 to 599, whatever the status of the answer was."""
        return self.report.error_code

    @property
    def request_id(self) -> str | None:
        """What to quote to an operator: the server's log has the details under it."""
        return self.report.request_id

    @property
    def details(self) -> tuple[str, ...] | None:
        return self.report.details

    def __str__(self) -> str:
        reason = "" if self.reason is None else f" {self.reason}"
        details = "" if self.details is None else f" ({'; '.join(self.details)})"
        return f"{self.error_code}{reason}: {self.message}{details}"


class HttpError(ReportedError):
    """`may_have_arrived`: this or an earlier try of the request may have been accepted. `retry_after_s`: as the server asked, if it did."""

    def __init__(self, status: int, report: Report, *, may_have_arrived: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(report)
        self.args = (status, report)
        self.status = status
        self.may_have_arrived = may_have_arrived
        self.retry_after_s = retry_after_s


class TaskFailed(ReportedError):
    pass


class TaskCancelled(ReportedError):
    pass


@contextmanager
def checked_arguments(within: str = "") -> Iterator[None]:
    """Around the building of a request: what the protocol refuses is a ClientValidationError that names the argument.

    `within` is the argument that the block builds, where the block builds a part of one.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    else:
        return
    problem = first["msg"].removeprefix("Value error, ")
    field = ".".join(str(step) for step in (within, *first["loc"]) if step != "")
    if not field:  # a rule over several fields names them in its text
        field, _, problem = problem.partition(": ")
    raise ClientValidationError(field, problem)
