"""Spans as OpenTelemetry gets them."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from tinsmith import telemetry
from tinsmith.deployments import tracing
from tinsmith.deployments.tracing import OpenTelemetryTracer, start_tracing, traces_url

CLIENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    tracer = OpenTelemetryTracer(SimpleSpanProcessor(spans), "gateway")
    telemetry.trace_to(tracer)
    yield spans
    telemetry.trace_to(None)
    tracer.close()


def test_children_join_the_trace_of_the_clients_header(exporter: InMemorySpanExporter) -> None:
    with telemetry.traced("request", CLIENT, method="POST") as request:
        with telemetry.traced_inside("call", call="run"):
            pass
        request.note(status=200)
    call, outer = exporter.get_finished_spans()
    assert {format_trace_id(span.context.trace_id) for span in (call, outer)} == {"a" * 32}
    assert format_span_id(outer.parent.span_id) == "b" * 16
    assert call.parent.span_id == outer.context.span_id
    assert request.parent == f"00-{'a' * 32}-{format_span_id(outer.context.span_id)}-01"
    assert dict(outer.attributes) == {"method": "POST", "status": 200}
    assert dict(outer.resource.attributes) == {"service.name": "tinsmith", "service.instance.role": "gateway"}


@pytest.mark.parametrize("parent", ["", "tml-planted-key", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_a_malformed_parent_starts_a_trace_of_its_own(exporter: InMemorySpanExporter, parent: str) -> None:
    with telemetry.traced("request", parent):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert "planted" not in span.to_json()


def test_a_trace_that_the_client_does_not_sample_is_passed_on_and_not_kept(exporter: InMemorySpanExporter) -> None:
    with telemetry.traced("request", CLIENT.removesuffix("01") + "00") as request:
        assert request.parent.startswith(f"00-{'a' * 32}-")
        assert request.parent.endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_of_an_exception_a_span_keeps_the_type_alone(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="planted"), telemetry.traced("request", CLIENT):
        raise ValueError("planted")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes) == {"error.type": "ValueError"}
    assert "planted" not in span.to_json()


def test_what_has_ended_is_dated_back(exporter: InMemorySpanExporter) -> None:
    telemetry.trace_ended("sample", 1.5, CLIENT, kind="sample")
    (span,) = exporter.get_finished_spans()
    assert span.end_time - span.start_time == 1_500_000_000
    assert format_trace_id(span.context.trace_id) == "a" * 32
    assert dict(span.attributes) == {"kind": "sample"}


def test_spans_go_to_the_collector_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    spans = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint: named.append(endpoint) or spans)
    start_tracing("http://collector:4318", "trainer")
    try:
        with telemetry.traced("request"):
            pass
        tracing_to = telemetry._tracers[0]
        assert isinstance(tracing_to, OpenTelemetryTracer)
        tracing_to.close()
    finally:
        telemetry.trace_to(None)
    assert named == ["http://collector:4318/v1/traces"]
    assert [span.name for span in spans.get_finished_spans()] == ["request"]


def test_the_url_is_a_base_or_the_whole() -> None:
    assert traces_url("http://c:4318/") == traces_url("http://c:4318/v1/traces") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp") == "https://c/otlp/v1/traces"
