"""Which bound holds for which engine call, and that it holds: whatever the call, however it is made, with real threads."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.training import until
from tinsmith.config import ConfigError, ExecutionConfig, validate
from tinsmith.protocol.errors import ExecutionTimeout
from tinsmith.queue.gate import DECLARED_BOUNDS_S, Gate

SLACK_S = 1.0  # what a caller may wait beyond the bound
STYLES = [pytest.param(True, id="one at a time"), pytest.param(False, id="several at once")]
ENTRIES = [pytest.param(Gate.__call__, id="direct"), pytest.param(Gate.when_open, id="patient")]


class BlockedEngine:
    """Every call blocks until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def run(self) -> None:
        self.let_go.wait()

    def load(self) -> None:
        self.let_go.wait()

    def has_adapter(self, _: str) -> bool:
        return self.let_go.wait()

    def __len__(self) -> int:
        self.let_go.wait()
        return 0

    def __next__(self) -> int:
        self.let_go.wait()
        return 0

    def ping(self) -> None:
        self.let_go.wait()


@pytest.fixture
async def engine() -> AsyncIterator[BlockedEngine]:
    engine = BlockedEngine()
    yield engine
    engine.let_go.set()


def gate_of(engine: BlockedEngine, *, exclusive: bool, bound_s: float, **declared_s: float) -> Gate:
    return Gate(bound_s=bound_s, exclusive=exclusive, ping=engine.ping, bounds_s=declared_s)


async def end(gate: Gate, engine: BlockedEngine) -> None:
    """Let every thread and every probe come to its end."""
    engine.let_go.set()
    await until(lambda: not gate._late)
    await gate.probe()
    gate.close()


@pytest.mark.proves("R1")
@pytest.mark.parametrize("exclusive", STYLES)
@pytest.mark.parametrize("enter", ENTRIES)
@pytest.mark.parametrize(
    "call_of",
    [
        pytest.param(lambda engine: (engine.run,), id="run"),
        pytest.param(lambda engine: (engine.has_adapter, "a"), id="look-up"),
        pytest.param(lambda engine: (len, engine), id="length"),
        pytest.param(lambda engine: (next, engine), id="next"),
    ],
)
async def test_a_worker_that_blocks_fails_its_caller_within_the_bound_and_a_second(
    engine: BlockedEngine, exclusive: bool, enter: Callable[..., Any], call_of: Callable[[BlockedEngine], tuple[Any, ...]]
) -> None:
    gate = gate_of(engine, exclusive=exclusive, bound_s=0.1)
    began = time.monotonic()
    with pytest.raises(ExecutionTimeout, match=r"bound of 0\.1 s"):
        await enter(gate, *call_of(engine))
    assert 0.1 <= time.monotonic() - began < 0.1 + SLACK_S
    await end(gate, engine)


@pytest.mark.proves("R1", "R8")
@pytest.mark.parametrize("exclusive", STYLES)
async def test_a_ping_that_blocks_is_answered_within_its_bound_and_a_second(engine: BlockedEngine, exclusive: bool) -> None:
    gate = gate_of(engine, exclusive=exclusive, bound_s=30, ping=0.1)
    began = time.monotonic()
    assert not await gate.probe()
    assert 0.1 <= time.monotonic() - began < 0.1 + SLACK_S
    await end(gate, engine)


@pytest.mark.proves("R2")
@pytest.mark.parametrize("exclusive", STYLES)
@pytest.mark.parametrize("enter", ENTRIES)
@pytest.mark.parametrize(
    ("method", "declared_s", "default_s", "expected"),
    [
        ("load", 0.05, 30.0, "0.05 s"),  # shorter than the default
        ("run", None, 0.05, "0.05 s"),  # none is declared
        ("load", 0.15, 0.05, "0.15 s"),  # longer than the default
    ],
)
async def test_a_declared_bound_beats_the_default_however_the_call_is_made(
    engine: BlockedEngine,
    exclusive: bool,
    enter: Callable[..., Any],
    method: str,
    declared_s: float | None,
    default_s: float,
    expected: str,
) -> None:
    declared = {} if declared_s is None else {method: declared_s}
    gate = gate_of(engine, exclusive=exclusive, bound_s=default_s, **declared)
    assert gate.bound_of(getattr(engine, method)) == (default_s if declared_s is None else declared_s)
    with pytest.raises(ExecutionTimeout, match=f"bound of {expected}"):
        await enter(gate, getattr(engine, method))
    await end(gate, engine)


@pytest.mark.proves("R2")
async def test_the_bound_counts_from_the_start_of_the_call_and_not_from_its_turn(engine: BlockedEngine) -> None:
    gate = gate_of(engine, exclusive=True, bound_s=0.3)
    first = asyncio.create_task(gate(engine.run))
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.when_open(time.monotonic))
    with pytest.raises(ExecutionTimeout):
        await first
    engine.let_go.set()
    assert await second > 0  # it waited longer than its own bound
    await end(gate, engine)


@pytest.mark.proves("R3")
@pytest.mark.parametrize(
    ("method", "bound_s"), [("ping", 10.0), *((name, 3600.0) for name in ("capture", "load", "load_adapter", "restore", "create_adapter"))]
)
def test_declared_bounds(method: str, bound_s: float) -> None:
    assert DECLARED_BOUNDS_S[method] == bound_s


@pytest.mark.proves("R3")
def test_nothing_else_has_a_bound_of_its_own() -> None:
    assert set(DECLARED_BOUNDS_S) == {"ping", "capture", "load", "load_adapter", "restore", "create_adapter"}


@pytest.mark.proves("R4")
def test_the_execution_bound_is_half_an_hour_unless_configured() -> None:
    assert ExecutionConfig().timeout_s == 1800.0


@pytest.mark.proves("R4")
@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_an_execution_bound_that_is_not_positive_and_finite_is_a_fault_of_the_configuration(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"execution\.timeout_s"):
        validate({"models": [{"name": "org/tiny"}], "execution": {"timeout_s": timeout_s}})
