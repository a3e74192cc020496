"""One HTTP connection pool to one server: sends typed requests, reads typed answers, and sends again what may be sent again.

Knows nothing of sessions, models or tasks. Every request of the protocol may be repeated with the same body (seq ids make a repeat find
the first one), so one rule covers all: connection errors, 408, 429 and 5xx are tried again, at most 5 times in a row.
"""

import asyncio
import random
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from tinsmith.client.errors import (
    ClientClosed,
    ClientError,
    ClientValidationError,
    ConnectionFailed,
    HttpError,
    Report,
    UnexpectedAnswer,
)
from tinsmith.client.tracing import find_inject
from tinsmith.protocol.envelopes import Answer, ErrorPayload
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import one_line
from tinsmith.protocol.native import PREFIX, StrictRequest

HTTP_TIMEOUT_S = 90.0  # of every exchange: above the longest window of a long poll (40 s) and the longest gap in a stream (60 s)
MAX_RETRIES = 5  # of one request, in a row
FIRST_PAUSE_S = 1.0  # doubled from retry to retry: 31 s in all, so a server may restart meanwhile
MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 120.0  # what a server may ask for

_KEY_HEADER = "X-API-Key"
_RESENT = frozenset({408, 429})  # statuses that are tried again, beside the 5xx
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)  # no byte of the request left this machine
MAX_STREAMS = 64  # open at a time; the next one waits
_LIMITS = httpx.Limits(max_connections=256)  # room for every stream and long poll, and then for many submits; more wait their turn
_TIMEOUT = httpx.Timeout(HTTP_TIMEOUT_S, pool=None)
_HOST = re.compile(r"[\w.-]+|[\w.%-]*:[\w.:%-]*", re.ASCII)  # a name or an IPv4 address, or an IPv6 one; httpx escapes what is neither

A = TypeVar("A", bound=Answer)
Sleep = Callable[[float], Awaitable[None]]


class Retries:
    """The tries of one exchange, and the pauses between them. `num_in_row`: how many were made since the last that brought something."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        self.num_in_row = 0

    async def pause_after(self, failure: ClientError) -> None:
        """Wait until it may be tried again. Raises `failure` if that was the last try."""
        if self.num_in_row == MAX_RETRIES:
            raise failure
        await self._sleep(_pause_s(self.num_in_row, failure))
        self.num_in_row += 1

    def begin_anew(self) -> None:
        """Something was achieved: count from zero."""
        self.num_in_row = 0


class Transport:
    """`transport` replaces the network (tests); `sleep` the pauses between tries."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        url = _checked_url(base_url)
        headers = {"Accept": "application/json"} | ({} if api_key is None else {_KEY_HEADER: _checked_key(api_key)})
        self.origin = f"{url.scheme}://{url.netloc.decode()}"
        self._sleep = sleep
        self._inject = find_inject()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the one of the first use
        self._streams = asyncio.Semaphore(MAX_STREAMS)
        self._http = httpx.AsyncClient(
            base_url=url.join(url.path.rstrip("/") + PREFIX),
            headers=headers,
            timeout=_TIMEOUT,
            limits=_LIMITS,
            verify=verify,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.origin!r})"

    async def post(self, request: StrictRequest, answer: type[A]) -> A:
        """Raises HttpError, ConnectionFailed, UnexpectedAnswer, ClientClosed."""
        return _read(await self._insist("POST", request.path, serialised(request), self.retries()), answer)

    async def post_once(self, request: StrictRequest, answer: type[A]) -> A:
        """Without a second try. Raises as `post`."""
        outcome = await self._try("POST", request.path, serialised(request))
        if isinstance(outcome, httpx.Response):
            return _read(outcome, answer)
        raise outcome

    async def get(self, path: str, answer: type[A]) -> A:
        """Raises as `post`."""
        return _read(await self._insist("GET", path, None, self.retries()), answer)

    @asynccontextmanager
    async def stream(self, request: StrictRequest, retries: Retries) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of the answer as they come; leaving the block closes the connection. Tried again only until the answer begins.

        Raises as `post`; ConnectionFailed where the connection breaks between lines.
        """
        self.check_loop()
        async with self._streams:
            response = await self._insist("POST", request.path, serialised(request), retries, is_streamed=True)
            try:
                yield _lines(response, self.origin)
            finally:
                await response.aclose()

    def retries(self) -> Retries:
        """For one exchange."""
        return Retries(self._sleep)

    def check_loop(self) -> None:
        """Before anything that belongs to an event loop. Raises ClientValidationError in another one than the first time."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise ClientValidationError(
                "event loop", "is not the one that this client was first used in; open a client in each, or use Client, which has its own"
            )

    async def close(self) -> None:
        self._is_closed = True
        await self._http.aclose()

    async def _insist(
        self, method: str, path: str, content: bytes | None, retries: Retries, *, is_streamed: bool = False
    ) -> httpx.Response:
        may_have_arrived = False
        while True:
            outcome = await self._try(method, path, content, is_streamed=is_streamed)
            if isinstance(outcome, httpx.Response):
                return outcome
            may_have_arrived = outcome.may_have_arrived = outcome.may_have_arrived or may_have_arrived
            if not _is_worth_a_retry(outcome):
                raise outcome
            await retries.pause_after(outcome)

    async def _try(
        self, method: str, path: str, content: bytes | None, *, is_streamed: bool = False
    ) -> httpx.Response | HttpError | ConnectionFailed:
        """A good answer, or why there is none."""
        if self._is_closed:
            raise ClientClosed
        self.check_loop()
        headers = {} if content is None else {"Content-Type": "application/json"}
        self._inject(headers)
        request = self._http.build_request(method, path, content=content, headers=headers)
        try:
            response = await self._http.send(request, stream=is_streamed)
            if response.is_success:
                return response
            await response.aread()
            await response.aclose()
        except httpx.RequestError as error:
            return _lost(error, self.origin)
        return _refusal(response)


