"""Leased units and token buckets in memory: the arithmetic of `Store.reserve` and `Store.spend`. Knows nothing of what they bound."""

import math
from dataclasses import dataclass

_ROUNDING = 1e-9  # who has waited as long as the answer said is served


@dataclass(slots=True)
class _Bucket:
    """`level` as it was at `at_ms`; it fills on its own. `full_ms`: when it is as one that was never used."""

    level: float
    at_ms: int
    full_ms: int


class MemoryQuotas:
    """Quotas and buckets by name; the times are the caller's clock in ms."""

    def __init__(self) -> None:
        self._units: dict[str, dict[str, int]] = {}  # quota -> holder -> end of its lease
        self._buckets: dict[str, _Bucket] = {}

    def reserve(self, quota: str, holder: str, *, limit: int, ttl_ms: int, now_ms: int) -> bool:
        units = {name: end_ms for name, end_ms in self._units.pop(quota, {}).items() if end_ms > now_ms}
        may_have = holder in units or len(units) < limit
        if may_have:
            units[holder] = now_ms + ttl_ms
        if units:
            self._units[quota] = units
        return may_have

    def unreserve(self, quota: str, holder: str) -> None:
        units = self._units.get(quota, {})
        units.pop(holder, None)
        if not units:
            self._units.pop(quota, None)

    def spend(self, budget: str, amount: float, *, per_s: float, burst: float, now_ms: int) -> int:
        self._forget_full(now_ms)
        held = self._buckets.get(budget)
        level = burst if held is None else min(burst, held.level + (now_ms - held.at_ms) * per_s / 1000)
        amount = min(amount, burst)
        if level + _ROUNDING < amount:
            return max(1, math.ceil((amount - level) / per_s * 1000))
        level = max(0.0, level - amount)
        self._buckets[budget] = _Bucket(level, now_ms, full_ms=now_ms + math.ceil((burst - level) / per_s * 1000))
        return 0

    def clear(self) -> None:
        self._units.clear()
        self._buckets.clear()

    def _forget_full(self, now_ms: int) -> None:
        """A bucket that has filled up again need not be kept."""
        for budget in [name for name, bucket in self._buckets.items() if bucket.full_ms <= now_ms]:
            del self._buckets[budget]
