"""Traces of a process, sent to an OTLP/HTTP collector with the OpenTelemetry SDK.

Imported only where `telemetry.otlp_endpoint` is set: the packages are an extra (`tinsmith[tracing]`). Parents travel as W3C traceparents,
in headers and with commands, so OpenTelemetry's own context is not used. Of an exception a span keeps the type: its text may quote what
a caller sent.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinsmith import telemetry
from tinsmith.telemetry import Traced

SERVICE = "tinsmith"
TRACES_PATH = "/v1/traces"
_HEADER = "traceparent"
_W3C = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float]


class OpenTelemetryTracer:
    """`telemetry.Tracer` over a span processor. `process`: the role of this process, part of the resource of its spans."""

    def __init__(self, processor: SpanProcessor, process: str) -> None:
        self._provider = TracerProvider(resource=Resource({"service.name": SERVICE, "service.instance.role": process}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)

    @contextmanager
    def span(self, name: str, parent: str, attributes: Attributes) -> Iterator[Traced]:
        span = self._tracer.start_span(name, _context_of(parent), attributes=dict(attributes))
        try:
            yield _OpenSpan(span)
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.end()

    def ended(self, name: str, parent: str, attributes: Attributes, *, seconds: float) -> None:
        end_ns = time.time_ns()
        span = self._tracer.start_span(name, _context_of(parent), attributes=dict(attributes), start_time=end_ns - round(seconds * 1e9))
        span.end(end_ns)

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


class _OpenSpan(Traced):
    def __init__(self, span: Span) -> None:
        self._span = span
        self.parent = _traceparent_of(span)

    def note(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(attributes)


def start_tracing(endpoint: str, process: str) -> None:
    """Send the spans of this process to the collector at `endpoint`, from a thread of the SDK, until the process ends."""
    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
    telemetry.trace_to(OpenTelemetryTracer(BatchSpanProcessor(exporter), process))


def traces_url(endpoint: str) -> str:
    """Where a collector takes traces; `endpoint` is its base URL, or that path already."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _context_of(parent: str) -> Context:
    """A malformed parent is none."""
    return _W3C.extract({_HEADER: parent}, Context())


def _traceparent_of(span: Span) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(_HEADER, "")
