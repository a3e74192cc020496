"""What a model's name stands for under /v1: a base model by its name, a sampler checkpoint by its path.

Whatever is wrong with a name (unknown, another tenant's, expired, no path at all) is answered in the same words.
"""

from dataclasses import dataclass

from tinsmith.gateway.deps import Services
from tinsmith.protocol.errors import NotFound, ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointKind, CheckpointRecord

_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name`: as it was asked for. `checkpoint` None: the base model alone."""

    name: str
    base: BaseModelInfo
    checkpoint: CheckpointRecord | None


async def find(services: Services, tenant: str, name: str) -> ServedModel:
    """Raises NotFound."""
    if name in services.base_models:
        return ServedModel(name, services.base_models[name], None)
    checkpoint = await _checkpoint(services, tenant, name) if name.startswith(_SCHEME) else None
    if checkpoint is None or checkpoint.base_model not in services.base_models:
        raise NotFound(f"model: {name[:200]!r} does not exist, or is not yours; GET /v1/models lists those that you may use")
    return ServedModel(name, services.base_models[checkpoint.base_model], checkpoint)


async def _checkpoint(services: Services, tenant: str, path: str) -> CheckpointRecord | None:
    """Training checkpoints hold no sampler's weights."""
    try:
        found = await services.checkpoint(tenant, path, field="model")
    except (NotFound, ValidationFailed):
        return None
    return found if found.kind is CheckpointKind.SAMPLER else None
