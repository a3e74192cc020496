"""What a trainer reports of its commands, its restores and its snapshots, through the whole executor with the fake engine."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id

from tests.fakes.training import ALWAYS, BASE, LORA, World, lane_of, optim, resident, train, until
from tinsmith import telemetry
from tinsmith.deployments.tracing import OpenTelemetryTracer
from tinsmith.protocol.training import CreateModel, Kind, TrainingCommand
from tinsmith.queue.executor import SnapshotPolicy
from tinsmith.state.lanes import LaneLimits, Submission
from tinsmith.telemetry import Measurement

STEPS: list[TrainingCommand] = [CreateModel(lora=LORA), train(1, 2), optim(), train(3, 4, 5)]
CLIENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "checkpoints", limits=LaneLimits(hole_grace_ms=40, lease_ms=200))
    yield world
    await world.close()


@pytest.fixture
def measured() -> Iterator[list[Measurement]]:
    found: list[Measurement] = []
    with telemetry.recording(found.append):
        yield found


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.trace_to(OpenTelemetryTracer(SimpleSpanProcessor(exporter), "trainer"))
    yield exporter
    telemetry.trace_to(None)


class Broken:
    """Raises in the named operation, so often."""

    def __init__(self, operation: str, times: int = 1) -> None:
        self._operation = operation
        self._times = times

    def __call__(self, operation: str, subject: str) -> None:
        if operation == self._operation and self._times > 0:
            self._times -= 1
            raise RuntimeError("broken, with a planted-secret")


def total(measured: list[Measurement], name: str, **labels: str) -> float:
    return sum(one.value for one in measured if one.name == name and labels.items() <= dict(one.labels).items())


def last(measured: list[Measurement], name: str) -> float:
    return next(one.value for one in reversed(measured) if one.name == name)


async def test_commands_are_counted_by_kind_and_outcome_and_timed(world: World, measured: list[Measurement]) -> None:
    await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: total(measured, telemetry.EXECUTIONS) == len(STEPS))
    completed = {"outcome": "completed", "reason": "", "base_model": BASE}
    assert total(measured, telemetry.EXECUTIONS, kind="forward_backward", **completed) == 2
    assert total(measured, telemetry.EXECUTIONS, kind="create_model", **completed) == 1
    assert total(measured, telemetry.TOKENS, kind="trained", base_model=BASE) == 5
    times = [one for one in measured if one.name == telemetry.EXECUTION]
    assert [dict(one.labels)["kind"] for one in times] == [command.kind for command in STEPS]
    assert all(one.value > 0 for one in times)


async def test_a_failure_counts_under_its_reason_taints_and_leads_to_a_restore(world: World, measured: list[Measurement]) -> None:
    await world.start(world.build("a", before=Broken("forward_backward")))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: total(measured, telemetry.EXECUTIONS) == len(STEPS))
    assert total(measured, telemetry.EXECUTIONS, kind="forward_backward", outcome="failed", reason="internal_error") == 1
    assert total(measured, telemetry.TAINTS, reason="internal_error", base_model=BASE) == 1
    assert total(measured, telemetry.RESTORES, cause="tainted", outcome="completed", base_model=BASE) == 1
    assert total(measured, telemetry.RESTORES, cause="acquired") == 0  # a new model had nothing to restore
    assert total(measured, telemetry.TOKENS) == 3  # the failed one trained nothing
    assert [dict(one.labels) for one in measured if one.name == telemetry.RESTORE] == [{"base_model": BASE, "cause": "tainted"}]


async def test_a_lane_that_is_taken_over_is_a_restore_of_that_cause(world: World, measured: list[Measurement]) -> None:
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    first.kill()
    await world.bury(first)
    await world.start(world.build("b"))
    await world.settled(await world.submit(len(STEPS), optim()))
    assert total(measured, telemetry.RESTORES, cause="acquired", outcome="completed") == 1


async def test_a_restore_that_fails_is_counted_as_failed(world: World, measured: list[Measurement]) -> None:
    first = await world.start(world.build("a", snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await first.stop()
    await world.start(world.build("b", before=Broken("restore")))
    await world.all_settled(await world.submit_all([optim(), optim()], first=len(STEPS)))
    assert total(measured, telemetry.RESTORES, cause="acquired", outcome="failed") == 1
    assert total(measured, telemetry.RESTORES, outcome="completed") == 1


async def test_snapshots_are_counted_timed_and_weighed_and_end_the_lag(world: World, measured: list[Measurement]) -> None:
    replica = await world.start(world.build("a", snapshots=SnapshotPolicy(max_bytes=1 << 40, max_engine_s=1e9)))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: total(measured, telemetry.EXECUTIONS) == len(STEPS) and resident(replica).is_idle)
    assert last(measured, telemetry.SNAPSHOT_LAG_BYTES) == resident(replica).lag_bytes > 0
    assert last(measured, telemetry.SNAPSHOT_LAG_ENGINE) == resident(replica).lag_engine_s > 0
    await replica.stop()
    assert total(measured, telemetry.SNAPSHOTS, base_model=BASE, outcome="completed") == 1
    assert [dict(one.labels) for one in measured if one.name == telemetry.SNAPSHOT] == [{"base_model": BASE}]
    assert last(measured, telemetry.SNAPSHOT_LAG_BYTES) == last(measured, telemetry.SNAPSHOT_LAG_ENGINE) == 0
    assert total(measured, telemetry.SNAPSHOT_BYTES, base_model=BASE) > 0


async def test_a_snapshot_that_fails_leaves_the_lag_as_it_is(world: World, measured: list[Measurement]) -> None:
    replica = await world.start(world.build("a", snapshots=ALWAYS, before=Broken("capture", times=100)))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: total(measured, telemetry.EXECUTIONS) == len(STEPS) and resident(replica).is_idle)
    lags = [one.value for one in measured if one.name == telemetry.SNAPSHOT_LAG_BYTES]
    assert lags == sorted(lags)
    assert resident(replica).trimmable_bytes == 0
    assert lags[-1] > 0
    assert total(measured, telemetry.SNAPSHOTS, outcome="failed") > 0


async def test_of_a_replay_the_lag_keeps_the_time(world: World) -> None:
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    first.kill()
    await world.bury(first)
    second = await world.start(world.build("b"))
    await world.settled(await world.submit(len(STEPS), train(9)))
    await until(lambda: resident(second).is_idle)
    assert resident(second).unsaved_engine_s > 0
    assert resident(second).engine_s > 0


async def submit_traced(world: World, seq: int, command: TrainingCommand, trace: str) -> str:
    """As a gateway that traces submits."""
    real = world.lanes.submit

    async def submit(submission: Submission) -> object:
        values = {name: getattr(submission, name) for name in submission.__slots__}
        return await real(Submission(**values | {"trace": trace}))

    world.lanes.submit = submit  # type: ignore[method-assign, assignment]
    try:
        return await world.submit(seq, command)
    finally:
        world.lanes.submit = real  # type: ignore[method-assign]


async def test_a_command_joins_the_trace_of_its_request_down_to_the_engine_call(world: World, spans: InMemorySpanExporter) -> None:
    rids = [await submit_traced(world, seq, command, CLIENT) for seq, command in enumerate(STEPS[:2])]
    world.now_ms += 1_500
    replica = await world.start(world.build("a"))
    await world.all_settled(rids)
    await until(lambda: resident(replica).is_idle)
    found = {(span.name, span.attributes.get("kind") or span.attributes.get("call")): span for span in spans.get_finished_spans()}
    assert {format_trace_id(span.context.trace_id) for _, span in found.items()} >= {"a" * 32}
    command, call = found["executor.command", "forward_backward"], found["engine.call", "run"]
    assert format_trace_id(command.context.trace_id) == format_trace_id(call.context.trace_id) == "a" * 32
    assert call.parent.span_id == command.context.span_id
    attributes = dict(command.attributes)
    assert attributes.pop("request_id") == rids[1]
    assert attributes == {"kind": "forward_backward", "lane": lane_of(), "seq": 1, "queue_wait_s": 1.5, "outcome": "completed"}


async def test_a_command_that_nobody_traces_costs_no_read_of_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    real = world.lanes.look
    replica = await world.start(world.build("a"))

    async def look(tenant: str, rid: str) -> object:
        looked.append(rid)
        return await real(tenant, rid)

    monkeypatch.setattr(world.lanes, "look", look)
    await world.submit_all(STEPS)
    await until(lambda: len(replica.engine.ran) == len(STEPS) - 1)
    assert looked == []


async def test_a_span_tells_the_reason_of_a_failure_and_not_its_text(world: World, spans: InMemorySpanExporter) -> None:
    await world.start(world.build("a", before=Broken("forward_backward")))
    rids = [await submit_traced(world, seq, command, CLIENT) for seq, command in enumerate(STEPS[:2])]
    await world.all_settled(rids)
    found = [span for span in spans.get_finished_spans() if span.attributes.get("kind") == "forward_backward"]
    assert [dict(span.attributes)["reason"] for span in found] == ["internal_error"]
    assert "planted-secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


@pytest.mark.proves("R15")
async def test_the_traceback_of_a_failed_command_is_logged_under_its_request_id(world: World) -> None:
    stream = StringIO()
    root = logging.getLogger(telemetry.ROOT_LOGGER)
    before = (root.handlers[:], root.level, root.propagate)
    telemetry.configure_logging("trainer", format="json", stream=stream)
    try:
        await world.start(world.build("a", before=Broken("forward_backward")))
        rids = await world.submit_all(STEPS)
        await world.all_settled(rids)
        await until(lambda: "planted-secret" in stream.getvalue())
        await asyncio.sleep(0)
    finally:
        root.handlers[:], root.level, root.propagate = before
    (line,) = [fields for fields in map(json.loads, stream.getvalue().splitlines()) if "planted-secret" in fields["message"]]
    assert (line["request_id"], line["process"]) == (rids[1], "trainer")
    assert Kind.FORWARD_BACKWARD in line["message"]
