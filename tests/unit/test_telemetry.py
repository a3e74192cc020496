"""Log lines carry process and request; measurements reach the sinks that listen, and nobody else."""

import ast
import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tinsmith import telemetry
from tinsmith.telemetry import Measurement, MetricKind

SOURCE = Path(telemetry.__file__).parent
MEASURING = {  # by what is called: kinds of the metrics that it is meant for
    "telemetry.count": {MetricKind.COUNTER},
    "telemetry.gauge": {MetricKind.GAUGE},
    "telemetry.observe": {MetricKind.HISTOGRAM},
    "telemetry.span": {MetricKind.HISTOGRAM},
}
LOG = logging.getLogger("tinsmith.tests")


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def _restored() -> object:
    root = logging.getLogger(telemetry.ROOT_LOGGER)
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_a_text_line_names_process_logger_and_request(stream: io.StringIO) -> None:
    telemetry.configure_logging("trainer", stream=stream)
    LOG.info("free")
    with telemetry.bound_request("t123"):
        LOG.warning("bound %d", 1)
    free, bound = stream.getvalue().splitlines()
    assert free.endswith("INFO    trainer tinsmith.tests: free")
    assert bound.endswith("WARNING trainer tinsmith.tests: bound 1 [t123]")


def test_a_json_line_holds_the_traceback_and_the_callers_own_request(stream: io.StringIO) -> None:
    telemetry.configure_logging("gateway", format="json", stream=stream)
    try:
        raise ValueError("odd")
    except ValueError:
        LOG.exception("failed", extra={"request_id": "t9"})
    fields = json.loads(stream.getvalue())
    assert (fields["process"], fields["level"], fields["message"], fields["request_id"]) == ("gateway", "ERROR", "failed", "t9")
    assert fields["traceback"].endswith("ValueError: odd")
    assert fields["time"].endswith("+00:00")


def test_a_json_line_leaves_out_what_is_not_there(stream: io.StringIO) -> None:
    telemetry.configure_logging("gateway", format="json", stream=stream)
    LOG.info("plain")
    assert set(json.loads(stream.getvalue())) == {"time", "level", "process", "logger", "message"}


def test_the_level_is_honoured_and_a_repeat_replaces_the_setting(stream: io.StringIO) -> None:
    telemetry.configure_logging("gateway", stream=stream)
    telemetry.configure_logging("gateway", level="ERROR", stream=stream)
    LOG.warning("dropped")
    LOG.error("kept")
    assert [line.rsplit(" ", 1)[1] for line in stream.getvalue().splitlines()] == ["kept"]


def test_logs_go_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("gateway")
    LOG.info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


async def test_tasks_inherit_the_request_and_others_do_not_see_it() -> None:
    async def current() -> str | None:
        return telemetry.current_request()

    with telemetry.bound_request("outer"):
        task = asyncio.create_task(current())
        with telemetry.bound_request("inner"):
            assert telemetry.current_request() == "inner"
        assert telemetry.current_request() == "outer"
    assert await task == "outer"
    assert telemetry.current_request() is None


def test_measurements_reach_the_sinks_of_the_moment() -> None:
    first: list[Measurement] = []
    second: list[Measurement] = []
    telemetry.count("before")
    with telemetry.recording(first.append):
        telemetry.count("hits", 2, operation="get")
        with telemetry.recording(second.append):
            telemetry.count("hits")
    telemetry.count("after")
    assert first == [Measurement("hits", 2, {"operation": "get"}), Measurement("hits", 1.0, {})]
    assert second == [Measurement("hits", 1.0, {})]


def test_a_span_is_measured_also_where_it_raises() -> None:
    found: list[Measurement] = []
    with telemetry.recording(found.append), pytest.raises(KeyError), telemetry.span("work", role="x"):
        raise KeyError
    [measured] = found
    assert (measured.name, dict(measured.labels)) == ("work", {"role": "x"})
    assert measured.value >= 0


