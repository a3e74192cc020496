"""The session and the samplers of this face: its protocol knows neither, the queue wants both.

A tenant has one session here, begun by its first request and kept alive by each further one and by those that run. After a silence the
janitor ends it, as any other; after a day a request begins a new one. So the samplers of the face, one for each base model and artifact
that was asked for, are those of two days at most.
"""

import hashlib
import uuid

from tinsmith.gateway.deps import Services
from tinsmith.gateway.openai.served import ServedModel
from tinsmith.gateway.sessions import open_session
from tinsmith.protocol import ids
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.sessions import SamplerRecord, SessionRecord
from tinsmith.state.face_sessions import FaceSession, FaceSessions, Held

FACE = "openai"
DISPLAY_NAME = "OpenAI face"
MAX_AGE_MS = 24 * 3600 * 1000  # as long as an ended session is kept


async def sampler_of(services: Services, tenant: str, served: ServedModel) -> SamplerRecord:
    """The sampler of the model, in the tenant's session. Idempotent. Raises StateContention."""
    now_ms = await services.store.now_ms()
    session_id = await _live_session(services, tenant, now_ms)
    artifact = None if served.checkpoint is None else served.checkpoint.artifact
    record = SamplerRecord(
        tenant=tenant,
        session_id=session_id,
        sampler_id=ids.sampling_session_id(session_id, _number(served.base.name, artifact)),
        base_model=served.base.name,
        model_path=None if served.checkpoint is None else served.checkpoint.path,
        artifact=artifact,
        created_ms=now_ms,
    )
    return await services.catalog.add_sampler(record)


async def _live_session(services: Services, tenant: str, now_ms: int) -> str:
    held = await FaceSessions(services.store).current(tenant, FACE)
    if held.record is not None and await _is_live(services, held.record, now_ms):
        await services.catalog.beat(tenant, held.record.session_id, now_ms)
        return held.record.session_id
    return await _begin(services, tenant, held, now_ms)


async def _is_live(services: Services, record: FaceSession, now_ms: int) -> bool:
    if now_ms - record.created_ms >= MAX_AGE_MS:
        return False
    try:
        return (await services.catalog.session(record.tenant, record.session_id)).ended_ms is None
    except NotFound:  # forgotten, or begun by a process that died before it had written it
        return False


async def _begin(services: Services, tenant: str, seen: Held, now_ms: int) -> str:
    """The record first: of several that begin one at once, the others find it. Who finds it before the session is written begins another
    one, and the one that nobody names ends by its silence."""
    wanted = FaceSession(tenant=tenant, face=FACE, session_id=str(uuid.uuid4()), created_ms=now_ms)
    current = await FaceSessions(services.store).replace(wanted, seen)
    if current != wanted and await _is_live(services, current, now_ms):
        return current.session_id
    session_id = wanted.session_id
    record = SessionRecord(tenant=tenant, session_id=session_id, created_ms=now_ms, tags=[FACE], display_name=DISPLAY_NAME)
    await open_session(services, record)
    return session_id


def _number(base_model: str, artifact: str | None) -> int:
    """A sampler's number in its session follows from what it samples: who asks again finds it, whichever gateway made it."""
    digest = hashlib.sha256(f"{base_model}\0{'' if artifact is None else artifact}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
