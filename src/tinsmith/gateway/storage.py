"""The storage that a tenant's checkpoints may take: the bytes of the artifacts that its checkpoints name, each artifact once.

What has no name is not counted: snapshots, and ephemeral sampler weights, which go with their session.
"""

import asyncio

from tinsmith.gateway.deps import Services
from tinsmith.gateway.readable import own_checkpoints
from tinsmith.protocol.errors import NotFound, QuotaExceeded, ValidationFailed
from tinsmith.protocol.sessions import CheckpointRecord
from tinsmith.protocol.training import SaveWeightsForSampler, TrainingCommand


async def check_room(services: Services, tenant: str) -> None:
    """Raises QuotaExceeded where the tenant holds as much as it may. The last checkpoint below the bound may pass it: its size is known
    only when it is written. Asks nobody where there is no bound."""
    bound = services.config.limits.max_storage_bytes
    if bound == 0:
        return
    by_artifact = {record.artifact: record for record in await own_checkpoints(services, tenant)}
    used = sum([await size_of(services, record) for record in by_artifact.values()])
    if used >= bound:
        raise QuotaExceeded(f"checkpoints: {used} bytes are stored, the bound is {bound}; delete some, or let them expire, then save again")


async def check_save(services: Services, tenant: str, rid: str, command: TrainingCommand) -> None:
    """As `check_room`, for a command that saves under a name. One that was accepted before is not refused when it is sent again."""
    if services.config.limits.max_storage_bytes == 0 or not _names(command) or await services.lanes.look(tenant, rid) is not None:
        return
    await check_room(services, tenant)


async def size_of(services: Services, record: CheckpointRecord) -> int:
    """Bytes; as the manifest says, where the record was written without having seen one. 0 where the files are gone or damaged."""
    if record.size_bytes is not None:
        return record.size_bytes
    try:
        return (await asyncio.to_thread(services.artifacts.manifest, record.artifact)).size_bytes
    except (NotFound, ValidationFailed):
        return 0


def _names(command: TrainingCommand) -> bool:
    return command.kind.is_save and not (isinstance(command, SaveWeightsForSampler) and command.name is None)
