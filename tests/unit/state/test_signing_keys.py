"""Signing keys: what one process signs another accepts, for two rotations and no longer."""

import pytest

from tinsmith.protocol.errors import StateContention
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.signing_keys import ROTATION_MS, SigningKeys
from tinsmith.state.store import Record


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


async def test_every_process_finds_the_same_key(store: MemoryStore) -> None:
    key = await SigningKeys(store, "downloads").current()
    assert await SigningKeys(store, "downloads").current() == key
    assert await SigningKeys(store, "downloads").find(key.key_id) == key
    assert len(key.secret) == 32
    assert key.secret.hex() not in repr(key)


async def test_each_purpose_has_keys_of_its_own(store: MemoryStore) -> None:
    key = await SigningKeys(store, "downloads").current()
    assert await SigningKeys(store, "jwt").find(key.key_id) is None
    assert (await SigningKeys(store, "jwt").current()).secret != key.secret


async def test_a_key_signs_for_one_rotation_and_is_accepted_for_two(store: MemoryStore, clock: Clock) -> None:
    keys = SigningKeys(store, "p")
    first = await keys.current()
    clock.ms += ROTATION_MS - 1
    assert await keys.current() == first
    clock.ms += 1
    second = await keys.current()
    assert second.key_id != first.key_id
    assert await keys.find(first.key_id) == first
    clock.ms += ROTATION_MS - 1
    assert await keys.find(first.key_id) == first
    clock.ms += 1
    assert await keys.find(first.key_id) is None
    assert await keys.find(second.key_id) == second


async def test_a_key_that_is_no_longer_accepted_is_no_longer_kept(store: MemoryStore, clock: Clock) -> None:
    keys = SigningKeys(store, "p")
    first = await keys.current()
    for _ in range(2):
        clock.ms += ROTATION_MS
        await keys.current()
    (held,) = (await store.list("system/signing_keys")).values()
    assert first.secret.hex() not in held.value.decode()


async def test_an_unknown_key_is_none(store: MemoryStore) -> None:
    assert await SigningKeys(store, "p").find("nobody") is None


class Late(MemoryStore):
    """Reads nothing the first time: another process draws its key meanwhile."""

    num_late = 1

    async def get(self, table: str, id: str) -> Record | None:
        self.num_late -= 1
        return None if self.num_late >= 0 else await super().get(table, id)


async def test_of_two_that_draw_at_once_both_sign_with_the_first(clock: Clock) -> None:
    store = Late(clock)
    store.num_late = 0
    first = await SigningKeys(store, "p").current()
    store.num_late = 1
    assert await SigningKeys(store, "p").current() == first


class Away(MemoryStore):
    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        raise StateContention("the store is away")


async def test_a_store_that_is_away_is_not_asked_for_ever() -> None:
    with pytest.raises(StateContention):
        await SigningKeys(Away(), "p").current()
