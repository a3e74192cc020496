"""Names and helpers for logs, metrics and traces; knows nothing of what is measured, nor of who collects it.

Logs go to stderr of their process, as text or as one JSON object a line, and carry the request id that is bound at that moment.
Measurements are passed to the sinks of the process, trace spans to its tracer; with none, which is the default, recording one costs a loop
over nothing. Deployments install both.

Labels and attributes say what kind of thing was done, never with what: no content of a request, no key. The values of a label are few (base
model, kind, outcome, reason, role, route template, call); ids of models, requests and tenants are none. An attribute of a trace span may be
an id.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal, Protocol, TextIO

ROOT_LOGGER = "tinsmith"
LogFormat = Literal["text", "json"]

# Names of measurements that are logged and not exported.
START_MODELS = "start.models"  # resolving (and at first converting) the base models
START_RAY = "start.ray"
START_SERVE = "start.serve"
START_DEPLOYMENTS = "start.deployments"  # until every replica can take work

# Names of metrics: `METRICS` below says what each means. One place, so that dashboards, docs and code cannot drift apart.
QUEUE_DEPTH = "queue_depth"
QUEUE_OLDEST_AGE = "queue_oldest_age_seconds"
REPLICAS = "replicas"
REPLICAS_HEALTHY = "replicas_healthy"
SLOTS = "slots"
SLOTS_USED = "slots_used"
WORKER_LOAD = "worker_load_seconds"
GATE_SHUT = "gate_shut"
GATE_WAITING = "gate_waiting"
GATE_CALL = "gate_call_seconds"
EXECUTIONS = "executions_total"
EXECUTION = "execution_seconds"
TOKENS = "tokens_total"
RESTORES = "restores_total"
RESTORE = "restore_seconds"
TAINTS = "taints_total"
SNAPSHOTS = "snapshots_total"
SNAPSHOT = "snapshot_seconds"
SNAPSHOT_BYTES = "snapshot_bytes_total"
SNAPSHOT_LAG_BYTES = "snapshot_lag_bytes"
SNAPSHOT_LAG_ENGINE = "snapshot_lag_engine_seconds"
LOGPROB_GAP = "logprob_gap"
HTTP_REQUESTS = "http_requests_total"
HTTP_REQUEST = "http_request_seconds"
LONG_POLLS_WAITING = "long_polls_waiting"
STREAMS_OPEN = "streams_open"
EVENT_RESYNCS = "event_resyncs_total"
STATE_CALLS = "state_calls_total"
STORE_ERRORS = "store_errors_total"

# Values of the label `kind` of TOKENS.
TRAINED = "trained"
SAMPLED = "sampled"
PROMPT = "prompt"

SAMPLE = "sample"  # the label `kind` of a sample, beside `protocol.training.Kind`

# Names of the spans of a trace, from the outside in.
SPAN_REQUEST = "gateway.request"
SPAN_COMMAND = "executor.command"
SPAN_CALL = "engine.call"

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_trace: ContextVar[str] = ContextVar("trace", default="")


class MetricKind(StrEnum):
    """COUNTER: grows. GAUGE: is set. HISTOGRAM: a distribution of values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Among(StrEnum):
    """What a gauge's values of several live processes come to."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, exported under `EXPORT_PREFIX` + name. `buckets`: upper bounds of a histogram."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    among: Among = Among.SUM

    @property
    def exported_name(self) -> str:
        return EXPORT_PREFIX + self.name


EXPORT_PREFIX = "tinsmith_"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0)
_NATS = (-1.0, -0.3, -0.1, -0.03, -0.01, -0.003, -0.001, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str, among: Among = Among.SUM) -> Metric:
    return Metric(name, MetricKind.GAUGE, help, labels, among=among)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = _SHORT_S) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help, labels, buckets)


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _gauge(QUEUE_DEPTH, "commands and samples that are pending or running, read from the store at the scrape", "base_model", "role"),
        _gauge(QUEUE_OLDEST_AGE, "age of the oldest one that nothing has begun, in s, read from the store", "base_model", "role"),
        _gauge(REPLICAS, "live processes, read from the store at the scrape", "base_model", "role"),
        _gauge(REPLICAS_HEALTHY, "live processes whose engine answers its ping, read from the store", "base_model", "role"),
        _gauge(SLOTS, "adapters (trainer) or sequences (sampler) that fit, read from the store", "base_model", "role"),
        _gauge(SLOTS_USED, "adapters, sequences or requests (gateway) that are held, read from the store", "base_model", "role"),
        _histogram(WORKER_LOAD, "time to build an engine, weights included, in s", "role", buckets=_LONG_S),
        _gauge(GATE_SHUT, "engines that take no call, since one that timed out still runs"),
        _gauge(GATE_WAITING, "engine calls that wait for their turn"),
        _histogram(GATE_CALL, "time of an engine call, in s, until it really ended", "call", buckets=_LONG_S),
        _counter(EXECUTIONS, "commands and samples that were settled by a worker", "base_model", "kind", "outcome", "reason"),
        _histogram(EXECUTION, "time from take to outcome of a command or sample, in s", "base_model", "kind", buckets=_LONG_S),
        _counter(TOKENS, "tokens of completed work: trained, sampled, or prompt of a sample", "base_model", "kind"),
        _counter(RESTORES, "adapters built anew: acquired (from another owner, or a new model), tainted", "base_model", "cause", "outcome"),
        _histogram(RESTORE, "time to build an adapter anew, in s", "base_model", "cause", buckets=_LONG_S),
        _counter(TAINTS, "commands that may have left half an effect, so that the adapter is rebuilt", "base_model", "reason"),
        _counter(SNAPSHOTS, "snapshots of a lane that were tried", "base_model", "outcome"),
        _histogram(SNAPSHOT, "time of a snapshot, from capture to commit, in s", "base_model", buckets=_LONG_S),
        _counter(SNAPSHOT_BYTES, "bytes of snapshots written", "base_model"),
        _gauge(
            SNAPSHOT_LAG_BYTES,
            "log of a trainer's lanes since their snapshots; of the trainer that has most",
            "base_model",
            among=Among.MAX,
        ),
        _gauge(
            SNAPSHOT_LAG_ENGINE,
            "engine time that the death of a trainer would repeat, in s; of the trainer that has most",
            "base_model",
            among=Among.MAX,
        ),
        _histogram(
            LOGPROB_GAP,
            "mean over a command's rows with an advantage of sampler log-prob minus trainer log-prob, in nats",
            "base_model",
            buckets=_NATS,
        ),
        _counter(HTTP_REQUESTS, "HTTP requests answered", "route", "method", "status"),
        _histogram(HTTP_REQUEST, "time to the end of the answer, in s; long polls and streams included", "route", "method"),
        _gauge(LONG_POLLS_WAITING, "callers that wait for a result"),
        _gauge(STREAMS_OPEN, "answers that are being streamed"),
        _counter(EVENT_RESYNCS, "times that a reader of the event log fell behind or found it trimmed, and looked at every record"),
        _counter(STATE_CALLS, "calls to the process that holds the memory store", "operation"),
        _counter(STORE_ERRORS, "calls that the state store did not answer"),
    )
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """`value`: the increment of a count, what a gauge is set to, or one observation of a histogram (seconds, for a span)."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: MetricKind = MetricKind.COUNTER


