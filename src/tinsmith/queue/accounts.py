"""What the executor of a trainer replica reports: log lines, metrics and trace spans of commands, restores and snapshots.

Knows of entries and outcomes what telemetry may hold: kinds, reasons and amounts. Decides nothing.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tinsmith import telemetry
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.training import Kind
from tinsmith.queue.residents import Resident
from tinsmith.state.lanes import Acquired, Entry, LaneInfo, Lanes
from tinsmith.telemetry import Traced

COMPLETED = "completed"
FAILED = "failed"
ACQUIRED = "acquired"  # from another owner, or from a snapshot that no owner had in memory
TAINTED = "tainted"

_log = logging.getLogger(__name__)


@contextmanager
def running(info: LaneInfo, entry: Entry) -> Iterator[Traced]:
    """Around one command: its request id in the log lines, its span, its time."""
    with (
        telemetry.bound_request(entry.rid),
        telemetry.traced(
            telemetry.SPAN_COMMAND, entry.trace, kind=entry.kind, request_id=entry.rid, lane=info.lane, seq=entry.seq
        ) as traced,
        telemetry.span(telemetry.EXECUTION, base_model=info.base, kind=entry.kind.value),
    ):
        yield traced


async def queue_wait_s(lanes: Lanes, tenant: str, rid: str) -> float:
    """From the submit of a command until it was first taken, in s. One read of the store, so only for commands that are traced."""
    record = await lanes.look(tenant, rid)
    if record is None or record.started_ms is None:
        return 0.0
    return (record.started_ms - record.submitted_ms) / 1000


def executed(base: str, entry: Entry, outcome: Outcome) -> None:
    """Count a settled command. What no caller may see of its failure goes to the log, under the request's id."""
    reason = "" if outcome.failure is None else outcome.failure.reason.value
    telemetry.count(telemetry.EXECUTIONS, base_model=base, kind=entry.kind.value, outcome=outcome.state.value, reason=reason)
    if outcome.is_tainted:
        telemetry.count(telemetry.TAINTS, base_model=base, reason=reason)
    if outcome.failure is None and entry.kind in (Kind.FORWARD_BACKWARD, Kind.TRAIN_STEP):
        telemetry.count(telemetry.TOKENS, entry.tokens, base_model=base, kind=telemetry.TRAINED)
    if outcome.failure is not None and outcome.failure.diagnostic is not None:
        with telemetry.bound_request(entry.rid):
            _log.error("%s failed: %s\n%s", entry.kind, outcome.failure.message, outcome.failure.diagnostic)


def outcome_attributes(outcome: Outcome) -> dict[str, str]:
    """Of the span of a command."""
    return {"outcome": outcome.state.value} | ({} if outcome.failure is None else {"reason": outcome.failure.reason.value})


def restored(base: str, acquired: Acquired, cause: str, seconds: float, failure: Exception | None) -> None:
    """Report an adapter that was built anew. A model that nothing was done to yet is no restore."""
    if acquired.info.snapshot is None and not acquired.replay and cause == ACQUIRED:
        return
    telemetry.count(telemetry.RESTORES, base_model=base, cause=cause, outcome=COMPLETED if failure is None else FAILED)
    telemetry.observe(telemetry.RESTORE, seconds, base_model=base, cause=cause)


def snapshotted(base: str, *, is_taken: bool) -> None:
    telemetry.count(telemetry.SNAPSHOTS, base_model=base, outcome=COMPLETED if is_taken else FAILED)


def lag(base: str, residents: Iterable[Resident]) -> None:
    """What this replica's lanes hold beyond their snapshots, all together."""
    held = tuple(residents)
    telemetry.gauge(telemetry.SNAPSHOT_LAG_BYTES, sum(resident.lag_bytes for resident in held), base_model=base)
    telemetry.gauge(telemetry.SNAPSHOT_LAG_ENGINE, sum(resident.lag_engine_s for resident in held), base_model=base)
