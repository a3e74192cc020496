"""The KubeRay example: the fields that Kubernetes requires, and ports, probes, mounts and names that agree with each other."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.unit.deploy.dockerfile import Stage, read_stages
from tinsmith.config import ServerConfig, cache_dir, validate
from tinsmith.deployments.sizing import estimate

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TARGET = {"oneOf": [PORT, {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"}]}
PROBE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "httpGet": {
            "type": "object",
            "additionalProperties": False,
            "required": ["port"],
            "properties": {
                "path": {"type": "string", "pattern": "^/"},
                "port": TARGET,
                "httpHeaders": {"type": "array", "items": {"type": "object", "required": ["name", "value"]}},
            },
        },
        "tcpSocket": {"type": "object", "additionalProperties": False, "required": ["port"], "properties": {"port": TARGET}},
        **{
            name: {"type": "integer", "minimum": 1}
            for name in ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold")
        },
    },
    "oneOf": [{"required": ["httpGet"]}, {"required": ["tcpSocket"]}],
}
CONTAINER = {
    "type": "object",
    "required": ["name", "image"],
    "properties": {
        "name": NAME,
        "image": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "ports": {
            "type": "array",
            "items": {"type": "object", "required": ["containerPort"], "properties": {"name": TARGET, "containerPort": PORT}},
        },
        "env": {
            "type": "array",
            "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "value": {"type": "string"}}},
        },
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "startupProbe": PROBE,
        "securityContext": {"type": "object"},
        "resources": {"type": "object"},
        "workingDir": {"type": "string"},
    },
    "additionalProperties": False,
}
POD = {
    "type": "object",
    "required": ["containers"],
    "properties": {
        "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
        "initContainers": {"type": "array", "items": CONTAINER},
        "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        "securityContext": {"type": "object"},
        "terminationGracePeriodSeconds": {"type": "integer"},
    },
    "additionalProperties": False,
}
TEMPLATE = {"type": "object", "required": ["spec"], "properties": {"spec": POD, "metadata": {"type": "object"}}}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "Secret": ("v1", {"required": ["stringData"], "properties": {"stringData": STRINGS}}),
    "PersistentVolumeClaim": ("v1", {"properties": {"spec": {"required": ["accessModes", "resources"]}}}),
    "RayService": (
        "ray.io/v1",
        {
            "properties": {
                "spec": {
                    "required": ["rayClusterConfig"],
                    "properties": {
                        "serveConfigV2": {"type": "string"},
                        "rayClusterConfig": {
                            "required": ["headGroupSpec"],
                            "properties": {
                                "rayVersion": {"type": "string"},
                                "headGroupSpec": {
                                    "required": ["template"],
                                    "properties": {"template": TEMPLATE, "rayStartParams": STRINGS},
                                },
                                "workerGroupSpecs": {
                                    "type": "array",
                                    "items": {
                                        "required": ["groupName", "template"],
                                        "properties": {"groupName": NAME, "template": TEMPLATE, "rayStartParams": STRINGS},
                                    },
                                },
                            },
                        },
                    },
                }
            }
        },
    ),
    "Service": (
        "v1",
        {
            "properties": {
                "spec": {
                    "required": ["ports", "selector"],
                    "properties": {
                        "selector": STRINGS,
                        "ports": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"required": ["port"], "properties": {"port": PORT, "targetPort": TARGET}},
                        },
                    },
                }
            }
        },
    ),
    "NetworkPolicy": ("networking.k8s.io/v1", {"properties": {"spec": {"required": ["podSelector"]}}}),
    "StatefulSet": (
        "apps/v1",
        {"properties": {"spec": {"required": ["selector", "serviceName", "template"], "properties": {"template": TEMPLATE}}}},
    ),
}


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay" / "rayservice.yaml").read_text()))


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return read_stages(DEPLOY / "Dockerfile")


@pytest.fixture(scope="module")
def cluster(objects: list[dict[str, Any]]) -> dict[str, Any]:
    service: dict[str, Any] = find(objects, "RayService", "tinsmith")["spec"]
    return service


@pytest.fixture(scope="module")
def config(objects: list[dict[str, Any]]) -> ServerConfig:
    return validate(yaml.safe_load(find(objects, "Secret", "tinsmith")["stringData"]["server.yaml"]))


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def templates(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pod template of the file."""
    found = []
    for item in objects:
        if item["kind"] == "StatefulSet":
            found.append(item["spec"]["template"])
        if item["kind"] == "RayService":
            ray = item["spec"]["rayClusterConfig"]
            found += [ray["headGroupSpec"]["template"], *(group["template"] for group in ray["workerGroupSpecs"])]
    return found


def container(template: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [item for item in template["spec"]["containers"] if item["name"] == name]
    return found


def test_every_object_has_the_fields_that_kubernetes_requires(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        version, spec = SPECS[item["kind"]]
        jsonschema.validate(
            item,
            {
                "type": "object",
                "required": ["apiVersion", "kind", "metadata"],
                "properties": {
                    "apiVersion": {"const": version},
                    "metadata": {"type": "object", "required": ["name"], "properties": {"name": NAME, "labels": STRINGS}},
                },
                "allOf": [spec],
            },
        )
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))


