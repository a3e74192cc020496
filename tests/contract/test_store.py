"""What every store promises: identity, versioned records, leases."""

import asyncio
import re

import pytest

from tests.contract.conftest import MakeState, State
from tinsmith.protocol.errors import StateContention
from tinsmith.state.store import SCHEMA_VERSION


async def test_the_first_writer_draws_the_identity_and_everybody_reads_it(state: State) -> None:
    handles = [await state.connect() for _ in range(4)]
    identities = await asyncio.gather(*(store.open() for store, _ in handles))
    assert all(identity == identities[0] for identity in identities)
    assert re.fullmatch(r"[0-9a-f]{8}", identities[0].epoch)
    assert len(identities[0].secret) >= 16
    assert identities[0].schema == SCHEMA_VERSION


async def test_the_clock_runs_forward(state: State) -> None:
    before = await state.store.now_ms()
    await state.pass_ms(30)
    assert before + 20 <= await state.store.now_ms() < before + 10_000


async def test_a_record_is_read_as_written_with_its_version(state: State) -> None:
    assert await state.store.get("a/models", "m") is None
    assert await state.store.put("a/models", "m", b"\x00\xff one") == 1
    assert await state.store.put("a/models", "m", b"two") == 2
    record = await state.store.get("a/models", "m")
    assert record is not None
    assert (record.value, record.version) == (b"two", 2)


async def test_an_empty_value_is_a_record(state: State) -> None:
    await state.store.put("system/tenants", "local", b"")
    record = await state.store.get("system/tenants", "local")
    assert record is not None
    assert record.value == b""


@pytest.mark.proves("R57")
async def test_a_write_that_expects_another_version_is_contention_and_changes_nothing(state: State) -> None:
    await state.store.put("a/models", "m", b"one", expect=0)
    for wrong in (0, 2):
        with pytest.raises(StateContention):
            await state.store.put("a/models", "m", b"other", expect=wrong)
    with pytest.raises(StateContention):
        await state.store.put("a/models", "new", b"other", expect=1)
    assert await state.store.put("a/models", "m", b"two", expect=1) == 2
    assert {key: record.value for key, record in (await state.store.list("a/models")).items()} == {"m": b"two"}


async def test_of_concurrent_writers_that_expect_the_same_version_one_wins(state: State) -> None:
    handles = [await state.connect() for _ in range(5)]
    answers = await asyncio.gather(
        *(store.put("a/t", "x", b"%d" % index, expect=0) for index, (store, _) in enumerate(handles)), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["StateContention"] * 4 + ["int"]


async def test_delete_says_whether_there_was_one(state: State) -> None:
    await state.store.put("a/t", "x", b"1")
    assert await state.store.delete("a/t", "x")
    assert not await state.store.delete("a/t", "x")
    assert not await state.store.delete("never/used", "x")
    assert await state.store.get("a/t", "x") is None
    assert await state.store.put("a/t", "x", b"again", expect=0) == 1


async def test_tables_do_not_see_each_other(state: State) -> None:
    await state.store.put("a/models", "m", b"of a")
    await state.store.put("a/models", "n:1/2", b"also of a")
    await state.store.put("b/models", "m", b"of b")
    listed = await state.store.list("a/models")
    assert {key: record.value for key, record in listed.items()} == {"m": b"of a", "n:1/2": b"also of a"}
    assert await state.store.list("c/models") == {}


@pytest.mark.proves("R59")
async def test_a_lease_has_one_holder_until_it_lapses(make_state: MakeState) -> None:
    state = await make_state()
    assert await state.store.lease("janitor", "one", 250)
    assert await state.store.lease("janitor", "one", 250)
    assert not await state.store.lease("janitor", "two", 250)
    assert await state.store.lease("another", "two", 250)
    await state.pass_ms(300)
    assert await state.store.lease("janitor", "two", 60_000)
    assert not await state.store.lease("janitor", "one", 250)


async def test_only_the_holder_gives_a_lease_back(state: State) -> None:
    await state.store.lease("janitor", "one", 60_000)
    await state.store.unlease("janitor", "two")
    assert not await state.store.lease("janitor", "two", 60_000)
    await state.store.unlease("janitor", "one")
    assert await state.store.lease("janitor", "two", 60_000)
    await state.store.unlease("never taken", "one")


@pytest.mark.proves("R57")
async def test_close_drops_the_handle_and_keeps_the_data(state: State) -> None:
    store, _ = await state.connect()
    await store.put("a/t", "x", b"kept")
    await store.close()
    again, _ = await state.connect()
    record = await again.get("a/t", "x")
    assert record is not None
    assert record.value == b"kept"


@pytest.mark.proves("R57")
async def test_flush_all_deletes_everything_and_changes_the_identity(state: State) -> None:
    before = await state.store.open()
    await state.store.put("a/t", "x", b"1")
    await state.store.lease("janitor", "one", 60_000)
    await state.store.flush_all()
    after = await state.store.open()
    assert after.epoch != before.epoch
    assert after.secret != before.secret
    assert await state.store.list("a/t") == {}
    assert await state.store.lease("janitor", "two", 60_000)
