"""One model lane's data in memory: its log of entries, what is missing in it, and where a reader of it may go on.

Pure bookkeeping over frozen entries; the operations, the records and the leases are `memory_lanes.py`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tinsmith.protocol.futures import State
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import Entry, LaneInfo


@dataclass(slots=True)
class LaneLog:
    """A lane.

    passed: every seq below it was handed out or given up; a seq below it that has no entry never comes.
    voids: seqs from `passed` on of which it is known that they never come.
    moved_ms: when the lane last made progress (created, acquired, settled). former: the artifact that the last snapshot replaced.
    """

    name: str
    tenant: str
    session: str
    base: str
    last_ms: int
    moved_ms: int
    closed_ms: int | None = None
    owner: str | None = None
    token: int = 0
    passed: int = 0
    last_seq: int = -1
    barrier: int = -1
    durable: int = -1
    snapshot: str | None = None
    former: str | None = None
    num_pending: int = 0
    held_bytes: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    voids: set[int] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.closed_ms is None

    def info(self) -> LaneInfo:
        return LaneInfo(
            lane=self.name,
            tenant=self.tenant,
            session=self.session,
            base=self.base,
            is_open=self.is_open,
            owner=self.owner,
            token=self.token,
            durable=self.durable,
            snapshot=self.snapshot,
            num_pending=self.num_pending,
            held_bytes=self.held_bytes,
            last_seq=self.last_seq,
        )

    def arrive(self, seq: int, kind: Kind, now_ms: int) -> None:
        """Something came in at `seq`, be it a command or the news that there is none."""
        self.last_seq = max(self.last_seq, seq)
        self.last_ms = now_ms
        if kind.is_barrier:
            self.barrier = max(self.barrier, seq)

    def append(self, entry: Entry) -> None:
        self.entries[entry.seq] = entry
        self.num_pending += 1
        self.held_bytes += entry.size

    def put(self, entry: Entry) -> Entry:
        """Replace the entry of the same seq."""
        self.entries[entry.seq] = entry
        return entry

    def is_given_up(self, seq: int) -> bool:
        """True if nothing came at `seq` and nothing will."""
        return seq not in self.entries and (seq < self.passed or seq in self.voids)

    def first_pending(self) -> Entry | None:
        """The head of what waits."""
        return next((entry for entry in self.unsettled() if entry.state is State.PENDING), None)

    def is_running(self, seq: int) -> bool:
        return seq in self.entries and self.entries[seq].state is State.RUNNING

    def unsettled(self) -> list[Entry]:
        """Pending and running entries, by seq."""
        return [entry for entry in self.in_order() if not entry.state.is_terminal]

    def in_order(self) -> Iterator[Entry]:
        return (self.entries[seq] for seq in sorted(self.entries))

    def last_completed(self) -> int:
        """The highest seq whose effect is in the model, -1 if there is none."""
        return max((seq for seq, entry in self.entries.items() if entry.state is State.COMPLETED), default=self.durable)

    def cursor(self) -> int:
        """Where a new owner goes on after its replay: the lowest seq above the last completed one that waits or may still come."""
        above = self.last_completed() + 1
        frontier = max(above, self.passed)
        while frontier in self.voids or (frontier in self.entries and self.entries[frontier].state.is_terminal):
            frontier += 1
        return min([frontier, *(entry.seq for entry in self.unsettled() if entry.seq >= above)])

    def replay(self) -> tuple[Entry, ...]:
        """Completed entries above the floor and, in their places, the saves below the last of them that are not settled."""
        last = self.last_completed()
        return tuple(
            entry
            for entry in self.in_order()
            if entry.state is State.COMPLETED or (entry.kind.is_save and entry.seq < last and not entry.state.is_terminal)
        )

    def next_arrived(self, seq: int) -> int:
        """The lowest seq above `seq` at which something has come in; there must be one."""
        return min(held for held in (*self.entries, *self.voids) if held > seq)

    def after_given_up(self, seq: int) -> int:
        """Where to go on from a seq that was given up; in one step, since callers choose how wide a hole is."""
        return min([max(self.passed, seq + 1), *(held for held in self.entries if held > seq)])

    def missing_wait_ms(self, seq: int, now_ms: int, grace_ms: int) -> int:
        """How long `seq`, at which nothing has come, may still hold the lane back; 0 if its turn is over. A barrier above it proves
        that its caller has sent all that it will send below."""
        return 0 if self.barrier > seq else max(0, self.last_ms + grace_ms - now_ms)

    def trim(self, seq: int) -> list[Entry]:
        """Drop the log up to and including `seq`; answers the entries dropped."""
        dropped = [entry for entry in self.entries.values() if entry.seq <= seq]
        for entry in dropped:
            del self.entries[entry.seq]
        self.voids = {void for void in self.voids if void > seq}
        return dropped
