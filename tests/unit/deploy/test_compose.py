"""The compose file, held to the part of the Compose Specification that it uses, and to what the server needs."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.dockerfile import read_stages
from tinsmith.config import ServerConfig, load

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"

DURATION = {"type": "string", "pattern": r"^(\d+(us|ms|s|m|h))+$"}
STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
COMMAND = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image"],
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["context"],
            "properties": {
                "context": {"type": "string"},
                "dockerfile": {"type": "string"},
                "target": {"type": "string"},
                "args": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
            },
        },
        "command": COMMAND,
        "cap_drop": STRINGS,
        "security_opt": STRINGS,
        "volumes": {"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}, "uniqueItems": True},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^(\d+\.){3}\d+:\d+:\d+$"}, "uniqueItems": True},
        "network_mode": {"type": "string"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["condition"],
                "properties": {"condition": {"enum": ["service_started", "service_healthy", "service_completed_successfully"]}},
            },
        },
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "test": COMMAND,
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer"},
                "disable": {"type": "boolean"},
            },
        },
        "shm_size": {"type": ["integer", "string"]},
        "init": {"type": "boolean"},
        "stop_grace_period": DURATION,
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
    },
    "not": {"required": ["network_mode", "ports"]},  # a namespace that belongs to another service publishes there
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
    },
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return tree


@pytest.fixture(scope="module")
def config() -> ServerConfig:
    return load(DEPLOY / "server.yaml")


def test_the_file_keeps_to_the_specification(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, SCHEMA)


def test_every_name_is_defined(compose: dict[str, Any]) -> None:
    services = compose["services"]
    needed = {name for service in services.values() for name in service.get("depends_on", {})}
    needed |= {service["network_mode"].removeprefix("service:") for service in services.values() if "network_mode" in service}
    assert needed <= set(services)
    mounted = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert {name for name in mounted if not name.startswith(".")} == set(compose["volumes"])
    assert [name for name in mounted if name.startswith(".") and not (DEPLOY / name).is_file()] == []


def test_what_waits_for_health_waits_for_a_check(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "test" in compose["services"][name]["healthcheck"]


def test_the_images_are_stages_of_the_dockerfile(compose: dict[str, Any]) -> None:
    stages = read_stages(DEPLOY / "Dockerfile")
    built = [service["build"] for service in compose["services"].values() if "build" in service]
    assert {build["target"] for build in built} == {"server", "door"}
    for build in built:
        assert build["target"] in stages
        assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def test_only_the_door_is_reachable_and_only_from_this_machine(compose: dict[str, Any], config: ServerConfig) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    door = read_stages(DEPLOY / "Dockerfile")["door"].last("EXPOSE").words[0]
    assert published == {"door": [f"127.0.0.1:{config.gateway.port}:{door}"]}
    assert compose["services"]["server"]["network_mode"] == "service:door"
    assert config.gateway.host == "127.0.0.1"


def test_redis_keeps_everything_and_evicts_nothing(compose: dict[str, Any], config: ServerConfig) -> None:
    redis = compose["services"]["redis"]
    options = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))
    assert options == {"--appendonly": "yes", "--appendfsync": "always", "--maxmemory-policy": "noeviction"}
    assert redis["volumes"] == ["redis:/data"]
    assert (config.store.kind, config.store.url) == ("redis", "redis://redis:6379/0")


def test_checkpoints_and_models_outlive_the_server(compose: dict[str, Any], config: ServerConfig) -> None:
    volumes = [volume.split(":") for volume in compose["services"]["server"]["volumes"]]
    mounts = {target: source for source, target, *_ in volumes}
    assert mounts[str(config.checkpoints.dir)] == "checkpoints"
    cache = re.search(r"TINSMITH_CACHE=(\S+)", read_stages(DEPLOY / "Dockerfile")["server"].last("ENV").text)
    assert cache is not None
    assert mounts[cache[1]] == "models"
    assert compose["services"]["fetch"]["volumes"] == [f"models:{cache[1]}"]
    assert mounts[compose["services"]["server"]["command"][1]] == "./server.yaml"
