"""One request seen from outside: its trace from the client's header to the engine call, its metrics, and no key anywhere."""

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id

from tests.fakes.in_process import BASE, serve
from tinsmith import telemetry
from tinsmith.deployments.tracing import OpenTelemetryTracer
from tinsmith.telemetry import Measurement

TRACE_ID = "a" * 32
CLIENT = {"traceparent": f"00-{TRACE_ID}-{'b' * 16}-01"}
KEY = "tml-planted-0123456789abcdef"
RESULT_S = 20


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.trace_to(OpenTelemetryTracer(SimpleSpanProcessor(exporter), "server"))
    yield exporter
    telemetry.trace_to(None)


@pytest.fixture
def measured() -> Iterator[list[Measurement]]:
    found: list[Measurement] = []
    with telemetry.recording(found.append):
        yield found


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger(telemetry.ROOT_LOGGER)
    before = (root.handlers[:], root.level, root.propagate)
    telemetry.configure_logging("server", format="json", level="DEBUG", stream=stream)
    yield stream
    root.handlers[:], root.level, root.propagate = before


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    with serve(tmp_path) as server, httpx.Client(base_url=f"{server.url}/api/v1", timeout=RESULT_S) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def result(http: httpx.Client, submitted: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + RESULT_S
    while time.monotonic() < deadline:
        answer = http.post("/retrieve_future", json={"request_id": submitted["request_id"]})
        if answer.json().get("type") != "try_again":
            found: dict[str, Any] = answer.json()
            return found
    raise AssertionError("no result")


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    session_id = post(http, "/create_session", {"tags": [], "user_metadata": {"note": KEY}, "sdk_version": "0.38.0"})["session_id"]
    yield session_id
    http.post(f"/sessions/{session_id}/finish", json={})


@pytest.fixture
def model(http: httpx.Client, session: str) -> str:
    submitted = post(http, "/create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}})
    result(http, submitted)
    return str(submitted["model_id"])


def forward_backward(model: str) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}},
    }
    return {"model_id": model, "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans of the client's trace."""
    ours = [span for span in spans.get_finished_spans() if format_trace_id(span.context.trace_id) == TRACE_ID]
    return {span.name: span for span in ours}


def test_one_trace_leads_from_the_clients_header_to_the_engine_call(http: httpx.Client, model: str, spans: InMemorySpanExporter) -> None:
    submitted = post(http, "/forward_backward", forward_backward(model), **CLIENT)
    assert result(http, submitted)["loss_fn_output_type"]
    found = by_name(spans)
    request, command, call = (found[name] for name in (telemetry.SPAN_REQUEST, telemetry.SPAN_COMMAND, telemetry.SPAN_CALL))
    assert command.parent.span_id == request.context.span_id
    assert call.parent.span_id == command.context.span_id
    assert request.attributes["route"] == "/api/v1/forward_backward"
    assert command.attributes["request_id"] == submitted["request_id"]
    assert command.attributes["queue_wait_s"] >= 0
    assert call.attributes["call"] == "run"


def test_a_sample_joins_the_trace_of_its_request(http: httpx.Client, session: str, spans: InMemorySpanExporter) -> None:
    sampler = post(http, "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE})
    body = {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
        "num_samples": 1,
    }
    assert result(http, post(http, "/asample", body, **CLIENT))["sequences"]
    found = by_name(spans)
    assert found[telemetry.SPAN_COMMAND].parent.span_id == found[telemetry.SPAN_REQUEST].context.span_id
    assert found[telemetry.SPAN_COMMAND].attributes["kind"] == telemetry.SAMPLE


def test_no_key_of_a_caller_is_found_in_logs_metrics_or_spans(
    http: httpx.Client, spans: InMemorySpanExporter, measured: list[Measurement], log: io.StringIO, model: str
) -> None:
    http.headers.update({"x-api-key": KEY, "authorization": f"Bearer {KEY}", "traceparent": KEY, "tracestate": f"k={KEY}"})
    result(http, post(http, "/forward_backward", forward_backward(model)))
    assert http.post("/forward_backward", json=forward_backward(model) | {"seq_id": KEY}).is_client_error
    assert http.post(
        "/create_model", content=f'{{"api_key": "{KEY}"'.encode(), headers={"content-type": "application/json"}
    ).is_client_error
    assert http.get(f"/samplers/{KEY}").status_code == 404
    assert http.get(f"/{KEY}", params={"api_key": KEY}).status_code == 404
    logging.getLogger("tinsmith.tests").info("the log is heard")
    told = log.getvalue() + str(measured) + "".join(span.to_json() for span in spans.get_finished_spans())
    assert "the log is heard" in told
    assert telemetry.HTTP_REQUESTS in told
    assert telemetry.SPAN_COMMAND in told
    assert KEY not in told
