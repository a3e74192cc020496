"""The FastAPI app: routers, the error map and the tenant, over the services that it is given.

Holds no state of its own; any replica of it serves any caller. Starts and stops the reader of the event log with itself.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tinsmith.gateway import errors
from tinsmith.gateway.auth import AuthMiddleware, OpenMode
from tinsmith.gateway.deps import Services
from tinsmith.gateway.tinker import futures, sampling, sessions, training, weights

TINKER_PREFIX = "/api/v1"


def create_app(services: Services) -> FastAPI:
    """The gateway of one process."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.events.start()
        try:
            yield
        finally:
            await services.events.stop()

    app = FastAPI(title="Tinsmith", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    errors.install(app)
    app.add_middleware(AuthMiddleware, authenticator=OpenMode(services.config.gateway))
    app.include_router(sessions.health)
    for routes in (sessions.router, training.router, weights.router, sampling.router, futures.router):
        app.include_router(routes, prefix=TINKER_PREFIX)
    return app
