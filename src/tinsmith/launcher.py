"""The composition root: a ServerConfig becomes a running server, and ends with nothing left running.

`tinsmith serve` replaces itself by `python -m tinsmith.launcher` in the environment that Ray must find when it is imported. Standard
output carries one line, `ready http://HOST:PORT`, when requests are served and every trainer and sampler can take work; everything else,
the workers' lines included, goes to standard error. Exit codes: see `cli`.
"""

import argparse
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from socket import socket
from tempfile import mkdtemp
from types import FrameType

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus

from tinsmith import telemetry
from tinsmith.config import ConfigError, ServerConfig, load
from tinsmith.deployments.applications import JANITOR, application_names, applications_of
from tinsmith.deployments.base_models import ServedModel, resolve_models
from tinsmith.deployments.cluster import Cluster, ClusterError, close_cluster, open_cluster, start_serve
from tinsmith.deployments.memory_state import start_memory_state
from tinsmith.deployments.ports import PortUnavailable, port_of, reserve, url_of
from tinsmith.deployments.preflight import faults_of, warnings_of
from tinsmith.deployments.wiring import Blueprint, lane_limits

EXIT_STOPPED = 0  # by a signal
EXIT_FAILED = 1
EXIT_FAULTS = 2
_POLL_S = 0.1  # of Serve's status during the start
_WATCH_S = 1.0  # how soon the loss of Ray, or of the memory store, is noticed
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_LOG = "start: ray %.1f s, serve %.1f s, models %.1f s (beside ray and serve), deployments %.1f s, total %.1f s"

_log = logging.getLogger("tinsmith.launcher")  # this module runs as __main__


class StartFailed(Exception):
    """The server cannot start; the message says why in one line."""


class _Interrupted(BaseException):
    """A signal came that ends the server."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP (a closed terminal) end what the main thread does, by an exception. Code of Ray's can turn it into
    another one, or lose it; that a signal came is noted, so that it counts all the same."""

    def __init__(self) -> None:
        self.came = False

    def listen(self) -> None:
        """Again after Ray's start, which puts its own action there."""
        for number in _ENDING:
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # as nohup sets it
                signal.signal(number, self._interrupt)

    def ignore(self) -> None:
        """From here on the end is under way, and bounded."""
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        self.came = True
        raise _Interrupted


