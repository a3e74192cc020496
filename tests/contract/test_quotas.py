"""Quotas and rates that hold for the whole cluster."""

import asyncio

import pytest

from tests.contract.conftest import MakeState, State

LONG_MS = 60_000


async def reserve(state: State, holder: str, *, limit: int = 1, ttl_ms: int = LONG_MS, quota: str = "models:local") -> bool:
    return await state.store.reserve(quota, holder, limit=limit, ttl_ms=ttl_ms)


@pytest.mark.proves("R59")
async def test_of_two_clients_that_race_for_the_last_unit_one_gets_it(state: State) -> None:
    await reserve(state, "m:0", limit=3)
    await reserve(state, "m:1", limit=3)
    handles = [(await state.connect())[0] for _ in range(8)]
    got = await asyncio.gather(
        *(store.reserve("models:local", f"m:{index + 2}", limit=3, ttl_ms=LONG_MS) for index, store in enumerate(handles))
    )
    assert sum(got) == 1


@pytest.mark.proves("R59")
async def test_a_unit_that_is_not_extended_is_free_again(make_state: MakeState) -> None:
    state = await make_state()
    assert await reserve(state, "lost", limit=2, ttl_ms=200)
    assert await reserve(state, "kept", limit=2)
    assert not await reserve(state, "late", limit=2)
    await state.pass_ms(250)
    assert await reserve(state, "late", limit=2)
    assert not await reserve(state, "lost", limit=2)


@pytest.mark.proves("R59")
async def test_extending_never_fails_and_takes_no_second_unit(state: State) -> None:
    assert await reserve(state, "a", limit=2)
    assert await reserve(state, "b", limit=2)
    assert await reserve(state, "a", limit=2)
    assert await reserve(state, "a", limit=1)  # the limit has become lower
    assert await reserve(state, "b", limit=0)
    assert not await reserve(state, "c", limit=2)


async def test_an_extended_unit_outlives_its_first_lease(make_state: MakeState) -> None:
    state = await make_state()
    assert await reserve(state, "a", ttl_ms=150)
    assert await reserve(state, "a")
    await state.pass_ms(200)
    assert not await reserve(state, "b")


@pytest.mark.proves("R59")
async def test_a_unit_that_is_given_back_is_free_at_once(state: State) -> None:
    assert await reserve(state, "a")
    await state.store.unreserve("models:local", "stranger")
    assert not await reserve(state, "b")
    for _ in range(2):
        await state.store.unreserve("models:local", "a")
    assert await reserve(state, "b")


async def test_quotas_do_not_see_each_other(state: State) -> None:
    assert await reserve(state, "a")
    assert await reserve(state, "b", quota="models:other")


@pytest.mark.proves("R59")
async def test_a_budget_is_spent_once_by_all_clients_together(state: State) -> None:
    handles = [(await state.connect())[0] for _ in range(8)]
    waits = await asyncio.gather(*(store.spend("rps:local", 1, per_s=0.01, burst=3) for store in handles))
    assert waits.count(0) == 3


@pytest.mark.proves("R59")
async def test_who_waits_as_long_as_the_answer_said_is_served(make_state: MakeState) -> None:
    state = await make_state()
    assert await state.store.spend("tps:local", 80, per_s=400, burst=100) == 0
    wait_ms = await state.store.spend("tps:local", 100, per_s=400, burst=100)
    assert 150 <= wait_ms <= 200
    assert await state.store.spend("tps:local", 10, per_s=400, burst=100) == 0  # a refusal took nothing
    await state.pass_ms(wait_ms + 25 + 1)
    assert await state.store.spend("tps:local", 100, per_s=400, burst=100) == 0


async def test_an_amount_above_the_burst_counts_as_the_burst(state: State) -> None:
    assert await state.store.spend("tps:local", 10_000, per_s=1, burst=5) == 0
    wait_ms = await state.store.spend("tps:local", 10_000, per_s=1, burst=5)
    assert 4_000 < wait_ms <= 5_000


async def test_a_bucket_never_holds_more_than_its_burst(make_state: MakeState) -> None:
    state = await make_state()
    assert await state.store.spend("b", 1, per_s=20, burst=2) == 0
    await state.pass_ms(300)
    assert await state.store.spend("b", 2, per_s=20, burst=2) == 0
    assert await state.store.spend("b", 2, per_s=20, burst=2) > 0


async def test_budgets_do_not_see_each_other(state: State) -> None:
    assert await state.store.spend("a", 1, per_s=0.01, burst=1) == 0
    assert await state.store.spend("b", 1, per_s=0.01, burst=1) == 0


@pytest.mark.proves("R57")
async def test_a_flush_forgets_who_holds_what(state: State) -> None:
    await reserve(state, "a")
    await state.store.spend("b", 1, per_s=0.01, burst=1)
    await state.store.flush_all()
    await state.store.open()
    assert await reserve(state, "b")
    assert await state.store.spend("b", 1, per_s=0.01, burst=1) == 0


async def test_what_nobody_holds_leaves_no_key(make_state: MakeState) -> None:
    state = await make_state()
    before = await state.keys()
    await reserve(state, "a", ttl_ms=50)
    await reserve(state, "b")
    await state.store.unreserve("models:local", "b")
    await state.store.unreserve("models:local", "a")
    assert await state.keys() == before
