"""The thin sync face: every call runs the async one on a background loop that the client owns, and waits for it.

Works wherever a thread may block, under a running event loop (a notebook) too, and from any number of threads. Knows nothing of HTTP.
"""

import asyncio
import atexit
import functools
import ssl
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

import httpx
from pydantic import JsonValue

from tinsmith.client.futures import WAIT_S, AsyncFuture, OnProgress
from tinsmith.client.loop import Loop
from tinsmith.client.sampling import AsyncSamplingClient
from tinsmith.client.service import AsyncClient, end_reason
from tinsmith.client.session import END_S, EndReason
from tinsmith.client.streams import AsyncStream
from tinsmith.client.training import AsyncTrainingClient, check_unnamed
from tinsmith.client.transport import Sleep
from tinsmith.protocol.envelopes import Answer, TaskEnvelope
from tinsmith.protocol.native_answers import StreamFrame, WeightsPublished

CLOSE_S = 2 * END_S

T = TypeVar("T")
A = TypeVar("A", bound=Answer)
P = ParamSpec("P")
Core = TypeVar("Core")
Got = TypeVar("Got")
Given = TypeVar("Given")


class _Owner:
    """What ends with a sync client: its loop, and the async client on it. Must not know the sync client, which may be collected first."""

    def __init__(self, core: AsyncClient) -> None:
        self.loop = Loop()
        self._core = core
        atexit.register(self.close)

    def abandon(self, reason: EndReason = "success") -> None:
        """Close without waiting, so that the garbage collector may do it on any thread."""
        atexit.unregister(self.close)
        self.loop.stop_after(self._core.close(reason))

    def close(self, reason: EndReason = "success") -> None:
        self.abandon(reason)
        self.loop.join(CLOSE_S)


CoreT = TypeVar("CoreT", covariant=True)


class _Face(Protocol[CoreT]):
    """A sync object over an async one. It keeps the client alive for as long as it is used itself."""

    @property
    def core(self) -> CoreT: ...

    @property
    def client(self) -> "Client": ...


class _Facing(Generic[Core, P, Got, Given]):
    """A method of the async object as one of the sync object, of the same parameters; `face` makes what it gives fit for sync callers."""

    def __init__(self, call: Callable[Concatenate[Core, P], Got], face: "Callable[[Client, Got], Given]") -> None:
        self._call = call
        self._face = face
        self.__doc__ = call.__doc__

    @overload
    def __get__(self, sync: None, owner: type) -> Self: ...

    @overload
    def __get__(self, sync: _Face[Core], owner: type) -> Callable[P, Given]: ...

    def __get__(self, sync: _Face[Core] | None, owner: type) -> Self | Callable[P, Given]:
        return self if sync is None else self._bound(sync)

    def _bound(self, sync: _Face[Core]) -> Callable[P, Given]:
        @functools.wraps(self._call)
        def call(*args: P.args, **kwargs: P.kwargs) -> Given:
            return self._face(sync.client, self._call(sync.core, *args, **kwargs))

        return call


def _result(client: "Client", coroutine: Coroutine[Any, Any, T]) -> T:
    return client.run(coroutine)


def _future(client: "Client", coroutine: "Coroutine[Any, Any, AsyncFuture[T]]") -> "Future[T]":
    return Future(client, client.run(coroutine))


def _training(client: "Client", coroutine: Coroutine[Any, Any, AsyncTrainingClient]) -> "TrainingClient":
    return TrainingClient(client, client.run(coroutine))


def _sampling(client: "Client", coroutine: Coroutine[Any, Any, AsyncSamplingClient]) -> "SamplingClient":
    return SamplingClient(client, client.run(coroutine))


class Future(Generic[T]):
    """A command that the server has taken; any thread may wait for it, and as often as it likes.

    Ctrl-C while waiting sends the server a cancel, which drops a command that has not started. To stop waiting and let the command go
    on, give `result` a timeout.
    """

    def __init__(self, client: "Client", core: AsyncFuture[T]) -> None:
        self.client = client
        self.core = core

    def __repr__(self) -> str:
        return repr(self.core).removeprefix("Async")

    @property
    def request_id(self) -> str:
        """Good for `client.future(request_id, ...)`, from another process too."""
        return self.core.request_id

    def result(self, timeout: float | None = None, on_progress: OnProgress | None = None) -> T:
        """Wait for the end. `timeout` in s, in place of the client's; `on_progress` is called (on the client's thread) with each new
        status or queue state.

        Raises TaskFailed, TaskCancelled, WaitTimedOut (the command goes on), RecordLost, ConnectionFailed, HttpError, ClientClosed.
        """
        return self.client.run(self.core.result(timeout, on_progress))

    def cancel(self) -> bool:
        """Whether the command was dropped; one that runs or has ended goes its way."""
        return self.client.run(self.core.cancel())

    def status(self) -> TaskEnvelope:
        """What the server says of it. Of one that has not ended, the answer takes up to one window of a long poll."""
        return self.client.run(self.core.status())