def _checked_url(base_url: str) -> httpx.URL:
    if not isinstance(base_url, str):
        raise ClientValidationError("base_url", "must be a text; use http://host:port")
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ClientValidationError("base_url", f"{error}; use http://host:port") from None
    if url.scheme not in ("http", "https") or not _HOST.fullmatch(url.raw_host.decode()):
        raise ClientValidationError("base_url", "is no address of a server; use http://host:port")
    if url.userinfo:
        raise ClientValidationError("base_url", "must hold no user or password; send the key as api_key")
    if url.query or url.fragment:
        raise ClientValidationError("base_url", "must end before its '?' or '#', which no request would carry; use http://host:port/path")
    return url


def _checked_key(api_key: str) -> str:
    if not isinstance(api_key, str) or not api_key or not api_key.isascii() or not api_key.isprintable():
        raise ClientValidationError("api_key", "must be printable ASCII and not empty; leave it out for a server without keys")
    return api_key


def serialised(request: StrictRequest) -> bytes:
    """The one place where a request becomes bytes. Null is what every field that allows it takes for absent.

    Raises ClientValidationError for a text that UTF-8 cannot hold.
    """
    try:
        return request.model_dump_json(exclude_none=True).encode()
    except PydanticSerializationError:
        place = _place_of_half(request.model_dump(), ())
        if place is None:
            raise
    raise ClientValidationError(".".join(place), "holds half of a surrogate pair, which UTF-8 cannot; decode the text anew, or replace it")


def _place_of_half(tree: object, place: tuple[str, ...]) -> tuple[str, ...] | None:
    """Where in a request the first text is that holds a lone surrogate."""
    if isinstance(tree, str):
        return place if any("\ud800" <= letter <= "\udfff" for letter in tree) else None
    if not isinstance(tree, dict | list | tuple):
        return None
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return next((found for step, part in parts if (found := _place_of_half(part, (*place, str(step)))) is not None), None)


def _read(response: httpx.Response, answer: type[A]) -> A:
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        unreadable(error, f"the answer to {response.request.url.path}")


def unreadable(error: ValidationError, what: str) -> NoReturn:
    """Raises UnexpectedAnswer."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    raise UnexpectedAnswer(
        f"{what} is none of this protocol ({place or 'body'}: {first['msg']}); is the URL a Tinsmith server of this version?"
    ) from None


async def _lines(response: httpx.Response, origin: str) -> AsyncIterator[str]:
    failure = None
    try:
        async for line in response.aiter_lines():
            if line:
                yield line
    except httpx.RequestError as error:
        failure = _lost(error, origin)
    if failure is not None:
        raise failure


def _lost(error: httpx.RequestError, origin: str) -> ConnectionFailed:
    """Of the error only the text is kept: it holds the request, and the request the key."""
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ConnectionFailed(f"no answer from {origin} ({one_line(why)}); is the server running?", not isinstance(error, _NOT_SENT))


def _refusal(response: httpx.Response) -> HttpError:
    status = response.status_code
    report = _report(response)
    is_uncertain = (status == 408 or status >= 500) and report.reason is not ReasonCode.ENDPOINT_UNAVAILABLE
    return HttpError(status, report, may_have_arrived=is_uncertain, retry_after_s=_retry_after_s(response))


def _report(response: httpx.Response) -> Report:
    """What the body says; a proxy's page says nothing but its status."""
    try:
        return Report.of(ErrorPayload.model_validate_json(response.content))
    except ValidationError:
        pass
    said = _Loose.read(response)
    status = response.status_code
    return Report(
        message=one_line(said) or f"{response.reason_phrase or 'refused'} (an answer without an error payload)",
        reason=None,
        category=Category.UNKNOWN,
        error_code=status if 400 <= status <= 599 else 500,
        request_id=None,
    )


class _Loose(BaseModel):
    """An error as servers of another version may word it."""

    error: Any = None
    detail: Any = None

    @classmethod
    def read(cls, response: httpx.Response) -> str:
        try:
            said = cls.model_validate_json(response.content)
        except ValidationError:
            return ""
        return next((text for text in (said.error, said.detail) if isinstance(text, str)), "")


def _is_worth_a_retry(failure: HttpError | ConnectionFailed) -> bool:
    if isinstance(failure, ConnectionFailed):
        return True
    if failure.reason is ReasonCode.ENDPOINT_UNAVAILABLE or failure.status == 501:
        return False
    return failure.status in _RESENT or failure.status >= 500


def _pause_s(num_retries: int, failure: ClientError) -> float:
    """Doubling, spread by a quarter so that many waiters do not come back at once; never less than the server asked for."""
    pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**num_retries) * random.uniform(0.75, 1.0)  # noqa: S311 - no secret
    asked_s = failure.retry_after_s if isinstance(failure, HttpError) else None
    return pause_s if asked_s is None else max(pause_s, min(asked_s, MAX_RETRY_AFTER_S))


def _retry_after_s(response: httpx.Response) -> float | None:
    """In s; the form with a date is left to the doubling."""
    value: str = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else None
