"""What every process of the server is given, and how it logs and reaches the state with it. Imports no engine and no PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass

from ray.actor import ActorHandle

from tinsmith import telemetry
from tinsmith.config import ExecutionConfig, LimitConfig, ServerConfig
from tinsmith.deployments.base_models import ServedModel
from tinsmith.deployments.memory_state import RemoteLanes, RemoteStore
from tinsmith.deployments.observation import start_observation
from tinsmith.state.lanes import LaneLimits, Lanes
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import Store


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Passed to every replica, so it holds data and handles alone. `memory_state` is set where the store is the memory store;
    `metrics_dir` where there are metrics: the directory that the processes of a node write them to."""

    config: ServerConfig
    models: Mapping[str, ServedModel]
    memory_state: ActorHandle | None
    metrics_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """A process's way to the store, and to the lanes in it."""

    store: Store
    lanes: Lanes


def lane_limits(execution: ExecutionConfig, limits: LimitConfig) -> LaneLimits:
    return LaneLimits(
        lease_ms=round(execution.lease_s * 1000),
        hole_grace_ms=round(execution.hole_grace_s * 1000),
        max_pending=limits.max_pending,
        max_tenant_bytes=limits.max_tenant_bytes,
    )


def configure_logging(blueprint: Blueprint, role: str) -> None:
    """And metrics and traces; once a process, before it does anything else."""
    logs = blueprint.config.logs
    telemetry.configure_logging(role, format=logs.format, level=logs.level)
    start_observation(blueprint.config.telemetry, blueprint.metrics_dir, role)


def connect(blueprint: Blueprint) -> Connection:
    """A connection of its own, for one event loop."""
    limits = lane_limits(blueprint.config.execution, blueprint.config.limits)
    if blueprint.memory_state is not None:
        return Connection(RemoteStore(blueprint.memory_state), RemoteLanes(blueprint.memory_state, limits))
    store = RedisStore(blueprint.config.store.url)
    return Connection(store, RedisLanes(store, limits))
