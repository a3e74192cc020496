"""What one command goes through in memory: its entry in a lane's log and its future record change together, here alone.

Knows nothing of owners, leases or order.
"""

from dataclasses import replace

from tinsmith.protocol.futures import FutureRecord, Outcome, State
from tinsmith.state.lanes import Entry, Submission
from tinsmith.state.memory_futures import MemoryFutures
from tinsmith.state.memory_log import LaneLog
from tinsmith.state.memory_store import Clock


def record_of(submission: Submission, now_ms: int) -> FutureRecord:
    """The record of a command that waits."""
    return FutureRecord(
        rid=submission.rid,
        tenant=submission.tenant,
        session=submission.session,
        lane=submission.lane,
        seq=submission.seq,
        kind=submission.kind,
        digest=submission.digest,
        state=State.PENDING,
        submitted_ms=now_ms,
    )


class LaneEntries:
    """The changes of entries. A terminal one is never changed again."""

    def __init__(self, futures: MemoryFutures, clock_ms: Clock) -> None:
        self._futures = futures
        self._clock_ms = clock_ms

    def add(self, lane: LaneLog, submission: Submission) -> None:
        self._futures.add(record_of(submission, self._clock_ms()), submission.body)
        lane.append(
            Entry(
                rid=submission.rid,
                seq=submission.seq,
                kind=submission.kind,
                digest=submission.digest,
                size=len(submission.body),
                tokens=submission.tokens,
                state=State.PENDING,
                attempts=0,
                trace=submission.trace,
            )
        )

    def start(self, lane: LaneLog, entry: Entry) -> Entry:
        """Hand it out; one that runs already stays as it is."""
        if entry.state is State.RUNNING:
            return entry
        self._futures.start(entry.rid)
        return lane.put(replace(entry, state=State.RUNNING))

    def give_back(self, lane: LaneLog, entry: Entry) -> None:
        self._futures.give_back(entry.rid)
        lane.put(replace(entry, state=State.PENDING))

    def end(self, lane: LaneLog, entry: Entry, outcome: Outcome) -> None:
        """The one terminal change of an entry. A body stays for a later replay only."""
        self._futures.end(entry.rid, outcome)
        lane.put(replace(entry, state=outcome.state, artifact=outcome.artifact))
        lane.num_pending -= 1
        lane.moved_ms = self._clock_ms()
        if outcome.state is not State.COMPLETED or not (entry.kind.is_replayed or entry.kind.is_save):
            self.free_body(lane, entry)

    def free_body(self, lane: LaneLog, entry: Entry) -> None:
        lane.held_bytes -= self._futures.free_body(entry.rid)
