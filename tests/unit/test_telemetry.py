"""Log lines carry process and request; measurements reach the sinks that listen, and nobody else."""

import asyncio
import io
import json
import logging

import pytest

from tinsmith import telemetry
from tinsmith.telemetry import Measurement

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
