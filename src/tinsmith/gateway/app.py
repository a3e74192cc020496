"""The FastAPI app: routers, the error maps and the tenant, over the services that it is given.

Holds no state of its own; any replica of it serves any caller. Starts and stops the reader of the event log with itself.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

from tinsmith.gateway import downloads, errors, health, observing
from tinsmith.gateway.auth import AuthMiddleware
from tinsmith.gateway.deps import Services
from tinsmith.gateway.native import documents, service, streams, tasks
from tinsmith.gateway.native import models as native_models
from tinsmith.gateway.native import sampling as native_sampling
from tinsmith.gateway.native import sessions as native_sessions
from tinsmith.gateway.native import training as native_training
from tinsmith.gateway.openai import chat, completions
from tinsmith.gateway.openai import errors as openai_errors
from tinsmith.gateway.openai import models as openai_models
from tinsmith.gateway.request_ids import RequestIds
from tinsmith.gateway.tinker import (
    accounts,
    custom_losses,
    exports,
    futures,
    pollers,
    reports,
    runs,
    sampling,
    session_admin,
    sessions,
    traces,
    training,
    weights,
)
from tinsmith.gateway.tinker import checkpoints as tinker_checkpoints
from tinsmith.protocol import native

TINKER_PREFIX = "/api/v1"
TINKER_ROUTES = (
    accounts.router,
    sessions.router,
    session_admin.router,
    training.router,
    custom_losses.router,
    weights.router,
    sampling.router,
    futures.router,
    pollers.router,
    runs.router,
    tinker_checkpoints.router,
    exports.router,
    reports.router,
    traces.router,
    traces.downloads,
    downloads.router,
)
NATIVE_ROUTES = (
    service.router,
    native_sessions.router,
    native_models.router,
    native_training.router,
    native_sampling.router,
    streams.router,
    tasks.router,
)
OPENAI_ROUTES = (openai_models.router, completions.router, chat.router)


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
    app.add_middleware(AuthMiddleware, authenticator=services.authenticator)
    app.add_middleware(observing.ObservingMiddleware)
    app.add_middleware(RequestIds)
    app.router.routes.extend(_routes())
    documents.install(app)
    return app


@cache
def _routes() -> tuple[BaseRoute, ...]:
    """Of every app: they know no services, and building them takes as long as tens of requests."""
    router = APIRouter()
    for routes in (observing.router, health.router):
        router.include_router(routes)
    for routes in TINKER_ROUTES:
        router.include_router(routes, prefix=TINKER_PREFIX, include_in_schema=False)
    for routes in OPENAI_ROUTES:
        router.include_router(routes, prefix=openai_errors.PREFIX, include_in_schema=False)
    for routes in NATIVE_ROUTES:
        router.include_router(routes, prefix=native.PREFIX, tags=["native"])
    return tuple(router.routes)
