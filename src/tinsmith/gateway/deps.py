"""What the routes work with. Wired once, by whoever builds the app; nothing here is a global.

Knows the seams (`Store`, `Lanes`) and not what implements them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from tinsmith.config import ServerConfig
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.ids import RequestId, Work
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointRecord
from tinsmith.state.catalog import Catalog
from tinsmith.state.events import EventReader, Waiter
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

    async def current(self) -> StoreInfo:
        """Raises StateContention while the store is away."""
        if self._info is None or self._clock() - self._read_at > IDENTITY_AGE_S:
            return await self.refreshed()
        return self._info

    async def refreshed(self) -> StoreInfo:
        """As the store says now."""
        self._info = await self._store.open()
        self._read_at = self._clock()
        return self._info


class LongPolls:
    """Those that wait in this process. A gateway that stops ends them as the end of their window would: their callers ask again."""

    def __init__(self) -> None:
        self._waiters: set[Waiter] = set()
        self.are_ending = False

    @contextlib.contextmanager
    def hold(self, waiter: Waiter) -> Iterator[None]:
        """Let `end` wake the waiter."""
        self._waiters.add(waiter)
        try:
            yield
        finally:
            self._waiters.discard(waiter)

    def end(self) -> None:
        """Wake all, and let no other wait."""
        self.are_ending = True
        for waiter in self._waiters:
            waiter.wake()


@dataclass(frozen=True)
class Services:
    """`base_models` are those that this server trains and samples, by name."""

    config: ServerConfig
    store: Store
    lanes: Lanes
    events: EventReader
    base_models: Mapping[str, BaseModelInfo]
    catalog: Catalog = field(init=False)
    identity: Identity = field(init=False)
    polls: LongPolls = field(init=False, default_factory=LongPolls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "catalog", Catalog(self.store))
        object.__setattr__(self, "identity", Identity(self.store))

    def base_model(self, name: str) -> BaseModelInfo:
        """Raises NotFound naming what is served."""
        info = self.base_models.get(name)
        if info is None:
            raise NotFound(f"base_model: {name[:200]!r} is not served here; use one of {', '.join(sorted(self.base_models))}")
        return info

    async def checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        """The checkpoint of that path, unless it has expired. Raises ValidationFailed (malformed), NotFound."""
        record = await self.catalog.checkpoint(tenant, path)
        if record.expires_ms is not None and record.expires_ms <= await self.store.now_ms():
            raise NotFound(f"checkpoint {path!r} has expired")
        return record

    async def request_id(self, work: Work, tenant: str, lane: str, seq: int | str) -> str:
        info = await self.identity.current()
        return ids.request_id(work, epoch=info.epoch, secret=info.secret, tenant=tenant, lane=lane, seq=seq)

    async def parse_request_id(self, text: str, tenant: str) -> tuple[RequestId, bool]:
        """The id taken apart, and whether it is of the running epoch. Raises NotFound for one that was never issued to the tenant."""
        info = await self.identity.current()
        parsed = ids.parse_request_id(text, secret=info.secret, tenant=tenant)
        if parsed is None:
            raise unknown_request(text)
        ours = parsed.epoch == info.epoch
        if ours and not parsed.genuine:
            raise unknown_request(text)
        return parsed, ours


def unknown_request(text: str) -> NotFound:
    return NotFound(f"request {text[:100]!r} is unknown")


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


ServicesDep = Annotated[Services, Depends(_services)]
TenantDep = Annotated[str, Depends(_tenant)]
