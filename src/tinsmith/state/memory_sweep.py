"""The janitor's sweep of the memory lanes: what is past its retention goes; what does not move, or waits for nobody, fails."""

from tinsmith.protocol.futures import FutureRecord, Outcome, State
from tinsmith.state.futures import orphaned, stuck
from tinsmith.state.lanes import LaneLimits, Role, Swept, bell_topic, inbox_topic, process_of
from tinsmith.state.memory_entries import LaneEntries
from tinsmith.state.memory_events import EventLog
from tinsmith.state.memory_futures import MemoryFutures
from tinsmith.state.memory_log import LaneLog
from tinsmith.state.memory_pool import MemoryPools
from tinsmith.state.memory_replicas import MemoryReplicas

Lanes = dict[str, LaneLog]
Sessions = dict[tuple[str, str], int]  # (tenant, session) -> when it ended
Inboxes = dict[str, int]  # topic -> when something was last posted to it


class MemorySweep:
    """One pass over the data of the lanes, which its caller keeps."""

    def __init__(
        self,
        limits: LaneLimits,
        entries: LaneEntries,
        futures: MemoryFutures,
        pools: MemoryPools,
        replicas: MemoryReplicas,
        events: EventLog,
    ) -> None:
        self._limits = limits
        self._entries = entries
        self._futures = futures
        self._pools = pools
        self._replicas = replicas
        self._events = events

    def run(self, lanes: Lanes, ended: Sessions, inboxes: Inboxes, *, now_ms: int, stuck_ms: int, orphan_ms: int) -> Swept:
        num_orphaned = sum(self._fail_if_orphaned(lane, now_ms - orphan_ms, orphan_ms) for lane in lanes.values())
        num_stuck = sum(self._fail_if_stuck(lane, now_ms - stuck_ms, stuck_ms) for lane in lanes.values())
        for base in self._pools.bases():
            if self._is_orphaned(base, Role.SAMPLER, now_ms - orphan_ms):
                num_orphaned += self._pools.expire(base, now_ms - orphan_ms, orphaned(Role.SAMPLER, orphan_ms))
            num_stuck += self._pools.expire(base, now_ms - stuck_ms, stuck(stuck_ms))
        old_ms = now_ms - self._limits.record_kept_ms
        num_results = self._futures.free_results(fetched_before_ms=now_ms - self._limits.result_kept_ms, ended_before_ms=old_ms)
        num_records = self._futures.forget_where(lambda record: _is_old(record, lanes.get(record.lane), old_ms))
        for name in [name for name, lane in lanes.items() if lane.closed_ms is not None and lane.closed_ms <= old_ms]:
            del lanes[name]
        for session in [session for session, ended_ms in ended.items() if ended_ms <= old_ms]:
            del ended[session]
        self._forget_topics(inboxes, now_ms, old_ms)
        return Swept(num_results=num_results, num_records=num_records, num_stuck=num_stuck, num_orphaned=num_orphaned)

    def _fail_if_stuck(self, lane: LaneLog, since_ms: int, stuck_ms: int) -> bool:
        """Only a lane whose owner lives can be stuck; waiting behind own work or for an owner is no deadline."""
        if not lane.num_pending or lane.owner is None or lane.moved_ms > since_ms or not self._replicas.is_alive(lane.owner):
            return False
        unsettled = lane.unsettled()
        first = unsettled[0]
        if any(entry.state is State.RUNNING for entry in unsettled) or self._futures.get(first.rid).submitted_ms > since_ms:
            return False
        self._entries.end(lane, first, Outcome(failure=stuck(stuck_ms)))
        self._events.append(bell_topic(lane.owner), lane.name)
        return True

    def _fail_if_orphaned(self, lane: LaneLog, since_ms: int, orphan_ms: int) -> int:
        """All of a lane that no trainer has served for so long. A last owner that should wake up is fenced first, since what it has run
        meanwhile counts no more."""
        if not lane.num_pending or lane.moved_ms > since_ms or not self._is_orphaned(lane.base, Role.TRAINER, since_ms):
            return 0
        if lane.owner is not None:
            lane.owner = None
            lane.token += 1
        waiting = lane.unsettled()
        for entry in waiting:
            self._entries.end(lane, entry, Outcome(failure=orphaned(Role.TRAINER, orphan_ms)))
        return len(waiting)

    def _is_orphaned(self, base: str, role: Role, since_ms: int) -> bool:
        return self._replicas.lived_until_ms(base, role) <= since_ms

    def _forget_topics(self, inboxes: Inboxes, now_ms: int, old_ms: int) -> None:
        for replica in self._replicas.pop_dead(old_ms):
            self._events.drop(bell_topic(replica))
            self._events.drop(inbox_topic(replica))
        for topic in [topic for topic, posted_ms in inboxes.items() if posted_ms <= now_ms - self._limits.inbox_kept_ms]:
            del inboxes[topic]
            # The numbers of a living reader's inbox go on, or it would take new messages for old ones.
            if self._replicas.is_alive(process_of(topic)):
                self._events.empty(topic)
            else:
                self._events.drop(topic)


def _is_old(record: FutureRecord, lane: LaneLog | None, old_ms: int) -> bool:
    """An open model's records stay, since they are what makes its repeats known; else retention counts from the end."""
    end_ms = record.ended_ms if lane is None else lane.closed_ms
    return end_ms is not None and end_ms <= old_ms
