"""Samplers in the catalog: the first record of a number stays."""

import pytest

from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import SamplerRecord
from tinsmith.state.catalog import Catalog
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import Record


def record(artifact: str | None) -> SamplerRecord:
    return SamplerRecord(tenant="t", session_id="s", sampler_id="s:sample:0", base_model="org/m", artifact=artifact, created_ms=1)


class Late(MemoryStore):
    """Its first answer was read before the record came."""

    is_late = True

    async def get(self, table: str, id: str) -> Record | None:
        held = await super().get(table, id)
        was_late, self.is_late = self.is_late, False
        return None if was_late else held


class Away(MemoryStore):
    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        raise StateContention("the store is away")


async def test_the_first_sampler_of_a_number_stays_and_is_answered() -> None:
    catalog = Catalog(MemoryStore(lambda: 0))
    assert await catalog.add_sampler(record("a")) == record("a")
    assert await catalog.add_sampler(record(None)) == record("a")


async def test_of_two_samplers_that_come_at_once_the_first_stays() -> None:
    store = Late(lambda: 0)
    await store.put("t/samplers", "s:sample:0", record("a").model_dump_json().encode())
    assert await Catalog(store).add_sampler(record("b")) == record("a")


async def test_a_store_that_is_away_is_no_sampler_of_another() -> None:
    with pytest.raises(StateContention, match="is away"):
        await Catalog(Away(lambda: 0)).add_sampler(record("a"))
