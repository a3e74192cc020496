"""call_backend: the one function through which server code reaches an engine. Off the loop, under a gate, within a bound.

A thread cannot be cancelled. A call that outlives its bound fails for its caller at once, but the gate stays shut until the call really
ends; whoever waits for the gate then goes on without a restart. Knows nothing of engines, lanes or commands: it runs callables.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from tinsmith import telemetry
from tinsmith.protocol.errors import ExecutionTimeout, GateUnavailable

P = ParamSpec("P")
T = TypeVar("T")

PING_S = 10.0
TRANSFER_S = 3600.0  # moving or building a whole adapter may wait for disks and other ranks; training steps may not

# A bound declared for a method beats the default of the gate, whatever the style of the call.
DECLARED_BOUNDS_S = {
    "ping": PING_S,
    "capture": TRANSFER_S,
    "load": TRANSFER_S,
    "load_adapter": TRANSFER_S,
    "restore": TRANSFER_S,
    "create_adapter": TRANSFER_S,
}


class CallBackend(Protocol):
    """How the rest of the server sees the gate (`Gate` implements it)."""

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call` in the engine's thread. Raises ExecutionTimeout when its bound passes (the gate then stays shut until the call
        really ends), GateUnavailable where the gate is shut; anything the call raises passes through."""
        ...


