"""The Serve application that runs the command: what it runs, when it is unhealthy, how it ends. Its replica is a plain object here."""

import socket
import sys
from pathlib import Path

import pytest

from tests.fakes.training import until
from tinsmith.config import ConfigError, validate
from tinsmith.deployments.preflight import faults_of
from tinsmith.deployments.rayservice import Launch, ServerEnded, build, command_of

WAITS = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text("models: [{name: org/tiny, trainer: {engine: fake}, sampler: {engine: fake}}]\nray: {address: auto}\n")
    return path


def launch(program: str) -> Launch:
    return Launch([sys.executable, "-c", program])


def test_the_command_serves_the_named_configuration(config: Path) -> None:
    assert command_of({"config": str(config)}) == [sys.executable, "-m", "tinsmith.cli", "serve", str(config)]


def test_a_configuration_that_would_start_its_own_cluster_is_refused(config: Path) -> None:
    config.write_text(config.read_text().replace("ray: {address: auto}\n", ""))
    with pytest.raises(ConfigError, match=r"ray\.address is missing.*set it to auto"):
        command_of({"config": str(config)})
    with pytest.raises(ConfigError, match="name an existing file"):
        command_of({"config": str(config.with_name("absent.yaml"))})


def test_the_application_has_one_replica_that_takes_no_cpu(config: Path) -> None:
    application = build({"config": str(config)})
    deployment = application._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("launch", 1)
    assert deployment.ray_actor_options["num_cpus"] == 0


async def test_a_command_that_runs_is_healthy_and_ends_with_the_replica(capfd: pytest.CaptureFixture[str]) -> None:
    replica = launch(WAITS)
    await until(lambda: "up" in capfd.readouterr().out)
    await replica.check_health()
    await replica.stop()
    with pytest.raises(ServerEnded, match="exit code 0"):
        await replica.check_health()


async def test_a_command_that_ended_makes_the_replica_unhealthy() -> None:
    replica = launch("raise SystemExit(2)")
    replica._child.wait()
    with pytest.raises(ServerEnded, match="exit code 2"):
        await replica.check_health()


async def test_a_command_that_does_not_end_is_killed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.deployments.rayservice.STOP_S", 0.1)
    replica = launch(STUBBORN)
    await until(lambda: "up" in capfd.readouterr().out)
    await replica.stop()
    with pytest.raises(ServerEnded, match="exit code -9"):
        await replica.check_health()


def test_the_port_of_a_joined_clusters_proxy_is_not_probed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tree = {
            "models": [{"name": "org/tiny", "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}],
            "checkpoints": {"dir": str(tmp_path)},
            "gateway": {"ingress": "serve", "port": port},
        }
        assert any(str(port) in fault for fault in faults_of(validate(tree)))
        assert faults_of(validate(tree | {"ray": {"address": "auto"}})) == []
