"""What the gateway tells of its requests: counts and times by route template, and the span that a trace enters the server by.

Sees of a request its method, its route and the header `traceparent`, never another header, a query or a body. A path that is no route
counts as "other", so that callers cannot make up label values.
"""

import time
from typing import Final

from fastapi import APIRouter, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith import telemetry
from tinsmith.gateway.deps import ServicesDep
from tinsmith.protocol.errors import NotFound

METRICS_PATH = "/metrics"
OTHER = "other"
EXPOSITION_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus' text format
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UNANSWERED = "500"  # an exception that left the app; the server above answers for it

router = APIRouter(include_in_schema=False)


@router.get(METRICS_PATH)
async def metrics(services: ServicesDep) -> Response:
    """Everything that this node measures, for Prometheus. Raises NotFound where metrics are off."""
    if services.exposition is None or not services.config.telemetry.metrics:
        raise NotFound(f"{METRICS_PATH!r} is off here; set telemetry.metrics")
    return Response(await services.exposition(), media_type=EXPOSITION_TYPE)


class ObservingMiddleware:
    """Outside of everything else, so that refusals count too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        status, began = _UNANSWERED, time.monotonic()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        with telemetry.traced(telemetry.SPAN_REQUEST, Headers(scope=scope).get("traceparent", ""), method=method) as traced:
            try:
                await self._app(scope, receive, note_status)
            finally:
                route = _template(scope)
                traced.note(route=route, status=status)
                telemetry.count(telemetry.HTTP_REQUESTS, route=route, method=method, status=status)
                telemetry.observe(telemetry.HTTP_REQUEST, time.monotonic() - began, route=route, method=method)


def _template(scope: Scope) -> str:
    """The path of the route that the request came to, its parameters unfilled. The router leaves it in the scope."""
    template: str = getattr(scope.get("route"), "path", OTHER)
    return template
