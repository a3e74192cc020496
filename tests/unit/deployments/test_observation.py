"""What a process starts, by its configuration. Each runs in a process of its own: the library of metrics reads its directory once."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.training import World
from tinsmith import telemetry
from tinsmith.config import TelemetryConfig, validate
from tinsmith.deployments import observation, wiring
from tinsmith.deployments.observation import DIRECTORY_VARIABLE, exposition_of, missing_packages, start_observation
from tinsmith.deployments.wiring import Blueprint

SAYS_WHAT_IS_IMPORTED = """
import json, sys
from tinsmith import telemetry
from tinsmith.config import TelemetryConfig
from tinsmith.deployments.observation import exposition_of, start_observation

start_observation(TelemetryConfig(**json.loads(sys.argv[1])), sys.argv[2] or None, "gateway")
telemetry.count(telemetry.STORE_ERRORS)
with telemetry.traced("request") as traced:
    print(*[name for name in ("prometheus_client", "opentelemetry.sdk", "ray", "torch") if name in sys.modules], bool(traced.parent))
print(exposition_of(sys.argv[2] or None, None, None, []) is not None)
"""


def started(config: str, metrics_dir: str) -> list[str]:
    command = [sys.executable, "-c", SAYS_WHAT_IS_IMPORTED, config, metrics_dir]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_without_either_nothing_is_imported() -> None:
    assert started("{}", "") == ["False", "False"]


def test_metrics_go_to_the_directory_of_the_node_which_is_made_for_this_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    assert started("{}", str(directory)) == ["prometheus_client False", "True"]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [file.name.partition("_")[0] for file in directory.glob("counter_*.db")] == ["counter"]


def test_traces_are_made_where_a_collector_is_named() -> None:
    assert started('{"otlp_endpoint": "http://127.0.0.1:9"}', "") == ["opentelemetry.sdk True", "False"]


def test_no_directory_no_page(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert exposition_of(None, world.lanes, world.store.now_ms, []) is None
    assert exposition_of(str(tmp_path), world.lanes, world.store.now_ms, []) is not None


def test_packages_of_traces_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages() == []
    monkeypatch.setattr(observation, "TRACING_PACKAGES", ("opentelemetry.sdk", "no_such_package.inside", "no_such_package"))
    assert missing_packages() == ["no_such_package.inside", "no_such_package"]


def test_every_process_starts_what_its_blueprint_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(wiring, "start_observation", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(telemetry, "configure_logging", lambda *_, **__: None)
    config = validate({"models": [{"name": "org/model"}]})
    wiring.configure_logging(Blueprint(config, {}, None, "/metrics-of-this-node"), "janitor")
    assert given == [(config.telemetry, "/metrics-of-this-node", "janitor")]


def test_sinks_and_tracer_are_those_of_the_configured_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    modules = {
        "tinsmith.deployments.metrics": SimpleNamespace(PrometheusSink=lambda: "the sink"),
        "tinsmith.deployments.tracing": SimpleNamespace(start_tracing=lambda *arguments: started.append(arguments)),
    }
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(telemetry, "record_to", started.append)
    monkeypatch.setenv(DIRECTORY_VARIABLE, "")
    start_observation(TelemetryConfig(otlp_endpoint="http://collector:4318"), str(tmp_path / "new"), "sampler")
    assert started == ["the sink", ("http://collector:4318", "sampler")]
    assert os.environ[DIRECTORY_VARIABLE] == str(tmp_path / "new")
