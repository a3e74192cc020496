"""Plans a restore: which snapshot to load, which commands to run again, which saves to capture again. Pure; runs nothing.

The rule: a command that left an effect in the adapter is run again, in its place; a save whose artifact was being published is captured
again at the same point, so it holds the weights of its own seq; everything else is skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinsmith.protocol.futures import State
from tinsmith.state.lanes import Entry, LaneInfo


class Action(StrEnum):
    RUN = "run"  # its outcome was settled before: drop it
    CAPTURE = "capture"  # publish and settle it


@dataclass(frozen=True, slots=True)
class Step:
    entry: Entry
    action: Action


@dataclass(frozen=True, slots=True)
class Plan:
    """`snapshot` None: the lane begins with entry 0. `steps` are in seq order."""

    snapshot: str | None
    steps: tuple[Step, ...]


def plan(info: LaneInfo, replay: Sequence[Entry]) -> Plan:
    """The way from nothing to the adapter as the last completed entry left it."""
    steps = (_step(entry) for entry in sorted(replay, key=lambda entry: entry.seq) if entry.seq > info.durable)
    return Plan(info.snapshot, tuple(step for step in steps if step is not None))


def _step(entry: Entry) -> Step | None:
    if entry.state is State.COMPLETED and entry.kind.is_replayed:
        return Step(entry, Action.RUN)
    if entry.state is State.RUNNING and entry.kind.is_save:
        return Step(entry, Action.CAPTURE)
    return None
