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
from tinsmith.gateway.auth import Authenticator, Caller, OpenMode
from tinsmith.gateway.keys import KeyAuthenticator
from tinsmith.gateway.rendering import Renderers
from tinsmith.gateway.streams import Streams
from tinsmith.gateway.tokens import PURPOSE, Tokens
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound, Unauthenticated
from tinsmith.protocol.ids import RequestId, WorkKind
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointRecord
from tinsmith.queue.limits import Budgets
from tinsmith.state.catalog import Catalog
from tinsmith.state.events import EventReader
from tinsmith.state.key_file import keyring_of
from tinsmith.state.keyring import Keyring
from tinsmith.state.lanes import Lanes
from tinsmith.state.publications import Publications
from tinsmith.state.signing_keys import SigningKeys
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
    artifacts: Checkpoints = field(init=False)
    publications: Publications = field(init=False)
    polls: LongPolls = field(init=False, default_factory=LongPolls)
    keyring: Keyring = field(init=False)
    tokens: Tokens | None = field(init=False)
    authenticator: Authenticator = field(init=False)

    def __post_init__(self) -> None:
        auth = self.config.auth
        object.__setattr__(self, "keyring", keyring_of(auth, self.store))
        tokens = Tokens(SigningKeys(self.store, PURPOSE), auth.jwt_life_s) if auth.has_tokens else None
        object.__setattr__(self, "tokens", tokens)
        with_keys = KeyAuthenticator(self.keyring, tokens)
        object.__setattr__(self, "authenticator", OpenMode(self.config.gateway) if auth.mode == "open" else with_keys)
        object.__setattr__(self, "catalog", Catalog(self.store))
        object.__setattr__(self, "identity", Identity(self.store))
        object.__setattr__(self, "budgets", Budgets(self.store, self.config.limits))
        object.__setattr__(self, "artifacts", Checkpoints.open(self.config.checkpoints))
        object.__setattr__(self, "publications", Publications(self.store))

    def base_model(self, name: str) -> BaseModelInfo:
        """Raises NotFound naming what is served."""
        info = self.base_models.get(name)
        if info is None:
            raise NotFound(f"base_model: {name[:200]!r} is not served here; use one of {', '.join(sorted(self.base_models))}")
        return info

    async def checkpoint(self, tenant: str, path: str, *, field: str) -> CheckpointRecord:
        """The checkpoint of that path, the tenant's own or one that its owner has published, unless it has expired. `field`: as in
        `Catalog.checkpoint`. Raises ValidationFailed (malformed), NotFound."""
        try:
            return await self.own_checkpoint(tenant, path, field=field)
        except NotFound:
            published = await self._published(path)
            if published is None:
                raise
            return published

    async def own_checkpoint(self, tenant: str, path: str, *, field: str) -> CheckpointRecord:
        """As `checkpoint`, of the tenant's own alone."""
        record = await self.catalog.checkpoint(tenant, path, field=field)
        if not await self._is_kept(record):
            raise NotFound(f"checkpoint {path!r} has expired; load another, and save with a longer time to live")
        return record

    async def _published(self, path: str) -> CheckpointRecord | None:
        publication = await self.publications.find(path)
        if publication is None:
            return None
        try:
            record = await self.catalog.checkpoint(publication.tenant, path)
        except NotFound:
            return None
        return record if publication.covers(record) and await self._is_kept(record) else None

    async def _is_kept(self, record: CheckpointRecord) -> bool:
        return record.expires_ms is None or record.expires_ms > await self.store.now_ms()

    async def tenant_of_key(self, text: str) -> str | None:
        """Whose API key (or token) this is; None for one that would be refused. Raises StateContention while the store is away."""
        try:
            return (await self.authenticator.caller_of(text)).tenant
        except Unauthenticated:
            return None

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


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


ServicesDep = Annotated[Services, Depends(_services)]
TenantDep = Annotated[str, Depends(_tenant)]
CallerDep = Annotated[Caller, Depends(_caller)]
