"""Answers of a look-up, remembered for a moment: what is asked for with every request is read once in a while.

What was not there is remembered too, apart from what was, so that who asks for made-up ids pushes out nothing that others need. Knows
nothing of what is looked up.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

KEPT_S = 2.0  # what was changed or revoked elsewhere counts here after this time at the latest
MAX_KEPT = 4096  # answers of each sort

V = TypeVar("V")


class Recent(Generic[V]):
    """One look-up. Its errors pass through and are not remembered."""

    def __init__(self, look_up: Callable[[str], Awaitable[V | None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look_up = look_up
        self._clock = clock
        self._found: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._absent: OrderedDict[str, tuple[float, None]] = OrderedDict()

    async def get(self, id: str) -> V | None:
        """As it is, or was at most `KEPT_S` ago."""
        held = self._found.get(id) or self._absent.get(id)
        asked_at = self._clock()
        if held is not None and asked_at - held[0] < KEPT_S:
            return held[1]
        self.forget(id)
        value = await self._look_up(id)
        if value is None:
            _keep(self._absent, id, (asked_at, None))
        else:
            _keep(self._found, id, (asked_at, value))
        return value

    def forget(self, id: str) -> None:
        """Ask again next time."""
        self._found.pop(id, None)
        self._absent.pop(id, None)


K = TypeVar("K")


def _keep(answers: OrderedDict[str, K], id: str, answer: K) -> None:
    answers[id] = answer
    while len(answers) > MAX_KEPT:
        answers.popitem(last=False)
