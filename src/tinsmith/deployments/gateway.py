"""The gateway deployment: each replica serves the HTTP app.

Direct ingress: the deployment has no route; every replica runs uvicorn in its own loop, on the configured address, which the replicas of a
node share (`ports`). So keep-alive, backlog and draining are ours, and a request crosses one process. Behind Serve's proxy
(`ingress: serve`) the same app is what Serve calls. Knows nothing of engines; imports no PyTorch.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from socket import socket

import uvicorn
from fastapi import FastAPI

from tinsmith.deployments.ports import listen_shared
from tinsmith.deployments.wiring import Blueprint, configure_logging, connect
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED

BACKLOG = 4096  # connections that wait to be accepted; the kernel caps it at net.core.somaxconn
KEEP_ALIVE_S = 75  # longer than the pools of common clients keep an idle connection, so that the client closes it first
DRAIN_S = 2  # of running requests, long polls apart: these are answered at once, and clients ask again


class GatewayClosed(RuntimeError):
    """The HTTP server of this replica has ended; Serve starts another replica."""


class Gateway:
    """A replica behind Serve's own proxy: Serve runs the app."""

    def __init__(self, blueprint: Blueprint) -> None:
        configure_logging(blueprint, "gateway")
        self._services = _services(blueprint)
        self._app = create_app(self._services)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


class DirectGateway(Gateway):
    """A replica that listens itself. Serve awaits `reconfigure` before it counts a replica as running, and `stop` as it stops one."""

    def __init__(self, blueprint: Blueprint, port: int) -> None:
        super().__init__(blueprint)
        self._address = (blueprint.config.gateway.host, port)
        self._http: HttpServer | None = None

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Raises PortUnavailable, StateContention."""
        self._http = HttpServer(self._app, listen_shared(*self._address, BACKLOG), self._services.polls.end)
        await self._http.start()

    async def check_health(self) -> None:
        """Raises GatewayClosed."""
        if self._http is None or self._http.has_ended:
            raise GatewayClosed("this gateway no longer listens")
        if not self._services.events.is_reading:
            raise GatewayClosed("this gateway no longer hears of settled requests; its log says why")

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()


class HttpServer:
    """uvicorn, and the app's life span, as a task of the running loop. `ending` is called once a stop has begun."""

    def __init__(self, app: FastAPI, listener: socket, ending: Callable[[], None]) -> None:
        self._app = app
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",  # run here: uvicorn ends the whole process where it fails
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
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

    async def stop(self) -> None:
        """Accept no more, let running requests end within DRAIN_S, close."""
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _services(blueprint: Blueprint) -> Services:
    connection = connect(blueprint)
    return Services(
        config=blueprint.config,
        store=connection.store,
        lanes=connection.lanes,
        events=EventReader(connection.lanes, [SETTLED], store=connection.store),
        base_models={name: model.info for name, model in blueprint.models.items()},
    )
