"""The gate with real threads: bounds, order, and what a call that outlives its bound does to the others."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from tests.fakes.training import until
from tinsmith import telemetry
from tinsmith.protocol.errors import ExecutionTimeout, GateUnavailable, ValidationFailed
from tinsmith.queue.gate import DECLARED_BOUNDS_S, Gate

BOUND_S = 0.05


class Engine:
    """Calls that block until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.may_answer_ping = threading.Event()
        self.may_answer_ping.set()
        self.running = 0
        self.peak = 0
        self.order: list[int] = []
        self.pings = 0
        self.ping_error: Exception | None = None

    def block(self) -> str:
        self.let_go.wait()
        return "late"

    def number(self, index: int, *, add: int = 0) -> int:
        self.order.append(index)
        return index + add

    def meet(self, barrier: threading.Barrier | None) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        if barrier is not None:
            barrier.wait(5)
        self.running -= 1

    def ping(self) -> None:
        self.pings += 1
        self.may_answer_ping.wait()
        if self.ping_error is not None:
            raise self.ping_error


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def build(engine: Engine) -> AsyncIterator[Callable[..., Gate]]:
    gates: list[Gate] = []

    def build(*, exclusive: bool = True, bound_s: float = BOUND_S, ping_s: float = 5.0) -> Gate:
        gates.append(Gate(bound_s=bound_s, exclusive=exclusive, ping=engine.ping, bounds_s={"ping": ping_s}))
        return gates[-1]

    yield build
    engine.let_go.set()
    engine.may_answer_ping.set()
    for gate in gates:
        await gate.opened()
        gate.close()


@pytest.fixture
def gate(build: Callable[..., Gate]) -> Gate:
    return build()


async def test_a_call_runs_in_another_thread_and_answers(gate: Gate, engine: Engine) -> None:
    assert await gate(engine.number, 3, add=4) == 7
    assert await gate(threading.current_thread) is not threading.current_thread()


async def test_what_a_call_raises_passes_through(gate: Gate) -> None:
    def refuse() -> None:
        raise ValidationFailed("no")

    with pytest.raises(ValidationFailed, match="no"):
        await gate(refuse)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await gate(next, iter([]))
    assert not gate.is_shut