class Tracer(Protocol):
    """What spans of traces are handed to (`deployments.tracing`)."""

    def span(self, name: str, parent: str, attributes: Mapping[str, str | int | float]) -> AbstractContextManager["Traced"]:
        """A span under `parent`, a W3C traceparent; of a new trace where that is empty or malformed. An exception marks the span as failed
        and leaves only its type there."""
        ...

    def ended(self, name: str, parent: str, attributes: Mapping[str, str | int | float], *, seconds: float) -> None:
        """A span as `span` makes one, of something that took `seconds` and ended now."""
        ...


class Traced:
    """The span of a running block. `parent`: W3C traceparent for its children, empty where nothing is traced."""

    parent: str = ""

    def note(self, **attributes: str | int | float) -> None:
        """Add attributes, known only now."""


Sink = Callable[[Measurement], None]
_sinks: list[Sink] = []
_tracers: list[Tracer] = []  # one at most; a list, as the sinks are
_UNTRACED = Traced()


def record_to(sink: Sink) -> None:
    """Pass every measurement of this process to `sink` from now on."""
    _sinks.append(sink)


@contextmanager
def recording(sink: Sink) -> Iterator[None]:
    """Pass every measurement of this process to `sink` while the block runs."""
    record_to(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def count(name: str, value: float = 1.0, **labels: str) -> None:
    """Add to a counter."""
    _record(name, value, labels, MetricKind.COUNTER)


def gauge(name: str, value: float, **labels: str) -> None:
    """Set what this process holds of a gauge."""
    _record(name, value, labels, MetricKind.GAUGE)


def observe(name: str, value: float, **labels: str) -> None:
    """Add one value to a histogram."""
    _record(name, value, labels, MetricKind.HISTOGRAM)


@contextmanager
def span(name: str, **labels: str) -> Iterator[None]:
    """Observe the time of the block in s, also where it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        observe(name, time.monotonic() - began, **labels)


def trace_to(tracer: Tracer | None) -> None:
    """Hand every span of a trace of this process to `tracer` from now on; None: to nobody."""
    _tracers[:] = [] if tracer is None else [tracer]


@contextmanager
def traced(name: str, parent: str = "", **attributes: str | int | float) -> Iterator[Traced]:
    """A span of a trace around the block, under `parent` (a W3C traceparent), or else under the span that runs in this context."""
    with _open_span(name, parent or current_trace(), attributes) as opened:
        token = _trace.set(opened.parent)
        try:
            yield opened
        finally:
            _trace.reset(token)


def traced_inside(name: str, **attributes: str | int | float) -> AbstractContextManager[Traced]:
    """As `traced`, where a span runs in this context already; nothing elsewhere."""
    return traced(name, "", **attributes) if current_trace() else nullcontext(_UNTRACED)


def trace_ended(name: str, seconds: float, parent: str, **attributes: str | int | float) -> None:
    """As `traced`, for what runs interleaved with others: it took `seconds` and ended now. Nothing where `parent` is empty."""
    for tracer in _tracers if parent else ():
        tracer.ended(name, parent, attributes, seconds=seconds)


def current_trace() -> str:
    """W3C traceparent of the span that runs in this context; empty where nothing is traced."""
    return _trace.get()


def _open_span(name: str, parent: str, attributes: Mapping[str, str | int | float]) -> AbstractContextManager[Traced]:
    for tracer in _tracers:
        return tracer.span(name, parent, attributes)
    return nullcontext(_UNTRACED)


@contextmanager
def bound_request(request_id: str) -> Iterator[None]:
    """Every log line of the block (and of tasks that it starts) carries this request id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request() -> str | None:
    return _request_id.get()


def configure_logging(process: str, *, format: LogFormat = "text", level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send this project's loggers to `stream` (default: stderr), once a process; a repeat replaces the former setting.

    `process` names the role in each line (gateway, trainer ...). Loggers of other projects are left as they are.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.addFilter(_bind)
    handler.setFormatter(_JsonFormatter(process) if format == "json" else _TextFormatter(process))
    logger = logging.getLogger(ROOT_LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _record(name: str, value: float, labels: Mapping[str, str], kind: MetricKind) -> None:
    for sink in tuple(_sinks):
        sink(Measurement(name, value, labels, kind))


def _bind(record: logging.LogRecord) -> bool:
    """Add the request id, unless the caller gave one through `extra`."""
    if not hasattr(record, "request_id"):
        record.request_id = current_request()
    return True


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - name of the standard library
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return line if request_id is None else f"{line} [{request_id}]"


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, str | None] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})
