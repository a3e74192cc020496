"""The async client of one server: the factory of training and sampling clients, and what can be asked of the server as a whole.

A client shares nothing with another one, so two of them in a process may talk to two servers.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, overload

import httpx
from pydantic import JsonValue

from tinsmith.client.errors import HttpError, checked_arguments
from tinsmith.client.futures import WAIT_S, AsyncFuture, OnProgress, Tasks, as_json, reader
from tinsmith.client.polls import Polls
from tinsmith.client.sampling import AsyncSamplingClient
from tinsmith.client.session import OVER, EndReason, Session
from tinsmith.client.training import AsyncTrainingClient
from tinsmith.client.transport import Sleep, Transport
from tinsmith.protocol import native
from tinsmith.protocol.envelopes import Answer, TaskEnvelope
from tinsmith.protocol.futures import State
from tinsmith.protocol.native import AdamWConfig, SgdConfig
from tinsmith.protocol.native_answers import (
    Capabilities,
    Capacity,
    ModelCreated,
    ModelInfo,
    ModelList,
    SamplerInfo,
    ServerStatus,
    SessionInfo,
    SessionList,
)
from tinsmith.protocol.training import LrSchedule

A = TypeVar("A", bound=Answer)
T = TypeVar("T")


class AsyncClient:
    """`async with AsyncClient(url) as client: ...`; everything is opened when first used, so building one does no I/O.

    `api_key` goes out as the header X-API-Key and nowhere else. `tags`, `metadata`, `project_id`, `display_name` describe the session.
    `wait_s`: how long a future waits for its result, in s. `on_progress`: called with a task's envelope when its status or queue state
    changes while somebody waits for it. `verify`: as in httpx. `transport` and `sleep` replace the network and the clock, for tests.

    A client belongs to the event loop that it was first used in; every call in another one raises ClientValidationError. Heartbeats run on
    that loop: code that blocks it for five minutes ends the session. Models and samplers of a session that has ended, or that the server
    lost in a restart, are gone; the next `training` or `sampling` opens a new session for its own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        wait_s: float = WAIT_S,
        on_progress: OnProgress | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._transport = Transport(base_url, api_key, verify=verify, transport=transport, sleep=sleep)
        self._session = Session(
            self._transport, tags=tags, metadata=metadata, project_id=project_id, display_name=display_name, sleep=sleep
        )
        self._polls = Polls(self._transport)
        self._tasks = Tasks(self._transport, self._polls, wait_s, on_progress)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.origin!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close(end_reason(error))

    async def close(self, reason: EndReason = "success") -> None:
        """End the session and the connections. What still runs on the server is dropped with the session."""
        if self._is_closed:
            return
        self._transport.check_loop()
        self._is_closed = True
        await self._polls.close()
        await self._session.close(reason)
        await self._transport.close()

    async def training(
        self,
        *,
        base_model: str | None = None,
        rank: int | None = None,
        seed: int | None = None,
        train_attn: bool | None = None,
        train_mlp: bool | None = None,
        train_unembed: bool | None = None,
        optimizer: AdamWConfig | SgdConfig | None = None,
        schedule: LrSchedule | None = None,
        checkpoint: str | None = None,
        load_optimizer: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncTrainingClient:
        """A new adapter: on `base_model`, or with the weights (and LoRA shape) of `checkpoint`.

        `optimizer` and `schedule` are kept with the adapter and used by every step that names no optimizer.
        Raises ClientValidationError, TaskFailed, and as `Future.result`.
        """
        lora = {"rank": rank, "seed": seed, "train_attn": train_attn, "train_mlp": train_mlp, "train_unembed": train_unembed}
        given = {name: value for name, value in lora.items() if value is not None}
        with checked_arguments():
            request = native.CreateModel(
                session_id="-",
                model_seq=0,
                base_model=base_model,
                lora=native.LoraOptions.model_validate(given) if given else None,
                checkpoint=checkpoint,
                load_optimizer=load_optimizer,
                optimizer=optimizer,
                schedule=schedule,
                metadata=None if metadata is None else dict(metadata),
            )

        async def create(session_id: str) -> AsyncFuture[ModelCreated]:
            placed = request.model_copy(update={"session_id": session_id, "model_seq": next(self._session.model_numbers)})
            return await self._tasks.submit(placed, reader(ModelCreated))

        created = await (await self._in_session(create)).result()
        return AsyncTrainingClient(self._tasks, self._session, created.model_id)

    async def sampling(self, *, base_model: str | None = None, checkpoint: str | None = None) -> AsyncSamplingClient:
        """A sampler of `base_model`, or of the sampler weights published as `checkpoint`. Raises ClientValidationError, HttpError."""
        with checked_arguments():
            request = native.CreateSampler(session_id="-", sampler_seq=0, base_model=base_model, checkpoint=checkpoint)

        async def create(session_id: str) -> SamplerInfo:
            placed = request.model_copy(update={"session_id": session_id, "sampler_seq": next(self._session.sampler_numbers)})
            return await self._transport.post(placed, SamplerInfo)

        return AsyncSamplingClient(self._tasks, (await self._in_session(create)).sampler_id)

    @overload
    def future(self, request_id: str) -> AsyncFuture[JsonValue]: ...

    @overload
    def future(self, request_id: str, result: type[A]) -> AsyncFuture[A]: ...

    def future(self, request_id: str, result: type[A] | None = None) -> AsyncFuture[JsonValue] | AsyncFuture[A]:
        """Wait again for a command that was submitted before, by this client or another one with the same key.

        `result`: what it answers, e.g. `PassResult`; without it the result is plain JSON. Raises ClientValidationError.
        """
        with checked_arguments():
            native.RetrieveFuture(request_id=request_id)
        envelope = TaskEnvelope(request_id=request_id, status=State.PENDING)
        return AsyncFuture(self._tasks, envelope, as_json) if result is None else AsyncFuture(self._tasks, envelope, reader(result))

    async def capabilities(self) -> Capabilities:
        """What the server offers: base models, operations, losses, limits."""
        return await self._transport.get("/capabilities", Capabilities)

    async def status(self) -> ServerStatus:
        """Its processes, and the caller's lanes with work."""
        return await self._transport.get("/status", ServerStatus)

    async def capacity(self) -> Capacity:
        """How much of it is taken."""
        return await self._transport.get("/capacity", Capacity)

    async def sessions(self) -> tuple[SessionInfo, ...]:
        """The caller's sessions."""
        return (await self._transport.get("/sessions", SessionList)).sessions

    async def models(self) -> tuple[ModelInfo, ...]:
        """The caller's models."""
        return (await self._transport.get("/models", ModelList)).models

    async def _in_session(self, create: Callable[[str], Awaitable[T]]) -> T:
        """Create something in the session; once more, in a new one, where the server has that session no more."""
        session_id = await self._session.open()
        try:
            return await create(session_id)
        except HttpError as error:
            if error.status not in OVER or not await self._session.is_over(session_id):
                raise
        return await create(await self._session.open())


def end_reason(error: BaseException | None) -> EndReason:
    if error is None:
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"
