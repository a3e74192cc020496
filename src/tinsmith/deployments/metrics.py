"""Metrics of a node in Prometheus' format: a sink for the measurements of a process, and the text that a scrape gets.

The processes of a node write into memory-mapped files in one directory (prometheus_client's multiprocess mode); any gateway of the node
merges them. The library decides for that mode when it is imported, so `observation` sets its variable before it imports this module.

Counters and histograms of a process that has ended stay in its files, so that no total ever falls. A gauge says what is so now, so those of
ended processes must go: they have the modes `livesum` and `livemax`, whose files a scrape deletes once their process is gone. That is
decided by pid, so the processes that share a directory must share a pid namespace, as those of a node of Ray do.

What is queued, and who is alive, is read from the store when a scrape asks, and only then: without one nothing is asked.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from tinsmith import telemetry
from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import GATEWAYS, Lanes, QueueInfo, Replica, Role
from tinsmith.telemetry import EXPORT_PREFIX, METRICS, Among, Measurement, Metric, MetricKind

STORE_S = 3.0  # of the questions of one scrape to the store; Prometheus gives a scrape 10 s
_LIVE_FILE = re.compile(r"gauge_live[a-z]+_(\d+)\.db")
_LIVE_MODES: Mapping[Among, Literal["livesum", "livemax"]] = {Among.SUM: "livesum", Among.MAX: "livemax"}
_STORE_METRICS = (
    telemetry.QUEUE_DEPTH,
    telemetry.QUEUE_OLDEST_AGE,
    telemetry.REPLICAS,
    telemetry.REPLICAS_HEALTHY,
    telemetry.SLOTS,
    telemetry.SLOTS_USED,
)
_BASE_AND_ROLE = ("base_model", "role")

_log = logging.getLogger(__name__)


class PrometheusSink:
    """`telemetry.Sink`: what `telemetry.METRICS` names goes to Prometheus; the rest is not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: of a test; in the multiprocess mode the files are all there is."""
        self._metrics = {name: _metric_of(metric, registry) for name, metric in METRICS.items() if name not in _STORE_METRICS}
        self._children: dict[tuple[str, ...], MetricWrapperBase] = {}

    def __call__(self, measured: Measurement) -> None:
        metric = self._metrics.get(measured.name)
        if metric is None:
            return
        key = (measured.name, *measured.labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(**measured.labels) if measured.labels else metric
        match child:
            case Counter():
                child.inc(measured.value)
            case Gauge():
                child.set(measured.value)
            case Histogram():
                child.observe(measured.value)


class Exposition:
    """What `/metrics` answers: the node's files, and the cluster's queues and processes as the store knows them."""

    def __init__(self, directory: Path, lanes: Lanes, now_ms: Callable[[], Awaitable[int]], base_models: Iterable[str]) -> None:
        self._directory = directory
        self._lanes = lanes
        self._now_ms = now_ms
        self._base_models = tuple(base_models)

    async def __call__(self) -> bytes:
        """While the store is away, what it would tell is left out."""
        try:
            async with asyncio.timeout(STORE_S):
                families = await self._families()
        except (StateContention, TimeoutError) as error:
            _log.warning("metrics: queues and processes are left out, the store does not answer (%s)", type(error).__name__)
            families = []
        return await asyncio.to_thread(_rendered, self._directory, families)

    async def _families(self) -> list[GaugeMetricFamily]:
        families = {name: _family_of(METRICS[name]) for name in _STORE_METRICS}
        now_ms = await self._now_ms()
        for base in self._base_models:
            queues, replicas = await self._lanes.queues(base), await self._lanes.replicas(base)
            for role in (Role.TRAINER, Role.SAMPLER):
                _add_queues(families, [base, role], [queue for queue in queues if queue.role is role], now_ms)
                _add_replicas(families, [base, role], [replica for replica in replicas if replica.role is role])
        _add_replicas(families, ["", Role.GATEWAY], await self._lanes.replicas(GATEWAYS))
        return list(families.values())


class _Fixed:
    """A collector of families that are there already."""

    def __init__(self, families: list[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families


def forget_the_dead(directory: Path) -> None:
    """Delete the gauges of processes that have ended."""
    for file in directory.glob("gauge_live*.db"):
        named = _LIVE_FILE.fullmatch(file.name)
        if named is not None and not psutil.pid_exists(int(named[1])):
            file.unlink(missing_ok=True)  # the scrape of another gateway may have been faster


def _rendered(directory: Path, families: list[GaugeMetricFamily]) -> bytes:
    """In a thread: reads a file or more of each process."""
    forget_the_dead(directory)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))  # type: ignore[no-untyped-call]
    registry.register(_Fixed(families))
    return generate_latest(registry)


def _metric_of(metric: Metric, registry: CollectorRegistry | None) -> Counter | Gauge | Histogram:
    name, labels = metric.exported_name, metric.labels
    match metric.kind:
        case MetricKind.COUNTER:
            return Counter(name, metric.help, labels, registry=registry)
        case MetricKind.GAUGE:
            return Gauge(name, metric.help, labels, registry=registry, multiprocess_mode=_LIVE_MODES[metric.among])
        case MetricKind.HISTOGRAM:
            return Histogram(name, metric.help, labels, registry=registry, buckets=metric.buckets)


def _family_of(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(EXPORT_PREFIX + metric.name, metric.help, labels=_BASE_AND_ROLE)


def _add_queues(families: dict[str, GaugeMetricFamily], labels: list[str], queues: list[QueueInfo], now_ms: int) -> None:
    oldest_ms = min((queue.oldest_ms for queue in queues if queue.oldest_ms is not None), default=now_ms)
    families[telemetry.QUEUE_DEPTH].add_metric(labels, sum(queue.num_pending for queue in queues))
    families[telemetry.QUEUE_OLDEST_AGE].add_metric(labels, max(0, now_ms - oldest_ms) / 1000)


def _add_replicas(families: dict[str, GaugeMetricFamily], labels: list[str], replicas: list[Replica]) -> None:
    families[telemetry.REPLICAS].add_metric(labels, len(replicas))
    families[telemetry.REPLICAS_HEALTHY].add_metric(labels, sum(replica.is_healthy for replica in replicas))
    families[telemetry.SLOTS].add_metric(labels, sum(replica.num_slots for replica in replicas))
    families[telemetry.SLOTS_USED].add_metric(labels, sum(replica.num_used for replica in replicas))
