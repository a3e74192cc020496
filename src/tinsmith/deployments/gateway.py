"""The gateway deployment: each replica serves the HTTP app.

Direct ingress: the deployment has no route; every replica runs uvicorn in its own loop, on the configured address, which the replicas of a
node share (`ports`). So keep-alive, backlog and draining are ours, and a request crosses one process. Behind Serve's proxy
(`ingress: serve`) the same app is what Serve calls. Knows nothing of engines; imports no PyTorch.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from socket import socket
from typing import cast

import uvicorn
from fastapi import FastAPI

from tinsmith.deployments.observation import exposition_of
from tinsmith.deployments.ports import listen_shared
from tinsmith.deployments.presence import Presence, Use, new_replica, of_trainers
from tinsmith.deployments.request_heads import BoundedHeads
from tinsmith.deployments.tls import Tls, tls_of
from tinsmith.deployments.wiring import Blueprint, Connection, configure_logging, connect
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import GATEWAYS, SETTLED, Role, inbox_topic

BACKLOG = 4096  # connections that wait to be accepted; the kernel caps it at net.core.somaxconn
KEEP_ALIVE_S = 75  # longer than the pools of common clients keep an idle connection, so that the client closes it first
STOP_S = 2  # of running requests at the server's end, long polls apart: these are answered at once, and clients ask again
FINISH_S = 60  # of running requests in a drain
LINGER_S = 2.0  # of idle connections in a drain: whoever uses one meanwhile is answered, and told to come back on another
MISSES = 3  # of health checks, after which Serve takes a replica out of its routes
_TICK_S = 0.05


class GatewayClosed(RuntimeError):
    """This replica no longer serves; Serve starts another one."""


class Gateway:
    """A replica behind Serve's own proxy: Serve runs the app, and takes a replica out of its routes that failed three checks in a row.
    Serve awaits `reconfigure` before it counts a replica as running."""

    def __init__(self, blueprint: Blueprint) -> None:
        configure_logging(blueprint, "gateway")
        self._blueprint = blueprint
        connection, replica = connect(blueprint), new_replica(GATEWAYS, Role.GATEWAY)
        self._services = _services(blueprint, connection, replica.id)
        self._app = create_app(self._services)
        polls = self._services.polls
        self._presence = Presence(connection, replica, self._services.events, lambda: Use(polls.num_waiting))
        self._num_refused_checks = 0

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Take the lease, once. Raises StateContention."""
        await self._services.events.start()
        if not self._presence.is_kept:
            await self._begin()

    async def check_health(self) -> None:
        """Raises GatewayClosed."""
        if self._presence.is_draining:
            self._num_refused_checks += 1
            if self._num_refused_checks == MISSES:  # Serve sends nothing more here; those that wait ask another replica
                self._services.polls.end()
            raise GatewayClosed("this gateway is drained")
        self._check_parts()

    async def stop(self) -> None:
        self._services.polls.end()
        await self._presence.end()

    async def _begin(self) -> None:
        await self._presence.begin(self._blueprint, self._hand_back, self._services.streams.hear, found=of_trainers, cut_off=of_trainers)

    async def _hand_back(self) -> None:
        """Serve's proxy decides when no more requests come."""

    def _check_parts(self) -> None:
        inbox = self._presence.inbox
        if not self._services.events.is_reading or inbox is None or inbox.done():
            raise GatewayClosed("this gateway no longer hears of settled requests; its log says why")
        if not self._presence.is_kept:
            raise GatewayClosed("nothing renews the lease")


