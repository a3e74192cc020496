"""The session that a face keeps for a tenant."""

import pytest

from tinsmith.protocol.errors import StateContention
from tinsmith.state.face_sessions import FaceSession, FaceSessions, Held
from tinsmith.state.memory_store import MemoryStore


def record(session_id: str, tenant: str = "one") -> FaceSession:
    return FaceSession(tenant=tenant, face="openai", session_id=session_id, created_ms=5)


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await store.open()
    return store


async def test_the_first_of_several_that_begin_at_once_is_the_one(store: MemoryStore) -> None:
    sessions = FaceSessions(store)
    seen = await sessions.current("one", "openai")
    assert seen == Held(None, 0)
    assert await sessions.replace(record("a"), seen) == record("a")
    assert await sessions.replace(record("b"), seen) == record("a")
    held = await sessions.current("one", "openai")
    assert held.record == record("a")
    assert await sessions.replace(record("b"), held) == record("b")
    assert await sessions.current("another", "openai") == Held(None, 0)
    assert len(await store.list("one/face_sessions")) == 1


async def test_a_store_that_is_away_is_no_rival(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> int:
        raise StateContention("away")

    monkeypatch.setattr(store, "put", away)
    with pytest.raises(StateContention):
        await FaceSessions(store).replace(record("a"), Held(None, 0))
