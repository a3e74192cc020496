"""The lanes that a replica owns, and whose turn it is: bookkeeping of the executor. Asks neither store nor engine.

Turns go by deficit round robin over tokens: a lane is served until its share of the round is spent, so a lane of large batches gets as
many tokens as one of small ones, and a long lane does not hold up the others.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinsmith.protocol.futures import Outcome, State
from tinsmith.state.lanes import Acquired, Entry, LaneInfo

QUANTUM_TOKENS = 4096  # a lane's share of a round
FLOOR_TOKENS = 1024  # what an entry costs its lane at least: an optimizer step or a save is no cheaper than a short batch


@dataclass(eq=False, slots=True)
class Resident:
    """A lane that this replica owns. `acquired` is set until the adapter is built from it.

    trimmable_bytes, engine_s: of the log since a snapshot was last tried; unsaved_bytes, unsaved_engine_s: from before that, where the try
    failed or is under way, and the time of the replay after which the adapter stood here.
    """

    info: LaneInfo
    acquired: Acquired | None
    cursor: int
    done: int  # highest seq whose effect, if it has one, is in the adapter
    is_built: bool = False
    has_state: bool = False  # a command or a snapshot has left something in the adapter
    has_work: bool = True
    deficit: int = 0
    trimmable_bytes: int = 0
    engine_s: float = 0.0
    unsaved_bytes: int = 0
    unsaved_engine_s: float = 0.0
    hole: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, acquired: Acquired) -> "Resident":
        resident = cls(acquired.info, None, 0, -1)
        resident.start_from(acquired)
        return resident

    @property
    def id(self) -> str:
        return self.info.lane

    @property
    def is_idle(self) -> bool:
        """Nothing to run and nothing that is about to become runnable."""
        return not self.has_work and self.hole is None

    @property
    def is_ahead(self) -> bool:
        """The adapter holds more than its durable snapshot."""
        return self.is_built and self.has_state and self.done > self.info.durable

    @property
    def lag_bytes(self) -> int:
        """Of the log that a new owner would have to run again."""
        return self.trimmable_bytes + self.unsaved_bytes

    @property
    def lag_engine_s(self) -> float:
        """About how long that would take."""
        return self.engine_s + self.unsaved_engine_s

    def start_from(self, acquired: Acquired) -> None:
        self.info = replace(acquired.info, token=acquired.token)
        self.acquired = acquired
        self.cursor = acquired.cursor
        self.done = max([acquired.info.durable, *(entry.seq for entry in acquired.replay)])
        self.trimmable_bytes = sum(entry.size for entry in acquired.replay if entry.kind.is_replayed)
        self.has_state = acquired.info.snapshot is not None or any(entry.kind.is_replayed for entry in acquired.replay)
        self.engine_s = 0.0
        self.unsaved_bytes, self.unsaved_engine_s = 0, 0.0
        self.is_built = False

    def note(self, entry: Entry, outcome: Outcome) -> None:
        """Account for a settled entry."""
        self.done = max(self.done, entry.seq)
        self.deficit -= max(entry.tokens, FLOOR_TOKENS)
        if outcome.state is State.COMPLETED and entry.kind.is_replayed:
            self.trimmable_bytes += entry.size
            self.has_state = True
        if outcome.is_tainted:
            self.is_built = False

    def begin_snapshot(self) -> None:
        """The next one is due when as much has come up again, whatever becomes of this one."""
        self.unsaved_bytes, self.unsaved_engine_s = self.lag_bytes, self.lag_engine_s
        self.trimmable_bytes, self.engine_s = 0, 0.0

    def end_snapshot(self, seq: int, artifact: str) -> None:
        """The lane's floor is at `seq` now."""
        self.info = replace(self.info, durable=seq, snapshot=artifact)
        self.unsaved_bytes, self.unsaved_engine_s = 0, 0.0

    def disarm(self) -> None:
        if self.hole is not None:
            self.hole.cancel()
            self.hole = None


class Ring:
    """The owned lanes, in the order of their turns."""

    def __init__(self) -> None:
        self._turns: deque[Resident] = deque()
        self._by_lane: dict[str, Resident] = {}

    def __iter__(self) -> Iterator[Resident]:
        return iter(tuple(self._turns))

    def __contains__(self, lane: object) -> bool:
        return lane in self._by_lane

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self._by_lane)

    def find(self, lane: str) -> Resident | None:
        return self._by_lane.get(lane)

    def add(self, resident: Resident) -> None:
        self._turns.append(resident)
        self._by_lane[resident.id] = resident

    def remove(self, resident: Resident) -> None:
        resident.disarm()
        self._turns.remove(resident)
        del self._by_lane[resident.id]

    def next(self) -> Resident | None:
        """The lane whose turn it is; None if none has work. The lane at the head is served until its share is spent; then it gets the
        share of its next round and goes to the end."""
        if not any(resident.has_work for resident in self._turns):
            return None
        while True:
            head = self._turns[0]
            if head.has_work and head.deficit > 0:
                return head
            if head.has_work:
                head.deficit += QUANTUM_TOKENS
            self._turns.rotate(-1)
