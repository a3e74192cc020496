"""The stored state of one submitted command, as every layer speaks of it."""

import traceback
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from tinsmith.protocol.errors import Category, InternalError, ReasonCode, TinsmithError, error_of
from tinsmith.protocol.training import Kind

MAX_MESSAGE = 1024  # characters of a failure's message
MAX_DIAGNOSTIC = 64 * 1024  # of its traceback, whose tail is kept


def one_line(message: str) -> str:
    """A message as callers get it: what it quotes of theirs may be long or broken into lines."""
    return " ".join(message.split())[:MAX_MESSAGE]


class State(StrEnum):
    """pending -> running -> completed | failed | cancelled; running -> pending only when another replica takes the lane over."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self not in (State.PENDING, State.RUNNING)


class Failure(BaseModel):
    """Why a command failed. `diagnostic` is for the server's log alone; no caller ever receives it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: ReasonCode
    message: str
    category: Category
    details: list[str] | None = None
    diagnostic: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """A typed error keeps its reason; anything else is an internal error whose text stays in the diagnostic."""
        if isinstance(error, TinsmithError):
            return cls(reason=error.reason, message=one_line(error.message), category=error.category)
        trace = "".join(traceback.format_exception(error))[-MAX_DIAGNOSTIC:]
        return cls(
            reason=InternalError.reason,
            message=f"the server failed while running this command ({type(error).__name__}); the log has the details",
            category=InternalError.category,
            diagnostic=trace,
        )

    def error(self) -> TinsmithError:
        return error_of(self.reason, self.message)


@dataclass(frozen=True, slots=True)
class FutureRecord:
    """failed or cancelled implies a failure and no result; completed implies a result; times are the store's clock in ms."""

    rid: str
    tenant: str
    session: str
    lane: str
    seq: int | str
    kind: Kind
    digest: str
    state: State
    submitted_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    failure: Failure | None = None
    result_size: int | None = None
    fetched_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A catalog record that becomes visible together with an operation on a lane. `value` None deletes."""

    table: str
    id: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Tally:
    """An amount that an operation on a lane adds to a sum, once, however often the operation is repeated.

    The sum lies under "<hour>/<id>" of the table "<table>/<day>", hour and day counted from 1970 UTC by the store's clock at the moment in
    which the operation takes effect. The table itself lists its days.
    """

    table: str
    id: str
    amount: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a sample cost: tokens of its prompt, how many of them came from a cache, and tokens drawn over all its sequences."""

    num_prompt: int
    num_cached: int
    num_drawn: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running one command came to. Exactly one of result and failure is set.

    is_tainted: the adapter may hold half an effect and must be rebuilt before the next command of its lane.
    artifact: the durable artifact that a save made. writes: records that the settle makes visible, and sums that it adds to.
    sampled: of a completed sample.
    """

    result: bytes | None = None
    failure: Failure | None = None
    is_tainted: bool = False
    artifact: str | None = None
    writes: tuple[Write | Tally, ...] = field(default=())
    sampled: SampledTokens | None = None

    def __post_init__(self) -> None:
        if (self.result is None) == (self.failure is None):
            raise ValueError("an outcome has a result or a failure, and not both")

    @property
    def state(self) -> State:
        if self.failure is None:
            return State.COMPLETED
        return State.CANCELLED if self.failure.reason is ReasonCode.CANCELLED else State.FAILED

    @classmethod
    def failed(cls, error: BaseException, *, is_tainted: bool) -> "Outcome":
        return cls(failure=Failure.of(error), is_tainted=is_tainted)
