"""The FastAPI app: routers, the error maps and the tenant, over the services that it is given.

Holds no state of its own; any replica of it serves any caller. Starts and stops the reader of the event log with itself.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from tinsmith.gateway import errors, health, observing
from tinsmith.gateway.auth import AuthMiddleware, OpenMode
from tinsmith.gateway.deps import Services
from tinsmith.gateway.native import documents, service, streams, tasks
from tinsmith.gateway.native import models as native_models
from tinsmith.gateway.native import sampling as native_sampling
from tinsmith.gateway.native import sessions as native_sessions
from tinsmith.gateway.native import training as native_training
from tinsmith.gateway.request_ids import RequestIds
from tinsmith.gateway.tinker import futures, sampling, sessions, training, weights
from tinsmith.protocol import native

TINKER_PREFIX = "/api/v1"
TINKER_ROUTES = (sessions.router, training.router, weights.router, sampling.router, futures.router)
NATIVE_ROUTES = (
    service.router,
    native_sessions.router,
    native_models.router,
    native_training.router,
    native_sampling.router,
    streams.router,
    tasks.router,
)


def create_app(services: Services) -> FastAPI:
    """The gateway of one process."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.events.start()
        try:
            yield
        finally:
            await services.events.stop()

    app = FastAPI(title="Tinsmith", version=version("tinsmith"), lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    errors.install(app)
    app.add_middleware(AuthMiddleware, authenticator=OpenMode(services.config.gateway))
    app.add_middleware(observing.ObservingMiddleware)
    app.add_middleware(RequestIds)
    for routes in (observing.router, health.router):
        app.include_router(routes)
    for routes in TINKER_ROUTES:
        app.include_router(routes, prefix=TINKER_PREFIX, include_in_schema=False)
    for routes in NATIVE_ROUTES:
        app.include_router(routes, prefix=native.PREFIX, tags=["native"])
    documents.install(app)
    return app
