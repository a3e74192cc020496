"""The janitor deployment: one pass after another over sessions and lanes, by whoever holds the leader's lease.

What a pass does is `lifecycle.sessions`' business; here are its clock and its end.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping

from tinsmith import telemetry
from tinsmith.deployments.wiring import Blueprint, connect
from tinsmith.lifecycle.sessions import SessionSweep
from tinsmith.protocol.errors import StateContention

PASS_S = 5.0  # from pass to pass: how much later than its time-out a silent session may end
LEASE_MS = 20_000  # of the leader: four passes

_log = logging.getLogger(__name__)


class JanitorEnded(RuntimeError):
    """The sweeping task has ended by a defect; Serve starts another replica."""


class Janitor:
    """A replica. Serve awaits `reconfigure` before it counts a replica as running, and `stop` as it stops one."""

    def __init__(self, blueprint: Blueprint) -> None:
        logs = blueprint.config.logs
        telemetry.configure_logging("janitor", format=logs.format, level=logs.level)
        execution = blueprint.config.execution
        connection = connect(blueprint)
        self._store = connection.store
        self._pass_s = min(PASS_S, execution.session_timeout_s / 3)
        self._sweep = SessionSweep(
            connection.store,
            connection.lanes,
            holder=uuid.uuid4().hex,
            timeout_ms=round(execution.session_timeout_s * 1000),
            stuck_ms=round(execution.queue_timeout_s * 1000),
            lease_ms=LEASE_MS,
        )
        self._sweeping: asyncio.Task[None] | None = None

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        self._sweeping = asyncio.create_task(self._run())

    async def check_health(self) -> None:
        """Raises JanitorEnded."""
        if self._sweeping is None or self._sweeping.done():
            raise JanitorEnded("the janitor no longer sweeps; its log says why")

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeping
        await self._store.close()

    async def _run(self) -> None:
        while True:
            try:
                report = await self._sweep.run()
            except StateContention as error:
                _log.warning("nothing was swept: %s", error.message)
            else:
                if report is not None and report.expired:
                    _log.info("ended %d silent sessions", len(report.expired))
            await asyncio.sleep(self._pass_s)
