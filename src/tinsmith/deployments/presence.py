"""The presence of a process in the server: its lease, its inbox, and how it leaves.

A process that is told to drain takes nothing more, hands back what it has, gives up its lease and ends; its deployment starts another in
its place. Serve notices the end of an actor in two ways: by the next health check (each two seconds), or at once where a check is under way
and its caller learns that the actor is gone. So the checks of a draining process wait for its end, and the last one leaves the actor: the
replacement begins within a turn of Serve's control loop (0.1 s). Three failed checks in a row, Serve's other way, would take six seconds.

Knows nothing of what a process does; a worker and a gateway say what handing back means.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec

import ray
from ray.actor import exit_actor

from tinsmith.deployments.wiring import Blueprint, Connection, connect
from tinsmith.protocol.errors import StateContention
from tinsmith.queue.heartbeat import Heartbeat, this_process
from tinsmith.state.events import EventReader, Subscription
from tinsmith.state.inbox import DrainOrder, Message, decode
from tinsmith.state.lanes import Replica, Role, inbox_topic

P = ParamSpec("P")

LISTEN_S = 3600.0  # of one wait for an event; only bounds how long a forgotten task would live
CHECK_S = 5.0  # a health check of a draining process waits for its end; half of Serve's patience with one check

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Use:
    """How a process is: what each renewal tells of it. `num_slots` 0: not bounded."""

    num_used: int = 0
    num_slots: int = 0
    is_healthy: bool = True


class Presence:
    """The lease and the inbox of this process. `look`: how it is; asked in the heartbeat's thread."""

    def __init__(self, connection: Connection, replica: Replica, events: EventReader, look: Callable[[], Use]) -> None:
        self._connection = connection
        self._replica = replica
        self._events = events
        self._look = look
        self._heartbeat: Heartbeat | None = None
        self._inbox: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_draining = False

    @property
    def is_kept(self) -> bool:
        """Whether the lease is being renewed. A store that is away is no fault of this process."""
        return self._heartbeat is not None and self._heartbeat.is_healthy

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def inbox(self) -> asyncio.Task[None] | None:
        """The task that hears orders; it never ends by itself."""
        return self._inbox

    def describe(self) -> Replica:
        """As it is now. Any thread may ask."""
        use = self._look()
        return replace(
            self._replica,
            is_healthy=use.is_healthy,
            is_draining=self._is_draining,
            num_used=use.num_used,
            num_slots=use.num_slots,
        )

    async def begin(
        self,
        blueprint: Blueprint,
        hand_back: Callable[[], Awaitable[None]],
        on_message: Callable[[Message], None],
        *,
        found: Callable[[list[str]], None],
        cut_off: Callable[[], None],
    ) -> None:
        """Take the lease, keep it, and hear the inbox; the events must be read by now.

        hand_back: what a drain does before the lease is given up. on_message: hears whatever is no order to this process. found and
        cut_off hear, in this loop, of lanes without an owner and of renewals that failed. Raises StateContention.
        """
        found(await self._connection.lanes.renew(self.describe()))
        self._heartbeat = _start_heartbeat(blueprint, self.describe, found, cut_off)
        orders = self._events.subscribe(inbox_topic(self._replica.id))
        self._inbox = asyncio.create_task(listen(orders, partial(self._hear, hand_back, on_message), lambda: None))

    def drain(self, hand_back: Callable[[], Awaitable[None]]) -> None:
        """Begin to hand back, once; then give up the lease."""
        if self._draining is None:
            _log.info("draining: nothing more is taken")
            self._is_draining = True
            self._draining = asyncio.create_task(self._drain(hand_back))

    async def leave_if_drained(self) -> None:
        """For health checks: returns at once unless the process drains; then waits for that, and ends the actor (its caller sees it die)
        when it is done."""
        if self._draining is None:
            return
        await asyncio.wait([self._draining], timeout=CHECK_S)
        if self._draining.done():
            exit_actor()

    async def drained(self) -> None:
        """Return when a drain that is under way, if any, has ended."""
        if self._draining is not None:
            await asyncio.wait([self._draining])

    async def end(self) -> None:
        """Give up the lease, so that others need not wait for its end. Idempotent."""
        if self._inbox is not None:
            self._inbox.cancel()
        if self._heartbeat is not None:
            await asyncio.to_thread(self._heartbeat.stop)
        with contextlib.suppress(StateContention):
            await self._connection.lanes.bury(self._replica.id)

    async def _drain(self, hand_back: Callable[[], Awaitable[None]]) -> None:
        """Whatever handing back comes to, the process ends: what it still has goes the way of a dead process's."""
        try:
            await hand_back()
        except StateContention as error:
            _log.warning("drained without the store: %s", error.message)
        finally:
            await self.end()
            _log.info("drained")

    def _hear(self, hand_back: Callable[[], Awaitable[None]], on_message: Callable[[Message], None], texts: list[str]) -> None:
        for text in texts:
            try:
                message = decode(text)
            except ValueError:  # the message stays out of the log: it may hold tokens
                _log.warning("a message that this process cannot read was dropped; do servers of two versions share the store?")
                continue
            if isinstance(message, DrainOrder):
                self.drain(hand_back)
            else:
                on_message(message)


async def listen(subscription: Subscription, hear: Callable[[list[str]], None], resync: Callable[[], None]) -> None:
    """Pass on what the subscription hears, for ever. `resync`: events may have been missed."""
    while True:
        if await subscription.wait(LISTEN_S):
            if subscription.take_resync():
                resync()
            hear(subscription.take())


def new_replica(base: str, role: Role = Role.TRAINER) -> Replica:
    """This process under a fresh id. A node of Ray is one pid namespace."""
    return this_process(uuid.uuid4().hex, base, ray.get_runtime_context().get_node_id(), role)


def of_trainers(*_: list[str]) -> None:
    """News of model lanes, which are no business of a sampler or a gateway."""


def _start_heartbeat(
    blueprint: Blueprint, describe: Callable[[], Replica], found: Callable[[list[str]], None], cut_off: Callable[[], None]
) -> Heartbeat:
    loop = asyncio.get_running_loop()
    heartbeat = Heartbeat(
        lambda: connect(blueprint),
        describe,
        lease_s=blueprint.config.execution.lease_s,
        found=lambda unowned: _call_in(loop, found, unowned),
        cut_off=lambda: _call_in(loop, cut_off),
    )
    heartbeat.start()
    return heartbeat


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(partial(call, *args, **kwargs))
