"""Lanes that can be cut off: every operation then raises StateContention, as a store does that is away."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import Lanes


class CutOff:
    """Any Lanes. `is_away` cuts it off, `away_for` only the operations named; `calls` counts what was asked, `refused` what was not
    answered."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.limits = lanes.limits
        self.is_away = False
        self.away_for: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        operation: Callable[..., Awaitable[Any]] = getattr(self._lanes, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.is_away or name in self.away_for:
                self.refused[name] += 1
                raise StateContention("the store is away")
            return await operation(*args, **kwargs)

        return call