def test_ports_of_probes_and_services_exist_in_the_pods(objects: list[dict[str, Any]]) -> None:
    for template in templates(objects):
        for item in template["spec"]["containers"]:
            ports = {port["name"] for port in item.get("ports", [])}
            probes = [item[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in item]
            assert probes, f"{item['name']} is probed"
            assert {next(probe[how]["port"] for how in ("httpGet", "tcpSocket") if how in probe) for probe in probes} <= ports
    for service in (item for item in objects if item["kind"] == "Service"):
        selected = [t for t in templates(objects) if service["spec"]["selector"].items() <= t["metadata"]["labels"].items()]
        named = {port["name"] for t in selected for item in t["spec"]["containers"] for port in item["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


def test_every_mount_has_a_volume_and_every_volume_a_source(objects: list[dict[str, Any]]) -> None:
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    for template in templates(objects):
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"] for item in [*pod["containers"], *pod.get("initContainers", [])] for mount in item.get("volumeMounts", [])}
        assert mounts - set(volumes) <= {"data"}  # of the claim template
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            else:
                secret = find(objects, "Secret", volume["secret"]["secretName"])
                assert {part["key"] for part in volume["secret"]["items"]} <= set(secret["stringData"])


def test_callers_reach_the_gateway_through_the_door(
    objects: list[dict[str, Any]], cluster: dict[str, Any], config: ServerConfig, stages: dict[str, Stage]
) -> None:
    [port] = find(objects, "Service", "tinsmith")["spec"]["ports"]
    assert port["port"] == config.gateway.port
    door = container(cluster["rayClusterConfig"]["workerGroupSpecs"][0]["template"], "door")
    listens, forwards = stages["door"].last("CMD").words
    [opened] = door["ports"]
    assert port["targetPort"] == opened["name"]
    assert listens.startswith(f"TCP-LISTEN:{opened['containerPort']},")
    assert forwards == f"TCP:{config.gateway.host}:{config.gateway.port}"
    policy = find(objects, "NetworkPolicy", "tinsmith")["spec"]["ingress"]
    assert policy[-1]["ports"] == [{"protocol": "TCP", "port": opened["containerPort"]}]


def test_the_door_is_probed_by_both_health_paths_under_a_host_that_is_allowed(cluster: dict[str, Any], config: ServerConfig) -> None:
    door = container(cluster["rayClusterConfig"]["workerGroupSpecs"][0]["template"], "door")
    probes = [door[name]["httpGet"] for name in ("startupProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/healthz/deep", "/healthz"]
    for probe in probes:
        [header] = probe["httpHeaders"]
        assert header["name"] == "Host"
        assert header["value"] in config.gateway.allowed_hosts


def test_the_service_name_is_an_allowed_host(objects: list[dict[str, Any]], config: ServerConfig) -> None:
    name = find(objects, "Service", "tinsmith")["metadata"]["name"]
    assert {name, f"{name}.default.svc.cluster.local"} <= set(config.gateway.allowed_hosts)


def test_serve_starts_the_command_and_listens_where_the_configuration_says(cluster: dict[str, Any], config: ServerConfig) -> None:
    serve = ServeDeploySchema.model_validate(yaml.safe_load(cluster["serveConfigV2"]))
    assert (serve.http_options.host, serve.http_options.port) == (config.gateway.host, config.gateway.port)
    assert config.gateway.ingress == "serve"
    assert config.ray.address == "auto"
    [application] = serve.applications
    module, _, function = application.import_path.partition(":")
    assert (module, function) == ("tinsmith.deployments.rayservice", "build")
    path = application.args["config"]
    ray = cluster["rayClusterConfig"]
    for template in (ray["headGroupSpec"]["template"], ray["workerGroupSpecs"][0]["template"]):
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert path.rpartition("/")[0] in {mount["mountPath"] for mount in mounts}
        assert any(str(config.checkpoints.dir).startswith(mount["mountPath"]) for mount in mounts)


def test_rays_token_is_on_and_its_release_is_the_pinned_one(cluster: dict[str, Any]) -> None:
    ray = cluster["rayClusterConfig"]
    assert ray["authOptions"] == {"mode": "token"}
    assert f"ray=={ray['rayVersion']}" in (DEPLOY.parent / "constraints.txt").read_text().split()


def test_the_workers_have_room_for_what_the_configuration_needs(cluster: dict[str, Any], config: ServerConfig) -> None:
    [group] = cluster["rayClusterConfig"]["workerGroupSpecs"]
    assert int(group["rayStartParams"]["num-cpus"]) * group["replicas"] >= config.num_workers
    limit = container(group["template"], "ray-worker")["resources"]["limits"]["memory"]
    assert float(limit.removesuffix("Gi")) * 1024 * group["replicas"] >= estimate(config, cache_dir()).host_mib


def test_redis_keeps_everything_and_evicts_nothing(objects: list[dict[str, Any]], config: ServerConfig) -> None:
    lines = find(objects, "Secret", "tinsmith")["stringData"]["redis.conf"].splitlines()
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= set(lines)
    [password] = [line.split()[1] for line in lines if line.startswith("requirepass")]
    [port] = find(objects, "Service", "tinsmith-redis")["spec"]["ports"]
    assert config.store.url == f"redis://:{password}@tinsmith-redis:{port['port']}/0"


def test_nothing_runs_as_root_and_the_users_are_those_of_the_images(objects: list[dict[str, Any]], stages: dict[str, Stage]) -> None:
    for template in templates(objects):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    worker = next(t for t in templates(objects) if t["metadata"]["labels"]["app.kubernetes.io/component"] == "worker")
    assert f"--uid {worker['spec']['securityContext']['runAsUser']} " in stages["server"].all("RUN")[0].text
    assert f"--uid {container(worker, 'door')['securityContext']['runAsUser']} " in stages["door"].all("RUN")[0].text
