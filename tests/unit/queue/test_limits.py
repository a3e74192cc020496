"""Budgets of a tenant, over a store."""

import copy

import pytest

from tinsmith.config import LimitConfig
from tinsmith.protocol.errors import RateLimited
from tinsmith.queue.limits import Budgets
from tinsmith.state.memory_store import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(clock: Clock, **rates: float) -> Budgets:
    return Budgets(MemoryStore(clock), LimitConfig.model_validate(rates))


async def test_a_rate_of_zero_is_off_and_asks_no_store():
    unreachable: MemoryStore = None  # type: ignore[assignment]
    await Budgets(unreachable, LimitConfig()).admit("a", 10**9)


@pytest.mark.proves("R45")
async def test_two_seconds_worth_of_requests_may_come_at_once_and_the_next_one_waits(clock: Clock):
    budget = limits(clock, requests_per_s=2)
    for _ in range(4):
        await budget.admit("a", 1)
    with pytest.raises(RateLimited, match="more than 2 requests a second; send it again in 1 s") as refused:
        await budget.admit("a", 1)
    assert refused.value.retry_after_s == 0.5
    clock.now_ms += 500
    await budget.admit("a", 1)


async def test_tenants_have_budgets_of_their_own(clock: Clock):
    budget = limits(clock, requests_per_s=0.5)
    await budget.admit("a", 1)
    await budget.admit("b", 1)
    with pytest.raises(RateLimited):
        await budget.admit("a", 1)


async def test_tokens_are_counted_and_more_than_the_budget_holds_counts_as_all_of_it(clock: Clock):
    budget = limits(clock, tokens_per_s=100)
    await budget.admit("a", 0)
    await budget.admit("a", 10_000)
    with pytest.raises(RateLimited, match="100 tokens a second"):
        await budget.admit("a", 100)
    clock.now_ms += 1000
    await budget.admit("a", 100)


def test_a_refusal_travels_with_the_time_to_come_again():
    copied = copy.copy(RateLimited("slow down", 2.5))
    assert (copied.message, copied.retry_after_s) == ("slow down", 2.5)
