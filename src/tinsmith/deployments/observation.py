"""What a process starts so that its measurements and traces are collected, as the configuration says.

Knows which module collects what, and imports it only then: prometheus_client reads its directory from the environment when it is imported,
and the packages of traces need not be installed.
"""

import importlib
import os
from collections.abc import Awaitable, Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from tinsmith import telemetry
from tinsmith.config import TelemetryConfig
from tinsmith.state.lanes import Lanes

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
TRACING_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

Exposition = Callable[[], Awaitable[bytes]]


class _Metrics(Protocol):
    """`deployments.metrics`."""

    def PrometheusSink(self) -> telemetry.Sink: ...  # noqa: N802 - a class there

    def Exposition(  # noqa: N802 - a class there
        self, directory: Path, lanes: Lanes, now_ms: Callable[[], Awaitable[int]], base_models: Iterable[str]
    ) -> Exposition: ...


class _Tracing(Protocol):
    """`deployments.tracing`."""

    def start_tracing(self, endpoint: str, process: str) -> None: ...


def start_observation(config: TelemetryConfig, metrics_dir: str | None, process: str) -> None:
    """Once a process, before it measures anything. `metrics_dir`: of the node, made where it is missing; None: no metrics."""
    if metrics_dir is not None:
        Path(metrics_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[DIRECTORY_VARIABLE] = metrics_dir
        telemetry.record_to(_metrics().PrometheusSink())
    if config.otlp_endpoint is not None:
        cast(_Tracing, importlib.import_module("tinsmith.deployments.tracing")).start_tracing(config.otlp_endpoint, process)


def exposition_of(
    metrics_dir: str | None, lanes: Lanes, now_ms: Callable[[], Awaitable[int]], base_models: Iterable[str]
) -> Exposition | None:
    """What `/metrics` of a gateway answers, after `start_observation`; None where nothing is measured."""
    return None if metrics_dir is None else _metrics().Exposition(Path(metrics_dir), lanes, now_ms, base_models)


def missing_packages() -> list[str]:
    """Packages of traces that are not installed."""
    return [package for package in TRACING_PACKAGES if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _metrics() -> _Metrics:
    return cast(_Metrics, importlib.import_module("tinsmith.deployments.metrics"))
