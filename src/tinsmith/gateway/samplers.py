"""Sampling sessions: a base model, or one with an adapter, under a number of their session. The same on each face."""

from tinsmith.gateway.deps import Services
from tinsmith.protocol import ids
from tinsmith.protocol.errors import RequestRejected
from tinsmith.protocol.sessions import CheckpointRecord, SamplerRecord
from tinsmith.state.inflight import InflightTargets


async def open_sampler(
    services: Services, tenant: str, session_id: str, number: int, base_model: str, checkpoint: CheckpointRecord | None, *, field: str
) -> SamplerRecord:
    """Idempotent by the number, which the face calls `field`. Cheap: a sampler loads the adapter with the first sample. Raises NotFound
    for a base model that is not served, RequestRejected for a number that was used for another sampler."""
    record = SamplerRecord(
        tenant=tenant,
        session_id=session_id,
        sampler_id=ids.sampling_session_id(session_id, number),
        base_model=services.base_model(base_model).name,
        model_path=None if checkpoint is None else checkpoint.path,
        artifact=None if checkpoint is None else checkpoint.artifact,
        created_ms=await services.store.now_ms(),
    )
    held = await services.catalog.add_sampler(record)
    if _identity_of(held) != _identity_of(record):
        raise RequestRejected(f"{field}: {number} was used for another sampler; count on")
    return held


async def adapter_of(services: Services, sampler: SamplerRecord) -> str | None:
    """The artifact that the sampler samples from now; None for the base model alone. Raises StateContention."""
    if sampler.inflight is None:
        return sampler.artifact
    return (await InflightTargets(services.store).current(sampler.inflight)).artifact


def _identity_of(record: SamplerRecord) -> tuple[str, str | None, bool]:
    """What tells samplers apart. One that was published under a number has an artifact without a path; the artifact under a path may have
    become another since, and the sampler keeps the one that it began with."""
    return record.base_model, record.model_path, record.artifact is not None
