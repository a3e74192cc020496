"""Names and helpers for logs, metrics and spans; knows nothing of what is measured.

Logs go to stderr of their process, as text or as one JSON object a line, and carry the request id that is bound at that moment. Counts
and spans are passed to the sinks of the process; with no sink, which is the default, recording one costs a loop over nothing.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TextIO

ROOT_LOGGER = "tinsmith"
LogFormat = Literal["text", "json"]

# Names of spans (seconds) and counts. One place, so that dashboards and code cannot drift apart.
START_MODELS = "start.models"  # resolving (and at first converting) the base models
START_RAY = "start.ray"
START_SERVE = "start.serve"
START_DEPLOYMENTS = "start.deployments"  # until every replica can take work
WORKER_LOAD = "worker.load"  # engine of a trainer or sampler, weights included
STATE_CALLS = "state.calls"  # of a process to the actor that holds the memory store, by operation

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """`value`: seconds of a span, or the increment of a count."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


Sink = Callable[[Measurement], None]
_sinks: list[Sink] = []


@contextmanager
def recording(sink: Sink) -> Iterator[None]:
    """Pass every measurement of this process to `sink` while the block runs."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def count(name: str, value: float = 1.0, **labels: str) -> None:
    _record(Measurement(name, value, labels))


@contextmanager
def span(name: str, **labels: str) -> Iterator[None]:
    """Measure the block in s, also where it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        _record(Measurement(name, time.monotonic() - began, labels))


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


def _record(measurement: Measurement) -> None:
    for sink in tuple(_sinks):
        sink(measurement)


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
