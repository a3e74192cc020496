"""Waiting for the end of commands, for as long as a window lasts, and why one has not ended: the core of every long poll.

A waiter is registered before its record is read, so no settle falls between; then the caller sleeps until its event, the end of the window
or that of this gateway. Nothing polls.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from tinsmith.gateway.deps import Services
from tinsmith.protocol.envelopes import QueueState
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.sessions import SamplerRecord
from tinsmith.protocol.training import Kind
from tinsmith.state.events import Waiter
from tinsmith.state.feeds import FeedPage
from tinsmith.state.lanes import SETTLED

_NO_SLOT = "the model waits for a trainer with a free slot"


async def settled(services: Services, tenant: str, rid: str, window_s: float) -> FutureRecord | None:
    """The record, as soon as it is terminal, the window ends or this gateway does; None for an unknown or foreign id."""
    (record,) = await any_settled(services, tenant, [rid], window_s)
    return record


async def any_settled(services: Services, tenant: str, rids: Sequence[str], window_s: float) -> list[FutureRecord | None]:
    """The records, as soon as one of them is terminal or unknown, the window ends or this gateway does."""
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(services.events.register(SETTLED, rid)) for rid in dict.fromkeys(rids)]
        for waiter in waiters:
            stack.enter_context(services.polls.hold(waiter))
        records = {waiter.payload: await services.lanes.look(tenant, waiter.payload) for waiter in waiters}
        deadline = asyncio.get_running_loop().time() + window_s
        while all(map(_is_open, records.values())) and not services.polls.are_ending:
            if not await _any_woken(waiters, deadline - asyncio.get_running_loop().time()):
                break
            records = {rid: await services.lanes.look(tenant, rid) for rid in records}
        return [records[rid] for rid in rids]


async def told(services: Services, sampler: SamplerRecord, feed: str, after: int, max_events: int, window_s: float) -> FeedPage:
    """The next page of the feed of one of the sampler's clients, as soon as it is not empty, the window ends or this gateway does.

    Raises NotFound where the session is gone, and where it has ended and told everything: whoever still waits then waits in vain.
    """
    deadline = asyncio.get_running_loop().time() + window_s
    with services.events.register(SETTLED, feed) as waiter, services.polls.hold(waiter):
        while True:
            session = await services.catalog.session(sampler.tenant, sampler.session_id)  # before the feed: an end settles, then marks
            page = await services.lanes.completions(sampler.tenant, feed, after, max_events)
            rest_s = deadline - asyncio.get_running_loop().time()
            if page.completions or rest_s <= 0 or services.polls.are_ending:
                return page
            if session.ended_ms is not None:
                raise NotFound(f"session {session.session_id} has ended ({session.end_reason}); create a new one")
            if not await waiter.wait(rest_s):
                return page


async def queue_state(services: Services, record: FutureRecord) -> tuple[QueueState, str | None]:
    """Where a command that has not ended is, and why, if it does more than wait its turn."""
    lane = None if record.kind is Kind.SAMPLE else await services.lanes.lane(record.lane)
    if lane is not None and lane.is_open and lane.owner is None:
        return QueueState.PAUSED_CAPACITY, _NO_SLOT
    return QueueState.ACTIVE, None


def _is_open(record: FutureRecord | None) -> bool:
    return record is not None and not record.state.is_terminal


async def _any_woken(waiters: Collection[Waiter], timeout_s: float) -> bool:
    if len(waiters) == 1:
        (only,) = waiters
        return await only.wait(timeout_s)
    sleeps = [asyncio.create_task(waiter.wait(timeout_s)) for waiter in waiters]
    try:
        done, _ = await asyncio.wait(sleeps, return_when=asyncio.FIRST_COMPLETED)
        return any(sleep.result() for sleep in done)
    finally:
        for sleep in sleeps:
            sleep.cancel()
        await asyncio.gather(*sleeps, return_exceptions=True)
