"""The Ray cluster under the server: started or joined, and ended within a bound with nothing left running.

Knows nothing of what is deployed. The environment (auth token, usage statistics) must have been set before this module was imported.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from tinsmith.config import GatewayConfig, RayConfig

SERVE_LOGS = LoggingConfig(log_level="WARNING", enable_access_log=False)
_SYSTEM_PROCESSES = ("gcs_server", "raylet")
_SERVE_STOP_S = 5.0
_RAY_STOP_S = 2.5
_KILL_S = 1.0
_POLL_S = 0.1  # of Serve's status


class ClusterError(Exception):
    """Ray cannot be started or joined; the message is one line and ends with the remedy."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`is_own`: started by this process, and ended with it. `system`: the processes without which it cannot live."""

    is_own: bool
    system: tuple[psutil.Process, ...]

    @property
    def is_alive(self) -> bool:
        return all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in self.system)


def open_cluster(config: RayConfig, num_cpus: int) -> Cluster:
    """Join the cluster that the configuration names, or start one with `num_cpus` logical CPUs. Raises ClusterError."""
    try:
        if config.address is not None:
            ray.init(address=config.address, logging_level=logging.WARNING)
        else:
            ray.init(num_cpus=num_cpus, include_dashboard=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = f"cannot join {config.address}" if config.address else "cannot start"
        remedy = "check ray.address and RAY_AUTH_TOKEN" if config.address else "look into /tmp/ray/session_latest/logs"
        raise ClusterError(f"ray: {what} ({_one_line(error)}); {remedy}") from error
    is_own = config.address is None
    children = psutil.Process().children() if is_own else []
    return Cluster(is_own, tuple(child for child in children if child.name() in _SYSTEM_PROCESSES))


def start_serve(gateway: GatewayConfig) -> None:
    """Start Serve, with its HTTP proxy only where the gateway is to stand behind it."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if gateway.ingress == "serve":
        serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host=gateway.host, port=gateway.port), logging_config=SERVE_LOGS)
    else:
        serve.start(proxy_location="Disabled", logging_config=SERVE_LOGS)


def close_cluster(cluster: Cluster | None, applications: Sequence[str]) -> bool:
    """End the applications and, if it is our own, the cluster, each step within its bound; then the processes that are left.

    `cluster` None: the start did not come that far. Answers whether every step ended by itself.
    """
    descendants = psutil.Process().children(recursive=True)
    is_clean = True
    if cluster is not None and cluster.is_alive:
        is_clean &= _bounded(_SERVE_STOP_S, lambda: _delete(applications))
    if ray.is_initialized():
        is_clean &= _bounded(_RAY_STOP_S, ray.shutdown)
    _end_processes(descendants)
    return is_clean


def _delete(applications: Sequence[str]) -> None:
    """Let the replicas drain. Of a cluster of our own, Serve itself goes with Ray."""
    ours = set(applications)
    for name in ours.intersection(serve.status().applications):
        serve.delete(name, _blocking=False)
    tick = threading.Event()
    while ours.intersection(serve.status().applications):
        tick.wait(_POLL_S)


def _bounded(bound_s: float, step: Callable[[], None]) -> bool:
    """Run the step in a thread and wait for it no longer than that."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(bound_s)
    return not thread.is_alive()


def _end_processes(descendants: list[psutil.Process]) -> None:
    """Kill whatever of these, or of the children that we have now, still runs."""
    deadline = time.monotonic() + _KILL_S
    left = {*descendants, *psutil.Process().children(recursive=True)}
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
