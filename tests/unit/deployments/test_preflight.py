"""Faults and warnings before a start."""

import socket
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tinsmith.config import ServerConfig, validate
from tinsmith.deployments import observation
from tinsmith.deployments.preflight import faults_of, warnings_of


def config(directory: Path, **tree: object) -> ServerConfig:
    return validate({"models": [{"name": "org/model"}], "gateway": {"port": 0}, "checkpoints": {"dir": str(directory)}, **tree})


def test_a_sound_configuration_has_no_fault_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert faults_of(config(tmp_path)) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.proves("R57")
def test_every_fault_of_this_machine_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as dead:
        port = other.getsockname()[1]
        dead_port = dead.getsockname()[1]
        dead.close()
        faults = faults_of(
            config(
                tmp_path / "file",
                models=[{"name": "org/model", "source": str(tmp_path / "none")}, {"name": "org/hub", "source": "org/hub"}],
                gateway={"port": port},
                store={"kind": "redis", "url": f"redis://127.0.0.1:{dead_port}/0"},
            )
        )
    assert [fault.split(":")[0] for fault in faults] == ["gateway.port", "checkpoints.dir", "models.0.source", "store.url"]
    assert all(";" in fault for fault in faults)


def test_a_redis_that_answers_is_no_fault(tmp_path: Path) -> None:
    with RedisServer() as server:
        assert faults_of(config(tmp_path, store={"kind": "redis", "url": server.url})) == []


def test_a_redis_that_forgets_is_a_fault(tmp_path: Path) -> None:
    with RedisServer(maxmemory_policy="allkeys-lru") as server:
        [fault] = faults_of(config(tmp_path, store={"kind": "redis", "url": server.url}))
    assert "noeviction" in fault


def test_a_directory_must_hold_a_model(tmp_path: Path) -> None:
    [fault] = faults_of(config(tmp_path, models=[{"name": "org/model", "source": f"{tmp_path}/"}]))
    assert fault == f"models.0.source: {tmp_path}/ holds no config.json; name the directory of a model, 'smollm2', or a hub id"
    (tmp_path / "config.json").write_text("{}")
    assert faults_of(config(tmp_path, models=[{"name": "org/model", "source": str(tmp_path)}])) == []


@pytest.mark.proves("S6")
def test_ports_beyond_loopback_are_named(tmp_path: Path) -> None:
    ray, store = warnings_of(config(tmp_path))
    assert all(word in ray for word in ("gcs_server", "raylet", "44217", "44227", "firewall"))
    assert "does not survive a restart" in store


def test_a_cluster_and_a_store_of_ones_own_leave_nothing_to_warn_of(tmp_path: Path) -> None:
    assert warnings_of(config(tmp_path, ray={"address": "10.0.0.1:6379"}, store={"kind": "redis"})) == []


def test_the_proxy_and_a_short_session_are_named(tmp_path: Path) -> None:
    warnings = warnings_of(
        config(tmp_path, gateway={"ingress": "serve"}, execution={"session_timeout_s": 3}, store={"kind": "redis"}, ray={"address": "x:1"})
    )
    assert ["127.0.0.1:8700 of every node" in warnings[0], "between two beats" in warnings[1]] == [True, True]


def test_traces_without_their_packages_are_a_fault_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = config(tmp_path, telemetry={"otlp_endpoint": "http://127.0.0.1:4318"})
    assert faults_of(traced) == []
    monkeypatch.setattr(observation, "TRACING_PACKAGES", ("no_such_package",))
    assert faults_of(config(tmp_path)) == []
    [fault] = faults_of(traced)
    assert fault.startswith("telemetry.otlp_endpoint: traces need no_such_package; pip install 'tinsmith[tracing]'")
