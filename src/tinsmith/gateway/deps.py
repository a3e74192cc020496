"""What the routes work with. Wired once, by whoever builds the app; nothing here is a global.

Knows the seams (`Store`, `Lanes`) and not what implements them.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Depends, Request

from tinsmith import telemetry
from tinsmith.config import ServerConfig
from tinsmith.gateway.rendering import Renderers
from tinsmith.gateway.streams import Streams
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.ids import RequestId, WorkKind
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointRecord
from tinsmith.queue.limits import Budgets
from tinsmith.state.catalog import Catalog
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import Lanes
from tinsmith.state.store import Store, StoreInfo

IDENTITY_AGE_S = 1.0  # a store that was emptied is noticed within this time, at one small read a second


class Identity:
    """Epoch and secret of the store, re-read when older than a second: another process may have emptied it."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._info: StoreInfo | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[StoreInfo] | None = None

    async def current(self) -> StoreInfo:
        """One read serves all that wait for it. Raises StateContention while the store is away."""
        if self._info is not None and self._clock() - self._read_at <= IDENTITY_AGE_S:
            return self._info
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.refreshed())
            self._reading.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # heard, if nobody waits
        return await asyncio.shield(self._reading)

    async def refreshed(self) -> StoreInfo:
        """As the store says now."""
        self._info = await self._store.open()
        self._read_at = self._clock()
        return self._info


class Sleeper(Protocol):
    """Whoever waits for a request of this process."""

    def wake(self) -> None: ...


class LongPolls:
    """Those that wait in this process, streams included. A gateway that stops ends them as the end of their window would: their callers
    ask again."""

    def __init__(self) -> None:
        self._waiters: set[Sleeper] = set()
        self.are_ending = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @contextlib.contextmanager
    def hold(self, waiter: Sleeper) -> Iterator[None]:
        """Let `end` wake the waiter."""
        self._waiters.add(waiter)
        telemetry.gauge(telemetry.LONG_POLLS_WAITING, len(self._waiters))
        try:
            yield
        finally:
            self._waiters.discard(waiter)
            telemetry.gauge(telemetry.LONG_POLLS_WAITING, len(self._waiters))

    def end(self) -> None:
        """Wake all, and let no other wait."""
        self.are_ending = True
        for waiter in self._waiters:
            waiter.wake()


@dataclass(frozen=True)
class Services:
    """`base_models` are those that this server trains and samples, by name. `exposition` answers the metrics of this node, as text.
    `process_id`: under which this gateway has its lease."""

    config: ServerConfig
    store: Store
    lanes: Lanes
    events: EventReader
    base_models: Mapping[str, BaseModelInfo]
    exposition: Callable[[], Awaitable[bytes]] | None = None
    process_id: str = ""
    renderers: Renderers = field(default_factory=Renderers)
    streams: Streams = field(default_factory=Streams)
    catalog: Catalog = field(init=False)
    identity: Identity = field(init=False)
    budgets: Budgets = field(init=False)
    polls: LongPolls = field(init=False, default_factory=LongPolls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "catalog", Catalog(self.store))
        object.__setattr__(self, "identity", Identity(self.store))
        object.__setattr__(self, "budgets", Budgets(self.store, self.config.limits))

    def base_model(self, name: str) -> BaseModelInfo:
        """Raises NotFound naming what is served."""
        info = self.base_models.get(name)
        if info is None:
            raise NotFound(f"base_model: {name[:200]!r} is not served here; use one of {', '.join(sorted(self.base_models))}")
        return info

    async def checkpoint(self, tenant: str, path: str, *, field: str) -> CheckpointRecord:
        """The checkpoint of that path, unless it has expired. `field`: as in `Catalog.checkpoint`. Raises ValidationFailed (malformed),
        NotFound."""
        record = await self.catalog.checkpoint(tenant, path, field=field)
        if record.expires_ms is not None and record.expires_ms <= await self.store.now_ms():
            raise NotFound(f"checkpoint {path!r} has expired; load another, and save with a longer time to live")
        return record

    async def request_id(self, work: WorkKind, tenant: str, lane: str, seq: int | str) -> str:
        info = await self.identity.current()
        return ids.request_id(work, epoch=info.epoch, secret=info.secret, tenant=tenant, lane=lane, seq=seq)

    async def parse_request_id(self, text: str, tenant: str) -> tuple[RequestId, bool]:
        """The id taken apart, and whether it is of the running epoch. Raises NotFound for one that was never issued to the tenant."""
        info = await self.identity.current()
        parsed = ids.parse_request_id(text, secret=info.secret, tenant=tenant)
        if parsed is None:
            raise unknown_request(text)
        ours = parsed.epoch == info.epoch
        if ours and not parsed.is_genuine:
            raise unknown_request(text)
        return parsed, ours


def unknown_request(text: str) -> NotFound:
    return NotFound(f"request {text[:100]!r} is unknown; use the id that its submit answered")


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


ServicesDep = Annotated[Services, Depends(_services)]
TenantDep = Annotated[str, Depends(_tenant)]