class _Threads:
    """Daemon threads that run closures in order of arrival; a hung one does not keep the process from ending."""

    def __init__(self, name: str, count: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        for index in range(count):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller in the queue for its turn; a patient one also waits while the gate is shut."""

    turn: "asyncio.Future[None]"
    is_patient: bool


@dataclass(eq=False, slots=True)
class _Running:
    """A call in a thread. `has_ended` is set by that thread, before the loop hears of it. `began`: on the loop's clock."""

    name: str
    began: float
    timer: asyncio.TimerHandle | None = None
    has_ended: bool = False


class Gate:
    """call_backend for one engine.

    exclusive: one call at a time, in order of arrival (trainers); otherwise up to `num_threads` at once, and never shut (samplers).
    bound_s: the bound of a call without a declared one. ping: the engine's own, run outside the gate on a reserved thread.
    """

    def __init__(
        self,
        *,
        bound_s: float,
        exclusive: bool,
        ping: Callable[[], None],
        bounds_s: dict[str, float] | None = None,
        num_threads: int = 8,
    ) -> None:
        self._bound_s = bound_s
        self._bounds_s = DECLARED_BOUNDS_S if bounds_s is None else bounds_s
        self._exclusive = exclusive
        self._ping = ping
        self._threads = _Threads("engine", 1 if exclusive else num_threads)
        self._reserved = _Threads("engine-ping", 1)
        self._is_busy = False
        self._queue: deque[_Waiter] = deque()
        self._open = asyncio.Event()
        self._open.set()
        self._late: set[_Running] = set()  # timed out and still running
        self._overdue: set[_Running] = set()  # still running one bound after their time-out
        self._answers_ping = True
        self._probe: asyncio.Task[bool] | None = None

    @property
    def is_healthy(self) -> bool:
        """False while the last ping failed, or a call still runs one bound after its time-out."""
        return self._answers_ping and not self._overdue

    @property
    def is_shut(self) -> bool:
        """True from a time-out until the call that timed out has really ended."""
        return not self._open.is_set()

    def bound_of(self, call: Callable[..., object]) -> float:
        """The bound of a call in s: the one declared for its name, else `bound_s`."""
        return self._bounds_s.get(_name(call), self._bound_s)

    async def opened(self) -> None:
        """Return as soon as the gate is not shut. It may be busy."""
        await self._open.wait()

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call` in the engine's thread, after the calls before it. Raises GateUnavailable at once while the gate is shut."""
        return await self._admit(partial(call, *args, **kwargs), _name(call), is_patient=False)

    async def when_open(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `__call__`, but waits for a shut gate to open. The bound counts from the start of the call, not from here."""
        return await self._admit(partial(call, *args, **kwargs), _name(call), is_patient=True)

    async def probe(self) -> bool:
        """Ping the engine on the reserved thread, beside whatever runs; the answer is kept in `is_healthy`. Joins a probe under way."""
        return await asyncio.shield(self._start_probe())

    def close(self) -> None:
        """Let the idle threads end. A running call is left alone."""
        if self._probe is not None:
            self._probe.cancel()
        self._threads.close()
        self._reserved.close()

    async def _admit(self, call: Callable[[], T], name: str, *, is_patient: bool) -> T:
        with telemetry.traced_inside(telemetry.SPAN_CALL, call=name):
            await self._enter(is_patient)
            return await self._run(call, name)

    async def _enter(self, is_patient: bool) -> None:
        if not self._exclusive:
            return
        if self.is_shut and not is_patient:
            raise _shut()
        if not self._is_busy:
            self._is_busy = True
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), is_patient)
        self._queue.append(waiter)
        self._tell_waiting()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._pass_turn()  # the turn came in the same moment as the cancellation
            raise

    def _pass_turn(self) -> None:
        self._is_busy = False
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.turn.done():
                self._is_busy = True
                waiter.turn.set_result(None)
                break
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        telemetry.gauge(telemetry.GATE_WAITING, sum(not waiter.turn.done() for waiter in self._queue))

    def _run(self, call: Callable[[], T], name: str) -> "asyncio.Future[T]":
        """Start the call; the future ends with it or with its bound. Cancelling the future leaves call and bound as they are."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        bound_s = self._bounds_s.get(name, self._bound_s)
        running = _Running(name, loop.time())
        running.timer = loop.call_later(bound_s, self._time_out, running, answer, bound_s)
        self._threads.submit(partial(_work, loop, call, running, partial(self._end, running, answer)))
        return answer

    def _time_out(self, running: _Running, answer: "asyncio.Future[T]", bound_s: float) -> None:
        if running.has_ended:
            return  # the loop was late, not the call
        self._late.add(running)
        if self._exclusive:
            self._shut()
        running.timer = asyncio.get_running_loop().call_later(bound_s, self._overdue.add, running)
        self._start_probe()
        if not answer.done():
            answer.set_exception(ExecutionTimeout(f"the engine call did not end within its bound of {bound_s:g} s; send a smaller command"))

    def _shut(self) -> None:
        self._open.clear()
        telemetry.gauge(telemetry.GATE_SHUT, 1)
        for waiter in self._queue:
            if not waiter.is_patient and not waiter.turn.done():
                waiter.turn.set_exception(_shut())

    def _end(self, running: _Running, answer: "asyncio.Future[T]", result: "T | BaseException", has_raised: bool) -> None:
        if running.timer is not None:
            running.timer.cancel()
        self._overdue.discard(running)
        telemetry.observe(telemetry.GATE_CALL, asyncio.get_running_loop().time() - running.began, call=running.name)
        if running in self._late:
            self._late.remove(running)
            self._start_probe()
        if not self._late and self.is_shut:
            self._open.set()
            telemetry.gauge(telemetry.GATE_SHUT, 0)
        if self._exclusive:
            self._pass_turn()
        if answer.done():
            return
        if has_raised:
            answer.set_exception(_raisable(result))
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # not an exception of the call here

    def _start_probe(self) -> "asyncio.Task[bool]":
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._ask_ping())
        return self._probe

    async def _ask_ping(self) -> bool:
        loop = asyncio.get_running_loop()
        pong: asyncio.Future[bool] = loop.create_future()

        def note(result: object, has_raised: bool) -> None:
            if not pong.done():
                pong.set_result(not has_raised)

        self._reserved.submit(partial(_work, loop, self._ping, _Running("ping", loop.time()), note))
        done, _ = await asyncio.wait([pong], timeout=self._bounds_s.get("ping", PING_S))
        self._answers_ping = bool(done) and pong.result()
        return self._answers_ping


def _name(call: Callable[..., object]) -> str:
    return getattr(call, "__name__", "")


def _work(
    loop: asyncio.AbstractEventLoop, call: Callable[[], T], running: _Running, end: Callable[[T | BaseException, bool], None]
) -> None:
    """In the thread: run the call and tell the loop, whatever it raises."""
    result: T | BaseException
    try:
        result, has_raised = call(), False
    except BaseException as error:  # noqa: BLE001 - carried over to the caller, who raises it again
        result, has_raised = error, True
    running.has_ended = True
    try:
        loop.call_soon_threadsafe(end, result, has_raised)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


def _raisable(error: object) -> BaseException:
    """A future cannot carry StopIteration."""
    if isinstance(error, StopIteration):
        return RuntimeError("the engine call raised StopIteration")
    assert isinstance(error, BaseException)  # noqa: S101 - told by has_raised
    return error


def _shut() -> GateUnavailable:
    return GateUnavailable("the engine is still busy with a call that timed out; send the request again")
