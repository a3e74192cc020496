"""What is deployed for a configuration; nothing is started."""

from pathlib import Path

import pytest

from tinsmith.config import ServerConfig, validate
from tinsmith.deployments.applications import STOP_S, application_names, applications_of
from tinsmith.deployments.base_models import weightless
from tinsmith.deployments.gateway import Gateway
from tinsmith.deployments.wiring import Blueprint
from tinsmith.deployments.worker import DRAIN_S

FAKE = {"engine": "fake"}


def config(**gateway: object) -> ServerConfig:
    models = [
        {"name": "a", "trainer": {**FAKE, "replicas": 2, "num_gpus": 0.5}, "sampler": FAKE},
        {"name": "b", "trainer": FAKE, "sampler": {**FAKE, "replicas": 3}},
    ]
    return validate({"models": models, "gateway": {"replicas": 4, **gateway}})


def deployed(config: ServerConfig, tmp_path: Path) -> dict[str, tuple[str, int, object, str | None]]:
    """By application: role, replicas, GPUs a replica, route."""
    blueprint = Blueprint(config, {name: weightless(name) for name in "ab"}, None)
    found = {}
    for target in applications_of(blueprint, 9000):
        deployment = target.target._bound_deployment
        gpus = (deployment.ray_actor_options or {}).get("num_gpus", 0)
        found[target.name] = (deployment.name, deployment.num_replicas, gpus, target.route_prefix)
    return found


def test_each_base_model_has_its_trainer_and_its_sampler(tmp_path: Path) -> None:
    assert deployed(config(), tmp_path) == {
        "tinsmith-gateway": ("gateway", 4, 0, None),
        "tinsmith-janitor": ("janitor", 1, 0, None),
        "tinsmith-trainer-0": ("trainer", 2, 0.5, None),
        "tinsmith-sampler-0": ("sampler", 1, 0, None),
        "tinsmith-trainer-1": ("trainer", 1, 0, None),
        "tinsmith-sampler-1": ("sampler", 3, 0, None),
    }


def test_the_names_are_those_of_the_applications(tmp_path: Path) -> None:
    assert list(deployed(config(), tmp_path)) == application_names(config())


def test_behind_serves_proxy_only_the_gateway_has_a_route(tmp_path: Path) -> None:
    routes = {name: route for name, (_, _, _, route) in deployed(config(ingress="serve"), tmp_path).items()}
    assert routes.pop("tinsmith-gateway") == "/"
    assert set(routes.values()) == {None}


@pytest.mark.parametrize("name", ["gateway", "trainer", "sampler", "janitor"])
def test_a_replica_is_stopped_through_its_stop(name: str) -> None:
    blueprint = Blueprint(config(), {model: weightless(model) for model in "ab"}, None)
    kinds = {
        target.target._bound_deployment.name: target.target._bound_deployment.func_or_class for target in applications_of(blueprint, 1)
    }
    assert kinds[name].__del__ is kinds[name].stop


def test_a_drain_ends_before_serve_loses_its_patience() -> None:
    assert DRAIN_S < STOP_S


def test_serve_is_told_to_reconfigure_those_that_can(tmp_path: Path) -> None:
    def configs(**gateway: object) -> dict[str, object]:
        blueprint = Blueprint(config(**gateway), {name: weightless(name) for name in "ab"}, None)
        return {target.name: target.target._bound_deployment._deployment_config.user_config for target in applications_of(blueprint, 9000)}

    assert set(map(repr, configs().values())) == {"{}"}
    assert set(map(repr, configs(ingress="serve").values())) == {"{}"}


def test_what_serve_puts_around_the_app_is_stopped_too_and_then_the_gateway() -> None:
    """Its own end is that of the app's life span."""
    blueprint = Blueprint(config(ingress="serve"), {model: weightless(model) for model in "ab"}, None)
    wrapped = applications_of(blueprint, 1)[0].target._bound_deployment.func_or_class
    assert wrapped.__del__ is not Gateway.stop
    assert wrapped.__mro__[1].__del__ is Gateway.stop