class DirectGateway(Gateway):
    """A replica that listens itself. Serve awaits `reconfigure` before it counts a replica as running, and `stop` as it stops one."""

    def __init__(self, blueprint: Blueprint, port: int) -> None:
        super().__init__(blueprint)
        self._address = (blueprint.config.gateway.host, port)
        self._tls = tls_of(blueprint.config.gateway)
        self._http: HttpServer | None = None

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Listen and take the lease, once. Raises PortUnavailable, StateContention."""
        if self._http is not None and not self._http.has_ended:
            return
        self._http = HttpServer(self._app, listen_shared(*self._address, BACKLOG), self._services.polls.end, self._tls)
        await self._http.start()
        await self._begin()

    async def check_health(self) -> None:
        """Raises GatewayClosed; ends the actor of one that is drained."""
        await self._presence.leave_if_drained()
        if self._presence.is_draining:
            return
        if self._http is None or self._http.has_ended:
            raise GatewayClosed("this gateway no longer listens")
        self._check_parts()

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()
        await self._presence.end()

    async def _hand_back(self) -> None:
        if self._http is not None:
            await self._http.drain()


class HttpServer:
    """uvicorn, and the app's life span, as a task of the running loop. `ending` is called once a stop has begun. `tls`: None for http."""

    def __init__(self, app: FastAPI, listener: socket, ending: Callable[[], None], tls: Tls | None = None) -> None:
        self._app = app
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedHeads,
                lifespan="off",  # run here: uvicorn ends the whole process where it fails
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
                ssl_certfile=None if tls is None else tls.cert,
                ssl_keyfile=None if tls is None else tls.key,
            ),
            ending,
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._serving is None or self._serving.done()

    async def start(self) -> None:
        """Return when requests are accepted. Raises what the app's start raises."""
        self._serving = asyncio.create_task(self._serve())
        accepting = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait({self._serving, accepting}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            accepting.cancel()
            await self._serving

    async def drain(self) -> None:
        """As `stop`, without loss for callers while siblings listen on the same address: what waits to be accepted is served, idle
        connections may be used once more, running requests have FINISH_S."""
        if not self.has_ended:
            await self._server.drain(self._listener)
        await self.stop()

    async def stop(self) -> None:
        """Accept no more, let running requests end within STOP_S, close."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    async def _serve(self) -> None:
        with self._listener:
            async with self._app.router.lifespan_context(self._app):
                await self._server.serve(sockets=[self._listener])


class _Server(uvicorn.Server):
    """uvicorn in a process whose signals are not its own, with an event for the moment in which it accepts."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        # In the next turn of the loop every connection knows that its running request is the last, and says so in the answer.
        asyncio.get_running_loop().call_soon(self._ending)
        await super().shutdown(sockets)

    async def drain(self, listener: socket) -> None:
        """Accept no more; answer each request as the last of its connection; return when no connection is left, or after LINGER_S.

        A listener that is closed resets the connections that wait to be accepted. So they are accepted first, and nothing runs between
        the last of them and the close. What arrives on the wire in that moment, its handshake unfinished, is reset all the same, unless
        the kernel hands it to a sibling (net.ipv4.tcp_migrate_req=1).
        """
        waiting = _accept_all(listener)
        for server in self.servers:
            server.close()
        last = (b"connection", b"close")
        self.config.encoded_headers.append(last)
        self.server_state.default_headers = [*self.server_state.default_headers, last]
        self.config.timeout_graceful_shutdown = FINISH_S
        loop = asyncio.get_running_loop()
        self._ending()
        for connection in waiting:
            await loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        deadline = loop.time() + LINGER_S
        while self.server_state.connections and loop.time() < deadline:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(_TICK_S)

    def _protocol(self) -> asyncio.Protocol:
        kind = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _accept_all(listener: socket) -> list[socket]:
    """Every connection that waits at the listener."""
    waiting: list[socket] = []
    while True:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return waiting
        connection.setblocking(False)
        waiting.append(connection)


def _services(blueprint: Blueprint, connection: Connection, process_id: str) -> Services:
    return Services(
        config=blueprint.config,
        store=connection.store,
        lanes=connection.lanes,
        events=EventReader(connection.lanes, [SETTLED, inbox_topic(process_id)], store=connection.store),
        base_models={name: model.info for name, model in blueprint.models.items()},
        exposition=exposition_of(blueprint.metrics_dir, connection.lanes, connection.store.now_ms, blueprint.models),
        process_id=process_id,
    )
