"""What tenants used, in buckets of an hour: tokens trained, prefilled and sampled, checkpoints saved, and bytes stored.

Amounts of commands are added in the step that settles them (`protocol.futures.Tally`), so each counts once: a resend is the same command, a
replay settles nothing, and a command that failed has no amount. An amount belongs to the hour in which its command was settled. Stored
bytes are measured once an hour and stand for that hour. Knows of no prices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tinsmith.protocol.futures import SampledTokens, Tally
from tinsmith.state.days import DAY_HOURS, day_of, day_table, hour_of
from tinsmith.state.store import Store

KEPT_DAYS = 90


class UsageKind(StrEnum):
    """What is counted; each in its own unit."""

    TRAINING = "training"  # tokens of forward and backward passes
    SAMPLING = "sampling"  # tokens drawn
    PREFILL = "prefill"  # tokens of prompts that were computed
    CACHED_PREFILL = "cached_prefill"  # tokens of prompts that came from a cache
    CHECKPOINT = "checkpoint"  # checkpoints saved


@dataclass(frozen=True, slots=True)
class Used:
    """One sum. `hour` is counted from 1970 UTC."""

    hour: int
    kind: UsageKind
    session_id: str
    base_model: str
    amount: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that the checkpoints of one base model took in an hour."""

    hour: int
    base_model: str
    num_bytes: int


def tallies(tenant: str, session_id: str, base_model: str, amounts: Mapping[UsageKind, int]) -> tuple[Tally, ...]:
    """What a command adds to the sums; nothing for an amount of 0."""
    return tuple(Tally(_used_table(tenant), f"{kind}/{session_id}/{base_model}", amount) for kind, amount in amounts.items() if amount > 0)


def amounts_of(sampled: SampledTokens) -> dict[UsageKind, int]:
    return {
        UsageKind.PREFILL: sampled.num_prompt - sampled.num_cached,
        UsageKind.CACHED_PREFILL: sampled.num_cached,
        UsageKind.SAMPLING: sampled.num_drawn,
    }


class UsageBook:
    """One tenant's sums. Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._used, self._stored = _used_table(tenant), f"{tenant}/stored"

    async def used(self, first_hour: int, end_hour: int) -> list[Used]:
        """Of the hours from `first_hour` to before `end_hour`, in no order."""
        rows = [_used(name, amount) for name, amount in await self._rows(self._used, first_hour, end_hour)]
        return [used for used in rows if first_hour <= used.hour < end_hour]

    async def stored(self, first_hour: int, end_hour: int) -> list[Stored]:
        """As `used`."""
        rows = [_stored(name, amount) for name, amount in await self._rows(self._stored, first_hour, end_hour)]
        return [stored for stored in rows if first_hour <= stored.hour < end_hour]

    async def is_measured(self, now_ms: int) -> bool:
        """Whether `measure` was called in this hour."""
        held = await self._store.get(self._stored, str(day_of(now_ms)))
        return held is not None and int(held.value) >= hour_of(now_ms)

    async def measure(self, bytes_by_base: Mapping[str, int], now_ms: int) -> None:
        """Note what is stored in this hour. Idempotent within it."""
        day, hour = day_of(now_ms), hour_of(now_ms)
        for base_model, num_bytes in bytes_by_base.items():
            await self._store.put(day_table(self._stored, day), f"{hour}/{base_model}", b"%d" % num_bytes)
        await self._store.put(self._stored, str(day), b"%d" % hour)

    async def trim(self, today: int) -> None:
        """Delete the days that are too old."""
        for table in (self._used, self._stored):
            for day in [int(name) for name in await self._store.list(table) if int(name) <= today - KEPT_DAYS]:
                for name in await self._store.list(day_table(table, day)):
                    await self._store.delete(day_table(table, day), name)
                await self._store.delete(table, str(day))

    async def _rows(self, table: str, first_hour: int, end_hour: int) -> Iterable[tuple[str, int]]:
        rows: list[tuple[str, int]] = []
        for day in range(first_hour // DAY_HOURS, (end_hour - 1) // DAY_HOURS + 1):
            rows += [(name, int(held.value)) for name, held in (await self._store.list(day_table(table, day))).items()]
        return rows


def _used_table(tenant: str) -> str:
    return f"{tenant}/used"


def _used(name: str, amount: int) -> Used:
    hour, kind, session_id, base_model = name.split("/", 3)
    return Used(int(hour), UsageKind(kind), session_id, base_model, amount)


def _stored(name: str, num_bytes: int) -> Stored:
    hour, base_model = name.split("/", 1)
    return Stored(int(hour), base_model, num_bytes)
