"""Who calls, and from where: checked before any route, on unknown paths too.

Open mode has no keys: every caller is the tenant `local`, whatever key it sends. What it does guard against is a web page that reaches
the loopback port through a browser: the Host must be one of ours (DNS rebinding), an Origin must be listed, and a body must declare a
type that a plain HTML form cannot. With keys (`keys.py`) none of that is needed: a page can add no key. Keys are never logged.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.config import GatewayConfig
from tinsmith.gateway.errors import HOLD_S, answer
from tinsmith.protocol.errors import InvalidRequest, RequestRejected, StateContention, Unauthenticated, UserError
from tinsmith.protocol.ids import LOCAL_TENANT
from tinsmith.state.keyring import KeyRecord

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_HEADERS = 128
MAX_HEAD = 64 * 1024  # bytes of path, query and headers of one request
PUBLIC_PATHS = frozenset({"/healthz", "/healthz/deep", "/metrics", "/api/v1/healthz"})  # probes and scrapers have no key
SIGNED_PREFIX = "/api/v1/downloads"  # below it a request is let in by the signature of its link (`gateway.signing`)

_CHALLENGE = "Bearer"  # which credentials would do, as a 401 must say
_TOKEN_CHALLENGE = 'Bearer error="invalid_token"'  # noqa: S105 - clients of the Tinker wire then exchange their key for another token, once


class TokenRefused(Unauthenticated):
    """A token that is no longer accepted; its holder may exchange its key for another."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`key`: None in open mode. `token`: what the caller sent in place of the key, if it did."""

    tenant: str
    key: KeyRecord | None = None
    token: str | None = field(default=None, repr=False)


class Authenticator(Protocol):
    """Maps a request to its caller, and a credential to whom it belongs."""

    async def caller(self, path: str, headers: Headers) -> Caller | None:
        """None on a path that needs no caller. Raises UserError where the call is refused, StateContention while the store is away."""
        ...

    async def caller_of(self, text: str) -> Caller:
        """Whose credential the text is. Raises as `caller` does."""
        ...

    def forget(self, key_id: str) -> None:
        """What was remembered of a key no longer counts here."""
        ...


class OpenMode:
    """No keys: one tenant, guarded against browsers."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)

    async def caller(self, path: str, headers: Headers) -> Caller | None:
        host = _without_port(headers.get("host", "")).lower()
        if host not in self._hosts:
            raise RequestRejected(f"Host: {host[:100]!r} is not served; call an address of gateway.allowed_hosts or list this one there")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise RequestRejected(f"Origin: {origin[:100]!r} is not allowed; list it in gateway.allowed_origins")
        if _has_body(headers) and content_type(headers) not in (JSON, PROTOBUF):
            raise InvalidRequest(f"Content-Type: {content_type(headers)[:100]!r} is not accepted; send {JSON} or {PROTOBUF}")
        return Caller(LOCAL_TENANT)

    async def caller_of(self, text: str) -> Caller:
        return Caller(LOCAL_TENANT)

    def forget(self, key_id: str) -> None:
        """There are none."""


class AuthMiddleware:
    """Puts the caller and its tenant into the request's state, or answers the refusal."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_head(scope)
            caller = await self._authenticator.caller(scope["path"], Headers(scope=scope))
        except UserError as refusal:
            response = answer(scope, refusal)
            response.headers.update(_challenge(refusal))
            await response(scope, receive, send)
            return
        except StateContention as error:
            await asyncio.sleep(HOLD_S)  # clients ask again at once
            await answer(scope, error)(scope, receive, send)
            return
        if caller is not None:
            scope.setdefault("state", {}).update(tenant=caller.tenant, caller=caller)
        await self._app(scope, receive, send)


def _challenge(refusal: UserError) -> Mapping[str, str]:
    if not isinstance(refusal, Unauthenticated):
        return {}
    return {"WWW-Authenticate": _TOKEN_CHALLENGE if isinstance(refusal, TokenRefused) else _CHALLENGE}


def is_public(path: str) -> bool:
    """Whether a request of the path is let in without a key."""
    return path in PUBLIC_PATHS or path.startswith(f"{SIGNED_PREFIX}/")


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
