"""The janitor deployment: one pass after another over sessions and lanes, and less often over artifacts, by whoever holds the leader's
lease.

What a pass does is the business of `lifecycle.sessions` and `lifecycle.artifacts`; here are its clock and its end.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping

from tinsmith.deployments.wiring import Blueprint, configure_logging, connect
from tinsmith.lifecycle.artifacts import ArtifactSweep, min_age_s
from tinsmith.lifecycle.books import BookSweep
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.lifecycle.retention import CatalogSweep
from tinsmith.lifecycle.sessions import SessionSweep
from tinsmith.protocol.errors import StateContention, TinsmithError

PASS_S = 5.0  # from pass to pass: how much later than its time-out a silent session may end
LEASE_MS = 20_000  # of the leader: four passes
ARTIFACT_PASS_S = 600.0  # listing a directory tree of a network file system may take a while

_log = logging.getLogger(__name__)


class JanitorEnded(RuntimeError):
    """The sweeping task has ended by a defect; Serve starts another replica."""


class Janitor:
    """A replica. Serve awaits `reconfigure` before it counts a replica as running, and `stop` as it stops one."""

    def __init__(self, blueprint: Blueprint) -> None:
        configure_logging(blueprint, "janitor")
        execution = blueprint.config.execution
        connection = connect(blueprint)
        self._store = connection.store
        self._pass_s = min(PASS_S, execution.session_timeout_s / 3)
        holder = uuid.uuid4().hex
        self._sweep = SessionSweep(
            connection.store,
            connection.lanes,
            holder=holder,
            timeout_ms=round(execution.session_timeout_s * 1000),
            stuck_ms=round(execution.queue_timeout_s * 1000),
            orphan_ms=round(execution.orphan_s * 1000),
            lease_ms=LEASE_MS,
        )
        checkpoints = Checkpoints.open(blueprint.config.checkpoints)
        self._catalog = CatalogSweep(connection.store, checkpoints, holder=holder, lease_ms=LEASE_MS)
        self._books = BookSweep(connection.store, holder=holder, lease_ms=LEASE_MS)
        self._artifacts = ArtifactSweep(
            connection.store,
            connection.lanes,
            checkpoints,
            holder=holder,
            lease_ms=LEASE_MS,
            min_age_s=min_age_s(execution.timeout_s, blueprint.config.checkpoints.snapshot_engine_s),
        )
        self._sweeping: tuple[asyncio.Task[None], ...] = ()

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Begin to sweep, once."""
        if self._sweeping:
            return
        # Two tasks: a slow disk holds up no session's end.
        self._sweeping = (asyncio.create_task(self._run()), asyncio.create_task(self._run_artifacts()))

    async def check_health(self) -> None:
        """Raises JanitorEnded."""
        if not self._sweeping or any(task.done() for task in self._sweeping):
            raise JanitorEnded("the janitor no longer sweeps; its log says why")

    async def stop(self) -> None:
        for task in self._sweeping:
            task.cancel()
        for task in self._sweeping:
            with contextlib.suppress(asyncio.CancelledError):
                await task
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

    async def _run_artifacts(self) -> None:
        while True:
            await asyncio.sleep(ARTIFACT_PASS_S)
            try:
                num_gone = await self._artifacts.run()
                num_forgotten = await self._catalog.run()
                await self._books.run()
            except (TinsmithError, OSError) as error:
                _log.warning("no artifacts or old sessions were swept: %s", error)
            else:
                if num_gone:
                    _log.info("deleted %d artifacts that nobody named any more", num_gone)
                if num_forgotten:
                    _log.info("forgot %d sessions that ended long ago", num_forgotten)
