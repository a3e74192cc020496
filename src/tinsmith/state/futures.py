"""Life of a future record: which changes of state are legal, how it lies in a store, and the failures that the lanes themselves write.

Pure functions over frozen records; both implementations of the lanes go through them. Knows nothing of lanes' logs, bodies or stores.

    pending -> running -> completed | failed | cancelled        running -> pending when another replica takes the lane over
    pending -> failed | cancelled                               (close, cancel, a lane that does not move)
"""

from collections.abc import Mapping
from dataclasses import replace

from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import Failure, FutureRecord, Outcome, State
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import Role

_NEXT: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.PENDING, State.COMPLETED, State.FAILED, State.CANCELLED}),
}
_TIMES = {1: "once", 2: "twice", 3: "three times"}


def may_become(old: State, new: State) -> bool:
    """Whether the change is one that a record can make. A terminal state never changes."""
    return new in _NEXT.get(old, frozenset())


def started(record: FutureRecord, now_ms: int) -> FutureRecord:
    """Handed out; the first hand-out's time stays."""
    _check(record, State.RUNNING)
    return replace(record, state=State.RUNNING, started_ms=now_ms if record.started_ms is None else record.started_ms)


def returned(record: FutureRecord) -> FutureRecord:
    """Back to waiting, since its worker is gone or has released the lane."""
    _check(record, State.PENDING)
    return replace(record, state=State.PENDING)


def settled(record: FutureRecord, outcome: Outcome, now_ms: int) -> FutureRecord:
    """The one terminal change."""
    _check(record, outcome.state)
    size = None if outcome.result is None else len(outcome.result)
    return replace(record, state=outcome.state, ended_ms=now_ms, failure=outcome.failure, result_size=size)


def record_to_fields(record: FutureRecord) -> dict[str, str]:
    """The record as a flat mapping of text; fields that are None are left out."""
    fields = {
        "rid": record.rid,
        "tenant": record.tenant,
        "session": record.session,
        "lane": record.lane,
        "seq": str(record.seq),
        "kind": record.kind.value,
        "digest": record.digest,
        "state": record.state.value,
        "submitted_ms": str(record.submitted_ms),
    }
    optional = {
        "started_ms": record.started_ms,
        "ended_ms": record.ended_ms,
        "failure": None if record.failure is None else record.failure.model_dump_json(),
        "result_size": record.result_size,
        "fetched_ms": record.fetched_ms,
    }
    return fields | {name: str(value) for name, value in optional.items() if value is not None}


def record_from_fields(fields: Mapping[str, str]) -> FutureRecord:
    """Inverse of `record_to_fields`; fields of other names are ignored. A sample's seq is text, every other kind's a number."""
    kind = Kind(fields["kind"])
    failure = fields.get("failure")
    return FutureRecord(
        rid=fields["rid"],
        tenant=fields["tenant"],
        session=fields["session"],
        lane=fields["lane"],
        seq=fields["seq"] if kind is Kind.SAMPLE else int(fields["seq"]),
        kind=kind,
        digest=fields["digest"],
        state=State(fields["state"]),
        submitted_ms=int(fields["submitted_ms"]),
        started_ms=_optional_int(fields, "started_ms"),
        ended_ms=_optional_int(fields, "ended_ms"),
        failure=None if failure is None else Failure.model_validate_json(failure),
        result_size=_optional_int(fields, "result_size"),
        fetched_ms=_optional_int(fields, "fetched_ms"),
    )


def pool_lane(base: str, tenant: str) -> str:
    """What a sample's record names as its lane."""
    return f"pool:{base}:{tenant}"


def base_of_pool(lane: str, tenant: str) -> str:
    """The base model of a `pool_lane` of the tenant."""
    return lane.removeprefix("pool:").removesuffix(f":{tenant}")


def worn_out(max_attempts: int) -> Failure:
    """A command whose worker died each time that it ran."""
    times = _TIMES.get(max_attempts, f"{max_attempts} times")
    return Failure(
        reason=ReasonCode.INTERNAL_ERROR, message=f"the worker died {times} while running this command", category=Category.SERVER
    )


def given_up(seq: int) -> Failure:
    """A command that arrived after its place in the order was given up."""
    return Failure(
        reason=ReasonCode.REQUEST_REJECTED,
        message=f"seq_id {seq} arrived too late: its turn was given up; submit the command again under a new seq_id",
        category=Category.USER,
    )


def cancelled() -> Failure:
    return Failure(
        reason=ReasonCode.CANCELLED,
        message="cancelled by its caller before it started; if it is still wanted, send it under a new seq_id",
        category=Category.USER,
    )


def stuck(stuck_ms: int) -> Failure:
    """The first command of a lane that does not move."""
    return Failure(
        reason=ReasonCode.DEADLINE_EXCEEDED,
        message=f"the command waited {stuck_ms / 1000:g} s while nothing of its lane ran; submit it again",
        category=Category.SERVER,
    )


def orphaned(role: Role, orphan_ms: int) -> Failure:
    """A command that waits for a process which nobody runs."""
    return Failure(
        reason=ReasonCode.ORPHANED_REPLICA,
        message=f"no {role} of this base model has lived for {orphan_ms / 1000:g} s; submit the command again when one runs",
        category=Category.SERVER,
    )


def _check(record: FutureRecord, new: State) -> None:
    if not may_become(record.state, new):
        raise ValueError(f"record {record.rid} cannot become {new.value}: it is {record.state.value}")


def _optional_int(fields: Mapping[str, str], name: str) -> int | None:
    return int(fields[name]) if name in fields else None
