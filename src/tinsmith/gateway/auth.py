"""Who calls, and from where: checked before any route, on unknown paths too.

Open mode has no keys: every caller is the tenant `local`, whatever key it sends. What it does guard against is a web page that reaches
the loopback port through a browser: the Host must be one of ours (DNS rebinding), an Origin must be listed, and a body must declare a
type that a plain HTML form cannot. Keys are never logged.
"""

from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.config import GatewayConfig
from tinsmith.gateway.errors import answer
from tinsmith.protocol.errors import InvalidRequest, RequestRejected, UserError
from tinsmith.protocol.ids import LOCAL_TENANT

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_HEADERS = 128
MAX_HEAD = 64 * 1024  # bytes of path, query and headers of one request


class Authenticator(Protocol):
    """Maps a caller to its tenant."""

    async def tenant(self, headers: Headers) -> str:
        """Raises UserError where the call is refused."""
        ...


class OpenMode:
    """No keys: one tenant, guarded against browsers."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)

    async def tenant(self, headers: Headers) -> str:
        host = _without_port(headers.get("host", "")).lower()
        if host not in self._hosts:
            raise RequestRejected(f"Host: {host[:100]!r} is not served; call an address of gateway.allowed_hosts or list this one there")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise RequestRejected(f"Origin: {origin[:100]!r} is not allowed; list it in gateway.allowed_origins")
        if _has_body(headers) and content_type(headers) not in (JSON, PROTOBUF):
            raise InvalidRequest(f"Content-Type: {content_type(headers)[:100]!r} is not accepted; send {JSON} or {PROTOBUF}")
        return LOCAL_TENANT


class AuthMiddleware:
    """Puts the tenant into the request's state, or answers the refusal."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_head(scope)
            tenant = await self._authenticator.tenant(Headers(scope=scope))
        except UserError as refusal:
            await answer(scope, refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def check_head(scope: Scope) -> None:
    """Raises InvalidRequest beyond either bound."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise InvalidRequest(f"headers: {len(headers)} are too many; send {MAX_HEADERS} or fewer")
    num_bytes = len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
    if num_bytes > MAX_HEAD:
        raise head_too_large()


def head_too_large() -> InvalidRequest:
    return InvalidRequest(f"headers: path, query and headers have more than {MAX_HEAD} bytes; send fewer")


def content_type(headers: Headers) -> str:
    """The media type alone, lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _has_body(headers: Headers) -> bool:
    """What declares a type counts as a body too. Without either, the router and the routes refuse as they do for an empty one."""
    return "content-type" in headers or "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]
