"""Leases of worker processes in memory: who lives. Knows nothing of what a replica owns."""

from tinsmith.state.lanes import Replica, Role
from tinsmith.state.memory_store import Clock


class MemoryReplicas:
    """Replicas by id. One whose lease has lapsed is dead until it renews."""

    def __init__(self, lease_ms: int, clock_ms: Clock) -> None:
        self._lease_ms = lease_ms
        self._clock_ms = clock_ms
        self._held: dict[str, tuple[Replica, int]] = {}  # with the end of the lease
        self._reported: set[str] = set()  # dead ones that `newly_dead` has told of
        self._lived: dict[tuple[str, Role], int] = {}  # (base, role) -> end of the latest lease

    def renew(self, replica: Replica) -> None:
        self._reported.discard(replica.id)
        end_ms = self._clock_ms() + self._lease_ms
        self._held[replica.id] = (replica, end_ms)
        self._lived[replica.base, replica.role] = end_ms

    def is_alive(self, replica: str | None) -> bool:
        return replica in self._held and self._held[replica][1] > self._clock_ms()

    def living(self, base: str) -> list[Replica]:
        return [replica for replica, _ in self._held.values() if replica.base == base and self.is_alive(replica.id)]

    def lived_until_ms(self, base: str, role: Role) -> int:
        """When the latest lease of such a replica ends or ended; 0 if there never was one."""
        return self._lived.get((base, role), 0)

    def newly_dead(self, base: str) -> list[str]:
        """Replicas of the base model whose lease has lapsed since the last call."""
        lapsed = [replica.id for replica, _ in self._held.values() if replica.base == base and not self.is_alive(replica.id)]
        news = [name for name in lapsed if name not in self._reported]
        self._reported.update(news)
        return news

    def bury(self, replica: str) -> Replica | None:
        """End its lease; answers what it was, None if it was known to be dead."""
        known, _ = self._held.pop(replica, (None, 0))
        if replica in self._reported:
            self._reported.discard(replica)
            return None
        return known

    def pop_dead(self, before_ms: int) -> list[str]:
        """Forget the replicas whose lease ended at or before the time; answers their ids."""
        dead = [name for name, (_, end_ms) in self._held.items() if end_ms <= before_ms]
        for name in dead:
            del self._held[name]
            self._reported.discard(name)
        return dead

    def clear(self) -> None:
        self._held.clear()
        self._lived.clear()
        self._reported.clear()
