"""The session of a client: opened by the first model or sampler, kept alive by heartbeats, ended when the client closes. One that the
server has ended or does not know any more is followed by another, for new models and samplers.

Knows nothing of what lives in it, beyond the numbers that its models and samplers get.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Literal

from tinsmith.client.errors import ClientError, HttpError, checked_arguments
from tinsmith.client.transport import Sleep, Transport, serialised
from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.errors import NotFound, SessionEnded
from tinsmith.protocol.native import CreateSession, EndSession, Heartbeat
from tinsmith.protocol.native_answers import SessionInfo

HEARTBEAT_S = 10.0  # a session ends after five minutes without one
END_S = 5.0  # for the farewell; the server ends a silent session by itself

OVER = frozenset({SessionEnded.status, NotFound.status})  # what the server answers of a session that it has no more

EndReason = Literal["success", "errored", "interrupted"]

_log = logging.getLogger(__name__)


class Session:
    """`open` may be called by many at once; one session results. The numbers go on from session to session."""

    def __init__(
        self,
        transport: Transport,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        with checked_arguments():
            self._request = CreateSession(
                tags=tuple(tags),
                metadata=None if metadata is None else dict(metadata),
                project_id=project_id,
                display_name=display_name,
            )
        serialised(self._request)
        self._transport = transport
        self._sleep = sleep
        self._opening = asyncio.Lock()
        self._id: str | None = None
        self._beats: asyncio.Task[None] | None = None
        self.model_numbers = count()
        self.sampler_numbers = count()

    async def open(self) -> str:
        """The id of the session that lives, or of a new one. Raises as `Transport.post`."""
        self._transport.check_loop()
        async with self._opening:
            if self._id is None:
                await self._end_beats()
                self._id = (await self._transport.post(self._request, SessionInfo)).session_id
                self._beats = asyncio.create_task(self._beat(self._id))
            return self._id

    async def is_over(self, session_id: str) -> bool:
        """Whether the server has ended that session, or lost it: then `open` opens another. Raises as `Transport.post`."""
        try:
            await self._transport.post(Heartbeat(session_id=session_id), Answer)
        except HttpError as error:
            if error.status not in OVER:
                raise
            self._forget(session_id, error)
            return True
        return False

    async def close(self, reason: EndReason) -> None:
        """Tell the server, if it can be told within `END_S`."""
        await self._end_beats()
        if self._id is None:
            return
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(END_S):
                await self._transport.post_once(EndSession(session_id=self._id, reason=reason), Answer)

    async def _beat(self, session_id: str) -> None:
        """Until the server says that the session is over. A beat that fails otherwise is made up for by the next one."""
        while self._id == session_id:
            await self._sleep(HEARTBEAT_S)
            try:
                await self._transport.post_once(Heartbeat(session_id=session_id), Answer)
            except HttpError as error:
                if error.status in OVER:
                    self._forget(session_id, error)
                else:
                    _log.warning("heartbeat of session %s: %s", session_id, error)
            except ClientError as error:
                _log.warning("heartbeat of session %s: %s", session_id, error)

    def _forget(self, session_id: str, error: HttpError) -> None:
        if self._id == session_id:
            self._id = None
            _log.warning("session %s is over (%s); what was in it is lost, and the next model or sampler opens another", session_id, error)

    async def _end_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