class Server:
    """One run of the server. `stop` may be called at any point of `start`."""

    def __init__(self, config: ServerConfig, signals: _Signals) -> None:
        self._config = config
        self._signals = signals
        self._reservation: socket | None = None
        self._cluster: Cluster | None = None
        self._state: ActorHandle | None = None
        self._state_lives: ray.ObjectRef | None = None
        self._tending: list[RunTarget] = []
        self._metrics_dir: str | None = None

    def start(self) -> str:
        """Answers the URL once it serves. Raises ConfigError, PortUnavailable, ClusterError, StartFailed."""
        seconds: dict[str, float] = {}
        with telemetry.recording(lambda measured: seconds.update({measured.name: measured.value})):
            began = time.monotonic()
            url = self._start()
        _log.info(
            _START_LOG,
            *(seconds[name] for name in (telemetry.START_RAY, telemetry.START_SERVE, telemetry.START_MODELS, telemetry.START_DEPLOYMENTS)),
            time.monotonic() - began,
        )
        return url

    def watch(self) -> str:
        """Start what no request waits for; return, with the reason, when the server cannot go on. Raises StartFailed."""
        if self._tending:
            self._run(self._tending)
        tick = threading.Event()
        while not self._signals.came:
            tick.wait(_WATCH_S)
            if self._cluster is not None and not self._cluster.is_alive:
                return "Ray has ended"
            if self._state_lives is not None and ray.wait([self._state_lives], timeout=0)[0]:
                return "the process that holds the memory store has ended, and the state with it"
        raise _Interrupted

    def stop(self) -> bool:
        """End everything that was started; answers whether it ended without force."""
        is_clean = close_cluster(self._cluster, application_names(self._config))
        if self._reservation is not None:
            self._reservation.close()
        if self._metrics_dir is not None:
            shutil.rmtree(self._metrics_dir, ignore_errors=True)
        return is_clean

    def _start(self) -> str:
        self._check()
        beside = ThreadPoolExecutor(max_workers=1)
        resolving = beside.submit(self._resolve)
        try:
            self._open_cluster()
            models = resolving.result()
        finally:
            beside.shutdown(wait=False)  # a start that is cut short waits for no download; `stop` ends its process
        with telemetry.span(telemetry.START_DEPLOYMENTS):
            port = self._deploy(models)
        return url_of(self._config.gateway.host, port, is_tls=self._config.gateway.tls_cert is not None)

    def _check(self) -> None:
        """Raise every fault that shows before anything runs, then hold the port."""
        faults = faults_of(self._config)
        if faults:
            raise ConfigError(faults)
        for warning in warnings_of(self._config):
            _log.warning("%s", warning)
        if self._config.gateway.ingress == "direct":
            self._reservation = reserve(self._config.gateway.host, self._config.gateway.port)

    def _resolve(self) -> dict[str, ServedModel]:
        with telemetry.span(telemetry.START_MODELS):
            return resolve_models(self._config.models)

    def _open_cluster(self) -> None:
        with telemetry.span(telemetry.START_RAY):
            num_cpus = self._config.ray.num_cpus
            self._cluster = open_cluster(self._config.ray, self._config.num_workers if num_cpus is None else num_cpus)
            self._signals.listen()  # Ray has put its own actions there
            if self._cluster.is_own:
                _check_gpus(self._config.num_gpus)
        with telemetry.span(telemetry.START_SERVE):
            if self._config.store.kind == "memory":
                self._state = start_memory_state(lane_limits(self._config.execution, self._config.limits))
                self._state_lives = self._state.live.remote()
            start_serve(self._config.gateway)

    def _deploy(self, models: Mapping[str, ServedModel]) -> int:
        """Start gateways and workers at once and wait for the last; answers the port that they serve."""
        port = self._config.gateway.port if self._reservation is None else port_of(self._reservation)
        if self._config.telemetry.metrics:
            self._metrics_dir = mkdtemp(prefix="tinsmith-metrics-")
        targets = applications_of(Blueprint(self._config, models, self._state, self._metrics_dir), port)
        self._tending = [target for target in targets if target.name == JANITOR]
        self._run([target for target in targets if target.name != JANITOR])
        return port

    def _run(self, targets: Sequence[RunTarget]) -> None:
        """Return when all of these run. Raises StartFailed."""
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        tick = threading.Event()
        while not _all_running([target.name for target in targets]):
            tick.wait(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal; answers the exit code."""
    parser = argparse.ArgumentParser(prog="tinsmith.launcher")
    parser.add_argument("config", type=Path)
    parser.add_argument("--port", type=int, default=None)
    asked = parser.parse_args(arguments)
    try:
        config = load(asked.config, overrides=None if asked.port is None else {"gateway.port": asked.port})
    except ConfigError as error:
        return _report(error.faults, EXIT_FAULTS)
    telemetry.configure_logging("launcher", format=config.logs.format, level=config.logs.level)
    stdout = sys.stdout
    signals = _Signals()
    with redirect_stdout(sys.stderr):  # Ray prints what its workers write to their standard output
        return run(Server(config, signals), signals, lambda url: print(f"ready {url}", file=stdout, flush=True))


def run(server: Server, signals: _Signals, announce: Callable[[str], None]) -> int:
    """Start, announce, serve until a signal or the loss of something vital, end; answers the exit code."""
    code = EXIT_STOPPED
    try:
        signals.listen()
        announce(server.start())
        code = _report([server.watch()], EXIT_FAILED)
    except (_Interrupted, SystemExit):  # SystemExit: a signal met the action that Ray puts there while it starts
        _log.info("stopping")
    except SystemError:
        if not signals.came:
            raise
        _log.info("stopping")
    except (ConfigError, PortUnavailable) as error:
        code = _report(str(error).splitlines(), EXIT_FAULTS)
    except (ClusterError, StartFailed) as error:
        code = _report([str(error)], EXIT_FAILED)
    finally:
        signals.ignore()
        is_clean = server.stop()
    if not is_clean:
        _exit_at_once(code)
    return code


def _check_gpus(wanted: float) -> None:
    """Nothing adds to a cluster of our own, so workers would wait for ever. Raises StartFailed."""
    found = ray.cluster_resources().get("GPU", 0.0)
    if wanted > found:
        raise StartFailed(f"models: the workers want {wanted:g} GPUs and Ray finds {found:g} here; lower num_gpus or replicas")


def _all_running(names: Sequence[str]) -> bool:
    """Raises StartFailed for an application that cannot run."""
    applications = serve.status().applications
    for name in names:
        status = applications.get(name)
        if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
            said = "; ".join(_last_line(deployment.message) for deployment in status.deployments.values() if deployment.message)
            raise StartFailed(f"{name} cannot start: {said or _last_line(status.message)}; the log above has the details")
    return all(name in applications and applications[name].status == ApplicationStatus.RUNNING for name in names)


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _report(lines: Sequence[str], code: int) -> int:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return code


def _exit_at_once(code: int) -> None:
    """A step that overran its bound still runs in a thread, and Ray's exit hooks would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
