"""Epoch and secret of the store as a gateway remembers them: read once a second at most, however many ask."""

import asyncio

import pytest

from tinsmith.gateway.deps import IDENTITY_AGE_S, Identity
from tinsmith.protocol.errors import StateContention
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import StoreInfo


class CountingStore(MemoryStore):
    """A store that counts its openings, each of which takes a turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.num_opened = 0
        self.is_away = False

    async def open(self) -> StoreInfo:
        self.num_opened += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise StateContention("away")
        return await super().open()


async def test_callers_that_ask_at_once_share_one_read() -> None:
    store, now_s = CountingStore(), 0.0
    identity = Identity(store, lambda: now_s)
    first = await asyncio.gather(*(identity.current() for _ in range(50)))
    assert store.num_opened == 1
    assert len(set(first)) == 1
    now_s += IDENTITY_AGE_S
    await identity.current()
    assert store.num_opened == 1
    now_s += 0.01
    await asyncio.gather(*(identity.current() for _ in range(50)))
    assert store.num_opened == 2


async def test_a_store_that_is_away_is_told_to_all_and_asked_again_by_the_next() -> None:
    store = CountingStore()
    identity = Identity(store)
    store.is_away = True
    answers = await asyncio.gather(*(identity.current() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StateContention] * 3
    assert store.num_opened == 1
    store.is_away = False
    assert (await identity.current()).epoch
    assert store.num_opened == 2


async def test_a_caller_that_gives_up_takes_nobody_with_it() -> None:
    store = CountingStore()
    identity = Identity(store)
    impatient, patient = asyncio.create_task(identity.current()), asyncio.create_task(identity.current())
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).epoch
    with pytest.raises(asyncio.CancelledError):
        await impatient
