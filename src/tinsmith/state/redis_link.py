"""The wire to one Redis primary: commands, scripts and one blocking read, with bounded waits and one kind of error.

The only module that imports the Redis client. It knows nothing of keys or of what a script means. Everything sent must be repeatable,
since a command is resent when its reply is lost.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Sequence
from functools import cache
from importlib.resources import files
from time import monotonic
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import AuthenticationError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as ConnectionBroken
from redis.exceptions import TimeoutError as ReplyLate

from tinsmith import telemetry
from tinsmith.protocol.errors import StateContention

Value: TypeAlias = str | bytes | int
Command: TypeAlias = Sequence[Value]
Reply: TypeAlias = Any  # what the client parsed: int, bytes, None or a list of these; each caller knows its script's shape
_T = TypeVar("_T")

# A server that is gone refuses at once, so three more tries cost about 0.1 s; one that hangs is given up after _REPLY_S.
_CONNECT_S = 2.0
_REPLY_S = 3.0
_NUM_RETRIES = 3
_BACKOFF = ExponentialBackoff(cap=0.05, base=0.01)
_MAX_CONNECTIONS = 64  # a process: more callers wait for a free one instead of opening another
_BULK_BYTES = 4 * 1024 * 1024  # more than this goes command by command, so that _REPLY_S bounds each and not their sum
_WAIT_SLACK_S = 3.0  # a blocking read that has not returned so long after its own time-out is dead
_UNFIT = ("MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")  # error replies of a server that cannot serve now


class _Pipeline(Protocol):
    def execute_command(self, *parts: Value) -> object: ...

    async def execute(self, *, raise_on_error: bool) -> list[Reply]: ...


class _Client(Protocol):
    """What we use of the client; its own signatures are partly untyped."""

    async def execute_command(self, *parts: Value) -> Reply: ...

    def pipeline(self, *, transaction: bool) -> _Pipeline: ...

    async def aclose(self) -> None: ...


class RedisLink:
    """Connections are made on first use and belong to the running event loop."""

    def __init__(self, url: str) -> None:
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=_REPLY_S,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_REPLY_S,
            retry=Retry(_BACKOFF, _NUM_RETRIES, supported_errors=(ConnectionBroken,)),
            protocol=2,
        )
        # Its errors pass at once and its reads have no time-out of their own: the event reader resumes from its cursors.
        self._blocking_pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=_REPLY_S,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._broken_at: float | None = None
        self._client = cast(_Client, Redis(connection_pool=self._pool))
        self._blocking_client = cast(_Client, Redis(connection_pool=self._blocking_pool))

    @property
    def steady_s(self) -> float:
        """How long no command has failed for want of the store; infinite if none ever has."""
        return math.inf if self._broken_at is None else monotonic() - self._broken_at

    async def command(self, *parts: Value) -> Reply:
        """One command. Raises StateContention where the store is away."""
        return (await self.batch([parts]))[0]

    async def batch(self, commands: Sequence[Command]) -> list[Reply]:
        """Several commands in one round trip, not atomic together. Raises StateContention; the first error of any."""
        return _raise_first(await self._send(commands))

    async def script(self, name: str, *args: Value, before: Sequence[Command] = (), after: Sequence[Command] = ()) -> list[Reply]:
        """Run `lua/<name>.lua` between the other commands, all in one round trip unless they are large; answers the script's reply and
        those of `after`."""
        text, digest = _script(name)
        if _size(before) > _BULK_BYTES:
            for command in before:
                await self.command(*command)
            before = ()
        commands = [*before, ("EVALSHA", digest, 0, *args), *after]
        replies = await self._send(commands)
        if isinstance(replies[len(before)], NoScriptError):  # a server that was started anew, or never saw it
            await self.command("SCRIPT", "LOAD", text)
            replies = await self._send(commands)
        return _raise_first(replies)[len(before) :]

    async def block(self, timeout_s: float, *parts: Value) -> Reply:
        """A command that blocks up to `timeout_s` on the server. Raises StateContention as soon as its connection breaks."""
        try:
            async with asyncio.timeout(timeout_s + _WAIT_SLACK_S):
                return await _guarded(self._blocking_client.execute_command(*parts))
        except TimeoutError as error:
            self._broken_at = monotonic()
            telemetry.count(telemetry.STORE_ERRORS)
            raise StateContention("the store does not answer a blocking read; check that Redis is running") from error
        except StateContention:
            telemetry.count(telemetry.STORE_ERRORS)
            raise

    async def close(self) -> None:
        await self._client.aclose()
        await self._blocking_client.aclose()
        await self._pool.aclose()
        await self._blocking_pool.aclose()

    async def _send(self, commands: Sequence[Command]) -> list[Reply]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return await _guarded(pipeline.execute(raise_on_error=False))
        except StateContention:
            self._broken_at = monotonic()
            telemetry.count(telemetry.STORE_ERRORS)
            raise


async def _guarded(reply: Awaitable[_T]) -> _T:
    """The reply, or StateContention for every error that time or an operator mends."""
    try:
        return await reply
    except AuthenticationError as error:
        raise StateContention("the store refuses the credentials; check user and password in store.url") from error
    except (ConnectionBroken, ReplyLate, OSError) as error:
        raise StateContention(f"the store is away ({type(error).__name__}); check that Redis is running and reachable") from error
    except RedisError as error:
        raise _translated(error) from error


def _size(commands: Sequence[Command]) -> int:
    return sum(len(part) for command in commands for part in command if isinstance(part, bytes))


def _raise_first(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise _translated(reply) from reply
    return replies


def _translated(error: RedisError) -> Exception:
    if isinstance(error, OutOfMemoryError):
        return StateContention("the store is full; raise Redis' maxmemory or end sessions")
    if isinstance(error, ReadOnlyError | ConnectionBroken | ReplyLate):
        return StateContention("the store does not accept writes now; check that store.url names the Redis primary")
    if isinstance(error, ResponseError) and str(error).startswith(_UNFIT):
        return StateContention(f"the store cannot serve now ({str(error)[:120]}); see Redis' log")
    return error


@cache
def _script(name: str) -> tuple[str, str]:
    """Text and SHA-1 of a script, the shared functions in front."""
    folder = files("tinsmith.state") / "lua"
    text = (folder / "shared.lua").read_text() + (folder / f"{name}.lua").read_text()
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