@pytest.mark.proves("R6")
async def test_an_exclusive_gate_runs_one_call_at_a_time_in_order(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(bound_s=30)
    await asyncio.gather(*(gate(engine.meet, None) for _ in range(10)), *(gate(engine.number, index) for index in range(10)))
    assert engine.peak == 1
    assert engine.order == list(range(10))


@pytest.mark.proves("R6")
async def test_an_ungated_engine_runs_calls_at_once(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(exclusive=False, bound_s=30)
    barrier = threading.Barrier(4)
    await asyncio.gather(*(gate(engine.meet, barrier) for _ in range(4)))
    assert engine.peak > 1


@pytest.mark.proves("R2", "R3", "R4")
@pytest.mark.parametrize(
    ("method", "expected_s"),
    [("ping", 10.0), ("capture", 3600.0), ("load", 3600.0), ("create_adapter", 3600.0), ("restore", 3600.0), ("run", 1800.0)],
)
async def test_a_declared_bound_beats_the_default(engine: Engine, method: str, expected_s: float) -> None:
    gate = Gate(bound_s=1800, exclusive=True, ping=engine.ping)

    def call() -> None: ...

    call.__name__ = method
    assert gate.bound_of(call) == expected_s
    assert DECLARED_BOUNDS_S.get(method, 1800) == expected_s
    gate.close()


@pytest.mark.proves("R7")
async def test_a_timeout_fails_its_caller_and_keeps_the_gate_shut_until_the_call_ends(gate: Gate, engine: Engine) -> None:
    with pytest.raises(ExecutionTimeout, match=r"0\.05 s"):
        await gate(engine.block)
    assert gate.is_shut
    with pytest.raises(GateUnavailable):
        await gate(engine.number, 1)
    patient = asyncio.create_task(gate.when_open(engine.number, 2))
    opened = asyncio.create_task(gate.opened())
    await asyncio.sleep(0)
    assert not patient.done()
    assert not opened.done()
    assert engine.order == []
    engine.let_go.set()
    assert await patient == 2
    await opened
    assert await gate(engine.number, 3) == 3
    assert engine.order == [2, 3]


@pytest.mark.proves("R7")
async def test_a_direct_call_in_the_queue_is_refused_as_soon_as_the_gate_shuts(gate: Gate, engine: Engine) -> None:
    first = asyncio.create_task(gate(engine.block))
    await asyncio.sleep(0)
    direct = asyncio.create_task(gate(engine.number, 1))
    patient = asyncio.create_task(gate.when_open(engine.number, 2))
    with pytest.raises(ExecutionTimeout):
        await first
    with pytest.raises(GateUnavailable):
        await direct
    engine.let_go.set()
    assert await patient == 2
    assert engine.order == [2]


@pytest.mark.proves("R7")
async def test_cancelling_a_waiter_neither_opens_nor_poisons_the_gate(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(bound_s=30)
    caller = asyncio.create_task(gate(engine.block))
    waiter = asyncio.create_task(gate(engine.number, 1))
    next_one = asyncio.create_task(gate(engine.number, 2))
    await asyncio.sleep(0)
    caller.cancel()
    waiter.cancel()
    await asyncio.wait([caller, waiter])
    assert not next_one.done()  # the real call still runs
    assert not gate.is_shut
    engine.let_go.set()
    assert await next_one == 2
    assert engine.order == [2]
    assert gate.is_healthy


async def test_a_turn_that_comes_with_a_cancellation_is_passed_on(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(bound_s=30)
    first = asyncio.create_task(gate(engine.block))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(gate(engine.number, 1))
    await asyncio.sleep(0)
    (queued,) = gate._queue
    queued.turn.add_done_callback(lambda _: waiter.cancel())
    engine.let_go.set()
    assert await first == "late"
    await asyncio.wait([waiter])
    assert await gate(engine.number, 2) == 2


@pytest.mark.proves("R8")
async def test_a_timeout_pings_beside_the_hung_call(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(bound_s=0.5)  # one bound after its time-out the call counts as hung for good
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    await until(lambda: engine.pings == 1)
    assert await gate.probe()
    assert gate.is_healthy


@pytest.mark.proves("R8")
async def test_a_failing_ping_makes_unhealthy_until_a_good_one(gate: Gate, engine: Engine) -> None:
    engine.ping_error = RuntimeError("dead rank")
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    await until(lambda: not gate.is_healthy)
    engine.ping_error = None
    engine.let_go.set()  # the end of the late call probes again
    await until(lambda: gate.is_healthy)
    assert not gate.is_shut


@pytest.mark.proves("R8")
async def test_a_ping_that_hangs_makes_unhealthy(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(ping_s=BOUND_S)
    engine.may_answer_ping.clear()
    assert not await gate.probe()
    assert not gate.is_healthy
    engine.may_answer_ping.set()
    assert await gate.probe()
    assert gate.is_healthy


@pytest.mark.proves("R8")
async def test_a_call_that_still_runs_one_bound_after_its_timeout_makes_unhealthy(gate: Gate, engine: Engine) -> None:
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    await until(lambda: not gate.is_healthy)
    assert await gate.probe()  # a good ping does not hide a call that never returns
    assert not gate.is_healthy
    engine.let_go.set()
    await gate.opened()
    assert gate.is_healthy


async def test_a_call_that_ended_while_the_loop_was_late_is_no_timeout(gate: Gate, engine: Engine) -> None:
    answer = asyncio.create_task(gate(engine.number, 1))
    await asyncio.sleep(0)
    time.sleep(3 * BOUND_S)  # noqa: ASYNC251 - the loop is what must be late here
    assert await answer == 1
    assert not gate.is_shut


async def test_an_ungated_engine_is_never_shut(build: Callable[..., Gate], engine: Engine) -> None:
    gate = build(exclusive=False)
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    assert not gate.is_shut
    assert await gate(engine.number, 1) == 1


async def test_a_call_that_ends_after_its_loop_is_harmless() -> None:
    let_go, ended = threading.Event(), threading.Event()

    def block() -> None:
        let_go.wait()
        ended.set()

    def ping() -> None: ...

    async def start() -> None:
        gate = Gate(bound_s=30, exclusive=True, ping=ping)
        waiter = asyncio.ensure_future(gate(block))
        await asyncio.sleep(0)
        waiter.cancel()
        gate.close()

    await asyncio.to_thread(asyncio.run, start())
    let_go.set()
    assert await asyncio.to_thread(ended.wait, 5)


# --- what it reports


@pytest.fixture
def measured() -> Iterator[list[telemetry.Measurement]]:
    found: list[telemetry.Measurement] = []
    with telemetry.recording(found.append):
        yield found


def values_of(measured: list[telemetry.Measurement], name: str) -> list[float]:
    return [one.value for one in measured if one.name == name]


async def test_a_call_is_timed_by_its_name_until_it_really_ended(gate: Gate, engine: Engine, measured: list[telemetry.Measurement]) -> None:
    await gate(engine.number, 1)
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    assert [dict(one.labels) for one in measured if one.name == telemetry.GATE_CALL] == [{"call": "number"}]
    engine.let_go.set()
    await gate.opened()
    late = [one for one in measured if one.name == telemetry.GATE_CALL][-1]
    assert dict(late.labels) == {"call": "block"}
    assert late.value > BOUND_S


async def test_a_shut_gate_is_a_gauge(gate: Gate, engine: Engine, measured: list[telemetry.Measurement]) -> None:
    await gate(engine.number, 1)
    assert values_of(measured, telemetry.GATE_SHUT) == []
    with pytest.raises(ExecutionTimeout):
        await gate(engine.block)
    assert values_of(measured, telemetry.GATE_SHUT) == [1]
    engine.let_go.set()
    await gate.opened()
    assert values_of(measured, telemetry.GATE_SHUT) == [1, 0]


async def test_calls_that_wait_for_their_turn_are_a_gauge(
    build: Callable[..., Gate], engine: Engine, measured: list[telemetry.Measurement]
) -> None:
    gate = build(bound_s=30)
    calls = [asyncio.create_task(gate(engine.block)) for _ in range(3)]
    await until(lambda: values_of(measured, telemetry.GATE_WAITING)[-1:] == [2])
    engine.let_go.set()
    await asyncio.gather(*calls)
    assert values_of(measured, telemetry.GATE_WAITING) == [1, 2, 1, 0, 0]
