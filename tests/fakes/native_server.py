"""A native server without a network: reads each request as the protocol's class, and answers what a test scripted, or what is usual.

`NativeServer.transport` goes into a client; `calls` is what arrived, in order, refused tries included.
"""

import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tinsmith.protocol.envelopes import ErrorPayload, TaskEnvelope
from tinsmith.protocol.errors import TinsmithError
from tinsmith.protocol.native import PREFIX, REQUESTS, RESULTS, StrictRequest

URL = "http://server.test:8700"
KINDS = {kind.path: kind for kind in REQUESTS}
USUAL: dict[str, dict[str, Any]] = {
    "/create_session": {"session_id": "session-1", "created_ms": 1},
    "/heartbeat": {},
    "/end_session": {},
    "/create_sampler": {"sampler_id": "sampler-1", "base_model": "org/tiny"},
    "/unload_model": {},
    "/cancel": {"cancelled": True, "state": "cancelled"},
}
RESULT: dict[str, dict[str, Any]] = {
    "/create_model": {"model_id": "model-1"},
    "/forward": {"metrics": {"loss:sum": 1.0}},
    "/forward_backward": {"metrics": {"loss:sum": 1.0}},
    "/train_step": {"metrics": {"loss:sum": 1.0}},
    "/evaluate": {"metrics": {"loss:sum": 1.0}},
    "/optim_step": {"metrics": {"unclipped_grad_l2:mean": 2.0}},
    "/save_weights": {"checkpoint": "tinker://model-1/weights/a"},
    "/load_weights": {"model_id": "model-1", "checkpoint": "tinker://model-1/weights/a"},
    "/publish_sampler_weights": {"sampler_id": "sampler-2"},
    "/sample": {"sequences": [{"tokens": [5], "logprobs": [-1.0], "stop_reason": "length"}]},
}
Reply = httpx.Response | Exception | Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class Call:
    """`request` is None for a GET."""

    method: str
    path: str
    headers: httpx.Headers
    body: bytes
    request: StrictRequest | None

    @property
    def seq_id(self) -> int:
        return int(json.loads(self.body)["seq_id"])


@dataclass
class NativeServer:
    calls: list[Call] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # that the client took between tries
    _scripts: dict[str, deque[Reply]] = field(default_factory=lambda: defaultdict(deque))

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)

    def script(self, path: str, *replies: Reply) -> None:
        """Answer the next requests of that path so; then as usual again."""
        self._scripts[path].extend(replies)

    def paths(self) -> list[str]:
        return [call.path for call in self.calls]

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith(PREFIX)
        path = request.url.path.removeprefix(PREFIX)
        sent = KINDS[path].model_validate_json(request.content) if request.method == "POST" else None
        self.calls.append(Call(request.method, path, request.headers, request.content, sent))
        script = self._scripts[path]
        if not script:
            return self._usual(path)
        reply = script.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else await reply(request)

    def _usual(self, path: str) -> httpx.Response:
        if path in RESULTS:
            return envelope("completed", f"request-{len(self.calls)}", result=RESULT[path])
        if path in USUAL:
            return httpx.Response(200, json=USUAL[path])
        return refusal_payload(404, "resource_not_found", f"{path} is unknown")


def envelope(status: str, request_id: str = "request-1", **fields: object) -> httpx.Response:
    tree = TaskEnvelope.model_validate({"request_id": request_id, "status": status} | fields)
    return httpx.Response(200, json=tree.model_dump(mode="json"))


def failed(error: TinsmithError, status: str = "failed", request_id: str = "request-1") -> httpx.Response:
    payload = ErrorPayload.of(error, error_code=error.status, request_id=request_id)
    return envelope(status, request_id, error=payload.model_dump(mode="json"))


def refused(error: TinsmithError, **headers: str) -> httpx.Response:
    payload = ErrorPayload.of(error, error_code=error.status, request_id="http-1", details=["one: detail"])
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(error.status, json=payload.model_dump(mode="json"), headers=named)


def refusal_payload(status: int, reason: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": message, "reason": reason, "category": "user", "error_code": status})