class Stream:
    """An iterator of frames. Closing it early (`close`, or leaving `with`) closes the request, and the server then frees what it drew
    with. An `error` frame raises TaskFailed or TaskCancelled; what may pass is asked for again first, as `AsyncStream` says."""

    def __init__(self, client: "Client", core: AsyncStream) -> None:
        self.client = client
        self.core = core

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamFrame:
        frame = self.client.run(anext(self.core, None))
        if frame is None:
            raise StopIteration
        return frame

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.client.run(self.core.aclose())


class SamplingClient:
    """Made by `Client.sampling` and `TrainingClient.publish_sampler_weights`."""

    def __init__(self, client: "Client", core: AsyncSamplingClient) -> None:
        self.client = client
        self.core = core

    def __repr__(self) -> str:
        return repr(self.core).removeprefix("Async")

    @property
    def sampler_id(self) -> str:
        return self.core.sampler_id

    sample = _Facing(AsyncSamplingClient.sample, _future)
    stream = _Facing(AsyncSamplingClient.stream, Stream)


class TrainingClient:
    """Made by `Client.training`. Each command is submitted by the call; `result()` of the future that it gives waits for its end.

    Commands take effect in the order of the calls, whatever the order in which their results are waited for; submit as far ahead as
    you like. Parameters and results are those of `AsyncTrainingClient`.
    """

    def __init__(self, client: "Client", core: AsyncTrainingClient) -> None:
        self.client = client
        self.core = core

    def __repr__(self) -> str:
        return repr(self.core).removeprefix("Async")

    @property
    def model_id(self) -> str:
        return self.core.model_id

    forward = _Facing(AsyncTrainingClient.forward, _future)
    forward_backward = _Facing(AsyncTrainingClient.forward_backward, _future)
    evaluate = _Facing(AsyncTrainingClient.evaluate, _future)
    optim_step = _Facing(AsyncTrainingClient.optim_step, _future)
    train_step = _Facing(AsyncTrainingClient.train_step, _future)
    save_weights = _Facing(AsyncTrainingClient.save_weights, _future)
    load_weights = _Facing(AsyncTrainingClient.load_weights, _future)
    info = _Facing(AsyncTrainingClient.info, _result)
    unload = _Facing(AsyncTrainingClient.unload, _result)

    @overload
    def publish_sampler_weights(
        self, *, name: str, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Future[WeightsPublished]: ...

    @overload
    def publish_sampler_weights(self) -> Future[SamplingClient]: ...

    def publish_sampler_weights(
        self, *, name: str | None = None, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Future[WeightsPublished] | Future[SamplingClient]:
        """Freeze the weights as they are after the commands so far. With a name: as a checkpoint, which `Client.sampling` opens. Without:
        for the sampling client that the future gives, as long as the session lasts."""
        if name is not None:
            return _future(self.client, self.core.publish_sampler_weights(name=name, ttl_s=ttl_s, metadata=metadata))
        check_unnamed(ttl_s, metadata)
        unnamed = self.client.run(self.core.publish_sampler_weights())
        return Future(self.client, unnamed.mapped(lambda sampler: SamplingClient(self.client, sampler)))


class Client:
    """`with Client(url) as client: ...`. Parameters are those of `AsyncClient`; nothing is sent before the first call.

    The client owns one background thread, on which its heartbeats go on while your own code computes. It ends with `close`, with the
    process, or when nobody refers to the client or to anything that it made.
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
        self.core = AsyncClient(
            base_url,
            api_key,
            tags=tags,
            metadata=metadata,
            project_id=project_id,
            display_name=display_name,
            wait_s=wait_s,
            on_progress=on_progress,
            verify=verify,
            transport=transport,
            sleep=sleep,
        )
        self._owner = _Owner(self.core)
        self._abandon = weakref.finalize(self, self._owner.abandon)
        self._abandon.atexit = False  # the owner closes then

    def __repr__(self) -> str:
        return repr(self.core).removeprefix("Async")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(end_reason(error))

    @property
    def client(self) -> "Client":
        return self

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the async face on the client's loop, and wait for it. Raises ClientClosed and what it raises."""
        return self._owner.loop.run(coroutine)

    def close(self, reason: EndReason = "success") -> None:
        """End the session, the connections and the thread. What still runs on the server is dropped with the session."""
        if self._abandon.detach() is not None:
            self._owner.close(reason)

    training = _Facing(AsyncClient.training, _training)
    sampling = _Facing(AsyncClient.sampling, _sampling)
    capabilities = _Facing(AsyncClient.capabilities, _result)
    status = _Facing(AsyncClient.status, _result)
    capacity = _Facing(AsyncClient.capacity, _result)
    sessions = _Facing(AsyncClient.sessions, _result)
    models = _Facing(AsyncClient.models, _result)

    @overload
    def future(self, request_id: str) -> Future[JsonValue]: ...

    @overload
    def future(self, request_id: str, result: type[A]) -> Future[A]: ...

    def future(self, request_id: str, result: type[A] | None = None) -> Future[JsonValue] | Future[A]:
        """Wait again for a command that was submitted before, by this client or another one with the same key.

        `result`: what it answers, e.g. `PassResult`; without it the result is plain JSON.
        """
        if result is None:
            return Future(self, self.core.future(request_id))
        return Future(self, self.core.future(request_id, result))
