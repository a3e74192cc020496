"""What the engines that are configured for a base model can do: a request for more is refused before anything is queued.

A request that another engine would take is no fault of the request: 501, with what is offered in its place. A field that means something
to another engine alone is one: 422.
"""

from collections.abc import Iterable

from tinsmith.gateway.deps import Services
from tinsmith.protocol.capabilities import SAMPLING_ENGINES, TRAINING_ENGINES, SamplingCapability, TrainingCapability
from tinsmith.protocol.errors import EndpointUnavailable, ValidationFailed
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.native import FieldRole, StrictRequest, fields_of
from tinsmith.protocol.training import Kind, OptimizerParams


def training_engine(services: Services, base_model: str) -> tuple[str, TrainingCapability]:
    """Name and abilities of the engine that trains the base model."""
    engine = services.config.model(base_model).trainer.engine
    return engine, TRAINING_ENGINES[engine]


def sampling_engine(services: Services, base_model: str) -> tuple[str, SamplingCapability]:
    """Name and abilities of the engine that samples the base model."""
    engine = services.config.model(base_model).sampler.engine
    return engine, SAMPLING_ENGINES[engine]


def check_operation(services: Services, base_model: str, kind: Kind) -> None:
    """Raises EndpointUnavailable."""
    engine, capability = training_engine(services, base_model)
    _check("operation", kind, capability.operations, engine, base_model)


def check_loss(services: Services, base_model: str, loss: str) -> None:
    """Raises EndpointUnavailable for a loss that other engines have; one that none has is a fault that the preflight names."""
    engine, capability = training_engine(services, base_model)
    if loss in LOSSES:
        _check("loss", loss, capability.losses, engine, base_model)


def check_optimizer(services: Services, base_model: str, optimizer: OptimizerParams) -> None:
    """Raises EndpointUnavailable."""
    engine, capability = training_engine(services, base_model)
    _check("optimizer", optimizer.type, capability.optimizers, engine, base_model)


def check_engine_fields(request: StrictRequest, known: Iterable[str], engine: str) -> None:
    """Raises ValidationFailed naming a field that the engine does not read and that is not null."""
    for name in fields_of(type(request), FieldRole.ENGINE):
        if getattr(request, name) is not None and name not in known:
            raise ValidationFailed(f"{name}: engine {engine!r} does not read it; leave it out")


def _check(field: str, asked: str, offered: Iterable[str], engine: str, base_model: str) -> None:
    if asked not in offered:
        raise EndpointUnavailable(
            f"{field}: {asked!r} is not offered for {base_model} (engine {engine!r}); use {', '.join(sorted(offered))}"
        )
