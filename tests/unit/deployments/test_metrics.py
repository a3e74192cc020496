"""The sink, the files of several processes, and what a scrape reads from the store."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.training import BASE, World, train
from tinsmith import telemetry
from tinsmith.deployments import metrics
from tinsmith.deployments.metrics import Exposition, PrometheusSink, forget_the_dead
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.training import CreateModel, LoraConfig
from tinsmith.state.lanes import GATEWAYS, QueueInfo, Replica, Role
from tinsmith.telemetry import EXPORT_PREFIX, METRICS, Measurement, MetricKind

PROCESS = """
import sys
from tinsmith import telemetry
from tinsmith.config import TelemetryConfig
from tinsmith.deployments.observation import start_observation

start_observation(TelemetryConfig(), sys.argv[1], "trainer")
telemetry.count(telemetry.TOKENS, 100, base_model="b", kind="trained")
telemetry.gauge(telemetry.GATE_SHUT, 1)
telemetry.gauge(telemetry.SNAPSHOT_LAG_BYTES, float(sys.argv[2]), base_model="b")
telemetry.observe(telemetry.GATE_CALL, 0.2, call="run")
telemetry.count("start.ray")
print("written", flush=True)
sys.stdin.read()
"""


def values_of(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, label values) -> value."""
    families = text_string_to_metric_families(text.decode())
    return {(sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples}


class Watched:
    """Lanes with a fixed story."""

    def __init__(self, queues: list[QueueInfo], replicas: list[Replica]) -> None:
        self._queues = queues
        self._replicas = replicas
        self.num_asked = 0

    async def queues(self, base: str) -> list[QueueInfo]:
        self.num_asked += 1
        return [queue for queue in self._queues if queue.base == base]

    async def replicas(self, base: str) -> list[Replica]:
        self.num_asked += 1
        return [replica for replica in self._replicas if replica.base == base]


def exposition(directory: Path, lanes: object, *bases: str, now_ms: int = 10_000) -> Exposition:
    async def now() -> int:
        return now_ms

    return Exposition(directory, lanes, now, bases)  # type: ignore[arg-type]


def test_every_metric_is_exported_under_its_name() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    for metric in METRICS.values():
        sink(Measurement(metric.name, 1.0, dict.fromkeys(metric.labels, "x"), metric.kind))
    found = {name for name, _ in values_of(generate_latest(registry))}
    suffix = {MetricKind.HISTOGRAM: "_count"}
    assert found >= {EXPORT_PREFIX + name + suffix.get(METRICS[name].kind, "") for name in METRICS if name not in metrics._STORE_METRICS}


def test_counters_grow_gauges_are_set_histograms_observe() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    with telemetry.recording(sink):
        for value in (2.0, 3.0):
            telemetry.count(telemetry.STORE_ERRORS, value)
            telemetry.gauge(telemetry.STREAMS_OPEN, value)
            telemetry.observe(telemetry.GATE_CALL, value, call="run")
            telemetry.count("start.ray", value)
    found = values_of(generate_latest(registry))
    assert found["tinsmith_store_errors_total", ()] == 5
    assert found["tinsmith_streams_open", ()] == 3
    assert found["tinsmith_gate_call_seconds_sum", ("run",)] == 5
    assert not [name for name, _ in found if "start" in name]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], "subprocess.Popen[str]"]:
    """Start a process that has measured, and waits for its end."""

    def started(lag: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PROCESS, str(tmp_path), str(lag)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        return process

    return started


async def test_a_scrape_merges_the_processes_of_a_node_and_forgets_the_gauges_of_the_dead(
    tmp_path: Path, start: Callable[[int], "subprocess.Popen[str]"]
) -> None:
    scrape = exposition(tmp_path, Watched([], []))
    processes = [start(10), start(30)]
    both = values_of(await scrape())
    assert both["tinsmith_tokens_total", ("b", "trained")] == 200
    assert both["tinsmith_gate_shut", ()] == 2
    assert both["tinsmith_snapshot_lag_bytes", ("b",)] == 30
    assert both["tinsmith_gate_call_seconds_count", ("run",)] == 2

    processes[1].communicate("")
    one = values_of(await scrape())
    assert one["tinsmith_gate_shut", ()] == 1
    assert one["tinsmith_snapshot_lag_bytes", ("b",)] == 10
    assert one["tinsmith_tokens_total", ("b", "trained")] == 200
    assert one["tinsmith_gate_call_seconds_count", ("run",)] == 2
    processes[0].communicate("")


def test_only_gauges_of_processes_that_are_gone_are_deleted(tmp_path: Path) -> None:
    gone = next(pid for pid in range(2_000_000, 3_000_000) if not psutil.pid_exists(pid))
    for name in (f"gauge_livesum_{gone}.db", f"counter_{gone}.db", f"gauge_livesum_{os.getpid()}.db", "gauge_live_odd.db"):
        (tmp_path / name).touch()
    forget_the_dead(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {f"counter_{gone}.db", f"gauge_livesum_{os.getpid()}.db", "gauge_live_odd.db"}


def queue(base: str, role: Role, num_pending: int, oldest_ms: int | None) -> QueueInfo:
    return QueueInfo(lane="l", tenant="t", base=base, role=role, owner=None, num_pending=num_pending, oldest_ms=oldest_ms)


def replica(base: str, role: Role, **of: object) -> Replica:
    return Replica(id="r", base=base, node="n", pid=1, started="0", role=role, **of)  # type: ignore[arg-type]


async def test_queues_and_processes_come_from_the_store_at_the_scrape(tmp_path: Path) -> None:
    lanes = Watched(
        [queue("a", Role.TRAINER, 3, 4_000), queue("a", Role.TRAINER, 2, 7_000), queue("a", Role.SAMPLER, 1, None)],
        [
            replica("a", Role.TRAINER, num_used=2, num_slots=8),
            replica("a", Role.TRAINER, is_healthy=False, num_used=1, num_slots=8),
            replica(GATEWAYS, Role.GATEWAY, num_used=5),
        ],
    )
    scrape = exposition(tmp_path, lanes, "a")
    assert lanes.num_asked == 0
    found = values_of(await scrape())
    trainers, samplers = ("a", "trainer"), ("a", "sampler")
    assert (found["tinsmith_queue_depth", trainers], found["tinsmith_queue_depth", samplers]) == (5, 1)
    assert (found["tinsmith_queue_oldest_age_seconds", trainers], found["tinsmith_queue_oldest_age_seconds", samplers]) == (6, 0)
    assert (found["tinsmith_replicas", trainers], found["tinsmith_replicas", samplers]) == (2, 0)
    assert found["tinsmith_replicas_healthy", trainers] == 1
    assert (found["tinsmith_slots_used", trainers], found["tinsmith_slots", trainers]) == (3, 16)
    assert found["tinsmith_slots_used", ("", "gateway")] == 5


async def test_the_real_lanes_answer_what_a_scrape_asks(tmp_path: Path) -> None:
    world = World(tmp_path / "world")
    await world.submit_all([CreateModel(lora=LoraConfig(rank=8, seed=1)), train(1, 2)])
    world.now_ms += 2_500
    directory = tmp_path / "metrics"
    directory.mkdir()
    found = values_of(await Exposition(directory, world.lanes, world.store.now_ms, [BASE])())
    assert found["tinsmith_queue_depth", (BASE, "trainer")] == 2
    assert found["tinsmith_queue_oldest_age_seconds", (BASE, "trainer")] == 2.5


async def test_while_the_store_is_away_the_node_still_tells_of_itself(
    tmp_path: Path, start: Callable[[int], "subprocess.Popen[str]"]
) -> None:
    class Away:
        async def queues(self, _: str) -> list[QueueInfo]:
            raise StateContention("away")

    process = start(1)
    found = values_of(await exposition(tmp_path, Away(), "a")())
    assert ("tinsmith_queue_depth", ("a", "trainer")) not in found
    assert found["tinsmith_gate_shut", ()] == 1
    process.communicate("")


async def test_a_store_that_hangs_does_not_hold_a_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung:
        async def queues(self, _: str) -> list[QueueInfo]:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(metrics, "STORE_S", 0.01)
    assert values_of(await exposition(tmp_path, Hung(), "a")()) == {}


async def test_files_are_read_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    real = metrics._rendered
    monkeypatch.setattr(metrics, "_rendered", lambda *given: threads.append(threading.get_ident()) or real(*given))
    await exposition(tmp_path, Watched([], []))()
    assert threads != [threading.get_ident()]
