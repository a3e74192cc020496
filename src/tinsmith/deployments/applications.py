"""Which Serve applications make up the server, and what each replica of them may use. One application a role and base model, all without a
route, so that one that fails names itself and the others go on."""

from collections.abc import Mapping
from types import MappingProxyType

from ray import serve
from ray.serve import Application, RunTarget

from tinsmith.config import ServerConfig
from tinsmith.deployments.cluster import SERVE_LOGS
from tinsmith.deployments.gateway import DirectGateway, Gateway
from tinsmith.deployments.janitor import Janitor
from tinsmith.deployments.sampler import Sampler
from tinsmith.deployments.trainer import Trainer
from tinsmith.deployments.wiring import Blueprint

JANITOR = "tinsmith-janitor"  # started last: no request waits for it
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0  # three misses in a row end a replica; a call that holds the interpreter lock for seconds must not
STOP_S = 4.0  # of a replica that drains
PROXIED_REQUESTS = 20_000  # a gateway behind Serve's proxy holds at once, long polls mostly; Serve's default is 5


def application_names(config: ServerConfig) -> list[str]:
    workers = [f"tinsmith-{role}-{index}" for index in range(len(config.models)) for role in ("trainer", "sampler")]
    return ["tinsmith-gateway", JANITOR, *workers]


def applications_of(blueprint: Blueprint, port: int) -> list[RunTarget]:
    """Everything to run, in the order of `application_names`."""
    config = blueprint.config
    targets = [_gateway_target(blueprint, port), _deployed("janitor", Janitor, blueprint)]
    for model in config.models:
        trainer, sampler = model.trainer, model.sampler
        targets.append(_deployed("trainer", Trainer, blueprint, model.name, replicas=trainer.replicas, resources=_worker(trainer.num_gpus)))
        targets.append(_deployed("sampler", Sampler, blueprint, model.name, replicas=sampler.replicas, resources=_worker(sampler.num_gpus)))
    prefixes = ["/" if config.gateway.ingress == "serve" else None, *[None] * (len(targets) - 1)]
    return [
        RunTarget(target, name=name, route_prefix=prefix, logging_config=SERVE_LOGS)
        for name, target, prefix in zip(application_names(config), targets, prefixes, strict=True)
    ]


def _gateway_target(blueprint: Blueprint, port: int) -> Application:
    replicas = blueprint.config.gateway.replicas
    if blueprint.config.gateway.ingress == "serve":
        return _deployed("gateway", serve.ingress()(_stopping(Gateway)), blueprint, replicas=replicas)
    return _deployed("gateway", DirectGateway, blueprint, port, replicas=replicas)


def _worker(num_gpus: float) -> Mapping[str, float]:
    """One logical CPU spreads the workers over the nodes of a cluster."""
    return {"num_cpus": 1, "num_gpus": num_gpus}


def _deployed(
    role: str, kind: type, *arguments: object, replicas: int = 1, resources: Mapping[str, float] = MappingProxyType({"num_cpus": 0})
) -> Application:
    deployment = serve.deployment(_stopping(kind)).options(
        name=role,
        num_replicas=replicas,
        ray_actor_options=dict(resources),
        user_config={} if hasattr(kind, "reconfigure") else None,  # Serve calls `reconfigure` only where there is one
        max_ongoing_requests=PROXIED_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=SERVE_LOGS,
    )
    return deployment.bind(*arguments)


def _stopping(kind: type) -> type:
    """Serve awaits a method `__del__` as it stops a replica. Only there does the name mean that: elsewhere Python would call it. What
    Serve puts around an app has one, which calls that of the class inside."""
    stop = None if hasattr(kind, "__del__") else getattr(kind, "stop", None)
    return kind if stop is None else type(kind.__name__, (kind,), {"__del__": stop})
