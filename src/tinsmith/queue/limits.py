"""What a tenant may ask for in a second: requests and tokens, over the whole cluster.

Knows the store and the configured rates; nothing of HTTP, lanes or models. A rate of 0 is off, and then no store is asked. What a budget
holds after a pause is two seconds' worth of its rate, and at least one request.
"""

from math import ceil

from tinsmith.config import LimitConfig
from tinsmith.protocol.errors import RateLimited
from tinsmith.state.store import Store

BURST_S = 2.0


class Budgets:
    """The budgets of all tenants."""

    def __init__(self, store: Store, config: LimitConfig) -> None:
        self._store = store
        self._config = config

    async def admit(self, tenant: str, tokens: int) -> None:
        """Pay for one request with that many tokens. Raises RateLimited, StateContention."""
        requests_per_s, tokens_per_s = self._config.requests_per_s, self._config.tokens_per_s
        await self._spend(f"requests:{tenant}", 1.0, requests_per_s, max(1.0, BURST_S * requests_per_s), "requests")
        if tokens > 0:
            await self._spend(f"tokens:{tenant}", float(tokens), tokens_per_s, BURST_S * tokens_per_s, "tokens")

    async def _spend(self, budget: str, amount: float, per_s: float, burst: float, what: str) -> None:
        if per_s == 0:
            return
        wait_ms = await self._store.spend(budget, amount, per_s=per_s, burst=burst)
        if wait_ms > 0:
            retry_after_s = wait_ms / 1000
            raise RateLimited(f"more than {per_s:g} {what} a second; send it again in {ceil(retry_after_s)} s", retry_after_s)
