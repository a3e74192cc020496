"""How the cluster is opened and ended, with Ray's calls replaced; whatever is left running is killed."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from tinsmith.config import GatewayConfig, RayConfig
from tinsmith.deployments import cluster
from tinsmith.deployments.cluster import Cluster, ClusterError, close_cluster, open_cluster, start_serve


class RayCalls:
    """Stands in for the `ray` and `serve` modules: notes what was asked of them."""

    def __init__(self) -> None:
        self.inits: list[dict[str, object]] = []
        self.starts: list[dict[str, object]] = []
        self.deleted: list[str] = []
        self.applications = {"tinsmith-gateway": None, "theirs": None}
        self.is_up = True
        self.num_shutdowns = 0
        self.hangs = threading.Event()
        self.never = threading.Event()

    def init(self, **options: object) -> None:
        self.inits.append(options)

    def is_initialized(self) -> bool:
        return self.is_up

    def shutdown(self) -> None:
        if self.hangs.is_set():
            self.never.wait()
        self.num_shutdowns += 1

    def start(self, **options: object) -> None:
        self.starts.append(options)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=dict(self.applications))

    def delete(self, name: str, _blocking: bool) -> None:
        self.deleted.append(name)
        del self.applications[name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCalls]:
    calls = RayCalls()
    monkeypatch.setattr(cluster.ray, "init", calls.init)
    monkeypatch.setattr(cluster.ray, "is_initialized", calls.is_initialized)
    monkeypatch.setattr(cluster.ray, "shutdown", calls.shutdown)
    monkeypatch.setattr(cluster, "serve", calls)
    monkeypatch.setattr(cluster, "_RAY_STOP_S", 0.2)
    yield calls
    calls.never.set()


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ignores polite requests."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_cluster_of_our_own_has_no_dashboard(calls: RayCalls) -> None:
    opened = open_cluster(RayConfig(), num_cpus=3)
    assert opened.is_own
    assert opened.is_alive
    assert (calls.inits[0]["num_cpus"], calls.inits[0]["include_dashboard"]) == (3, False)
    assert "address" not in calls.inits[0]


def test_a_cluster_that_is_joined_keeps_its_own_settings(calls: RayCalls) -> None:
    assert not open_cluster(RayConfig(address="10.0.0.1:6379"), num_cpus=3).is_own
    assert calls.inits[0]["address"] == "10.0.0.1:6379"
    assert "num_cpus" not in calls.inits[0]


@pytest.mark.parametrize(("address", "remedy"), [(None, "look into"), ("10.0.0.1:1", "check ray.address and RAY_AUTH_TOKEN")])
def test_a_cluster_that_cannot_be_had_names_the_remedy(
    calls: RayCalls, monkeypatch: pytest.MonkeyPatch, address: str | None, remedy: str
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no\nway")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(ClusterError, match=rf"\(no way\); {remedy}"):
        open_cluster(RayConfig(address=address), num_cpus=1)


def test_serves_proxy_runs_only_where_it_is_asked_for(calls: RayCalls) -> None:
    start_serve(GatewayConfig())
    start_serve(GatewayConfig(ingress="serve", port=9000))
    assert [start["proxy_location"] for start in calls.starts] == ["Disabled", "EveryNode"]
    assert "http_options" not in calls.starts[0]
    options = calls.starts[1]["http_options"]
    assert (options.host, options.port) == ("127.0.0.1", 9000)  # type: ignore[attr-defined]


def test_only_our_applications_are_ended(calls: RayCalls) -> None:
    assert close_cluster(Cluster(is_own=False, system=()), ["tinsmith-gateway", "tinsmith-trainer-0"])
    assert calls.deleted == ["tinsmith-gateway"]
    assert calls.num_shutdowns == 1


def test_a_start_that_did_not_come_to_serve_ends_ray_alone(calls: RayCalls) -> None:
    assert close_cluster(None, ["tinsmith-gateway"])
    assert (calls.deleted, calls.num_shutdowns) == ([], 1)
    calls.is_up = False
    assert close_cluster(None, [])
    assert calls.num_shutdowns == 1


def test_a_step_that_hangs_is_given_up_and_processes_are_killed(calls: RayCalls, child: "subprocess.Popen[bytes]") -> None:
    calls.hangs.set()
    began = time.monotonic()
    assert not close_cluster(Cluster(is_own=True, system=()), ["tinsmith-gateway"])
    assert time.monotonic() - began < 5
    assert not psutil.pid_exists(child.pid)


def test_a_cluster_lives_as_long_as_its_system_processes(calls: RayCalls, child: "subprocess.Popen[bytes]") -> None:
    opened = Cluster(is_own=True, system=(psutil.Process(child.pid),))
    assert opened.is_alive
    child.kill()
    child.wait()
    assert not opened.is_alive
    close_cluster(opened, ["tinsmith-gateway"])
    assert calls.deleted == []


def test_a_zombie_is_not_alive(child: "subprocess.Popen[bytes]") -> None:
    opened = Cluster(is_own=True, system=(psutil.Process(child.pid),))
    child.kill()
    deadline = time.monotonic() + 5
    while opened.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)
