"""An id for every HTTP request: in the answer's header, in the payload of an error, and in each log line that the request causes."""

import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith import telemetry

HEADER = "x-request-id"


class RequestIds:
    """Outermost of the app's own middleware, so that refusals before any route have an id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with telemetry.bound_request(request_id):
            await self._app(scope, receive, send_named)


def request_id_of(scope: Scope) -> str:
    """The id of the request that the scope belongs to."""
    request_id: str = scope["state"]["request_id"]
    return request_id
