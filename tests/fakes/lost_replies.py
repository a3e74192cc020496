"""Lanes whose replies get lost: the operation is carried out, its answer is thrown away and it is sent again, as a client library does."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tinsmith.state.lanes import Lanes

# A take from a pool names nothing that a second call could be told from the first by; whoever resends it must mark it (a nonce).
_NOT_REPEATED = frozenset({"pool_take"})


class LostReplies:
    """Any Lanes, with every reply lost with the given chance; `num_lost` counts them."""

    def __init__(self, lanes: Lanes, chance: float, source: random.Random) -> None:
        self._lanes = lanes
        self._chance = chance
        self._source = source
        self.limits = lanes.limits
        self.num_lost = 0

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        operation: Callable[..., Awaitable[Any]] = getattr(self._lanes, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name not in _NOT_REPEATED and self._source.random() < self._chance:
                self.num_lost += 1
                await _ignore_answer(operation(*args, **kwargs))
            return await operation(*args, **kwargs)

        return call


async def _ignore_answer(operation: Awaitable[Any]) -> None:
    try:
        await operation
    except Exception:  # noqa: BLE001 - an error is an answer too, and it is lost like any other
        return