def test_gauges_and_histograms_say_what_they_are() -> None:
    found: list[Measurement] = []
    with telemetry.recording(found.append):
        telemetry.gauge(telemetry.GATE_SHUT, 1)
        telemetry.observe(telemetry.GATE_CALL, 0.5, call="run")
        with telemetry.span(telemetry.GATE_CALL, call="ping"):
            pass
    assert [(measured.name, measured.kind) for measured in found] == [
        (telemetry.GATE_SHUT, MetricKind.GAUGE),
        (telemetry.GATE_CALL, MetricKind.HISTOGRAM),
        (telemetry.GATE_CALL, MetricKind.HISTOGRAM),
    ]
    assert found[1].value == 0.5


def test_without_a_tracer_nothing_is_traced() -> None:
    with telemetry.traced("outer", "00-" + "1" * 32 + "-" + "2" * 16 + "-01") as traced:
        traced.note(status=200)
        assert traced.parent == ""
        assert telemetry.current_trace() == ""
        with telemetry.traced_inside("inner") as inner:
            assert inner.parent == ""
    telemetry.trace_ended("late", 1.0, "")


class Recorder:
    """A tracer that numbers its spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    @contextmanager
    def span(self, name: str, parent: str, attributes: Mapping[str, object]) -> Iterator[telemetry.Traced]:
        self.spans.append((name, parent))
        opened = telemetry.Traced()
        opened.parent = f"span-{len(self.spans)}"
        yield opened

    def ended(self, name: str, parent: str, attributes: Mapping[str, object], *, seconds: float) -> None:
        self.spans.append((name, parent))


@pytest.fixture
def tracer() -> Iterator[Recorder]:
    recorder = Recorder()
    telemetry.trace_to(recorder)
    yield recorder
    telemetry.trace_to(None)


async def test_a_span_is_the_parent_of_what_runs_inside_it_and_of_nothing_else(tracer: Recorder) -> None:
    async def inner() -> None:
        with telemetry.traced_inside("call"):
            pass

    with telemetry.traced("request", "from-the-client"):
        await asyncio.create_task(inner())
        assert telemetry.current_trace() == "span-1"
        with telemetry.traced("command", "from-the-lane"):
            pass
    await inner()
    assert telemetry.current_trace() == ""
    assert tracer.spans == [("request", "from-the-client"), ("call", "span-1"), ("command", "from-the-lane")]


def test_what_has_ended_is_traced_only_under_a_parent(tracer: Recorder) -> None:
    telemetry.trace_ended("sample", 1.0, "", kind="sample")
    telemetry.trace_ended("sample", 1.0, "p", kind="sample")
    assert tracer.spans == [("sample", "p")]


@pytest.mark.parametrize("metric", telemetry.METRICS.values(), ids=lambda metric: metric.name)
def test_names_of_metrics_follow_the_conventions_of_prometheus(metric: telemetry.Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert (metric.buckets != ()) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(metric.buckets)
    assert metric.help


def test_whoever_measures_gives_exactly_the_labels_of_the_metric() -> None:
    num_found = 0
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            kinds = MEASURING.get(_called(call))
            metric = None if kinds is None else telemetry.METRICS.get(getattr(telemetry, call.args[0].attr))
            if metric is None:  # logged, not exported
                continue
            num_found += 1
            assert metric.kind in kinds, f"{path}: {ast.unparse(call)}"
            assert {keyword.arg for keyword in call.keywords} == set(metric.labels), f"{path}: {ast.unparse(call)}"
    assert num_found > 20


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_every_metric_that_no_scrape_computes_is_measured_somewhere() -> None:
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    names = {value: name for name, value in vars(telemetry).items() if isinstance(value, str) and name.isupper()}
    unused = [names[name] for name in telemetry.METRICS if not re.search(rf"telemetry\.{names[name]}\b", source)]
    assert unused == []
