"""The pool executor over scripted lanes and a scripted backend: take, run, settle, and everything that can go wrong between them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tinsmith.protocol.errors import ReasonCode, StateContention, ValidationFailed
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.queue import pool
from tinsmith.queue.pool import Finished, PoolExecutor, Work
from tinsmith.state.lanes import LeaseExpired, PoolEntry

DONE = Outcome(result=b"answer")


def entry(rid: str, token: int = 1, attempts: int = 0) -> PoolEntry:
    return PoolEntry(rid=rid, tenant="local", digest=f"d-{rid}", size=3, tokens=5, token=token, attempts=attempts)


def decode(body: bytes) -> Sample:
    if body == b"garbage":
        raise ValueError("no sample")
    prompt = ModelInput((TextChunk(body.ljust(4, b"\0")[:4]),))
    return Sample(prompt=prompt, params=SamplingParams(seed=0), num_samples=1, adapter=None)


class ScriptedLanes:
    """Hands out what `queue` holds and notes what is settled; `away` makes the next calls fail, one a count."""

    def __init__(self) -> None:
        self.queue: deque[PoolEntry] = deque()
        self.settled: list[tuple[PoolEntry, Outcome]] = []
        self.round_trips = 0
        self.takes = 0
        self.largest_take = 0
        self.failures: dict[str, list[Exception]] = {"take": [], "settle": [], "bodies": []}
        self.lost_bodies: set[str] = set()
        self.refused: frozenset[str] = frozenset()
        self.changed = asyncio.Event()

    def _fail(self, name: str) -> None:
        if self.failures[name]:
            raise self.failures[name].pop(0)

    async def pool_take(self, base: str, replica: str, max_entries: int, max_tokens: int) -> list[PoolEntry]:
        assert (base, replica, max_tokens) == ("base", "replica", pool.TAKE_TOKENS)
        self.takes += 1
        self.largest_take = max(self.largest_take, max_entries)
        self._fail("take")
        taken: list[PoolEntry] = []
        while self.queue and len(taken) < max_entries and not (taken and max(self.queue[0].attempts, taken[-1].attempts)):
            taken.append(self.queue.popleft())
        return taken

    async def bodies(self, commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
        self._fail("bodies")
        assert all(digest == f"d-{rid}" for rid, digest in commands)
        return [None if rid in self.lost_bodies else b"garbage" if rid == "garbage" else b"body" for rid, _ in commands]

    async def pool_settle(self, replica: str, settlements: Sequence[tuple[PoolEntry, Outcome]]) -> frozenset[str]:
        self._fail("settle")
        self.round_trips += 1
        self.settled += settlements
        self.changed.set()
        return self.refused

    async def until_settled(self, count: int) -> dict[str, Outcome]:
        async with asyncio.timeout(5):
            while len(self.settled) < count:
                self.changed.clear()
                await self.changed.wait()
        return {held.rid: outcome for held, outcome in self.settled}


class ScriptedBackend:
    """Finishes what `finish` names with the next step; a step waits until there is something to do."""

    def __init__(self, capacity: int = 4) -> None:
        self.capacity = capacity
        self.live: dict[str, Work] = {}
        self.refusals: dict[str, Outcome] = {}
        self.cancelled: list[str] = []
        self.finishes_all = True
        self.ready: list[str] = []
        self.wake: Callable[[], None] = lambda: None
        self.admitted = asyncio.Event()
        self.steps = 0

    @property
    def is_idle(self) -> bool:
        return not self.live if self.finishes_all else not self.ready

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def room(self) -> int:
        return self.capacity - len(self.live)

    async def admit(self, works: Sequence[Work]) -> list[Finished]:
        over = [(work.rid, self.refusals[work.rid]) for work in works if work.rid in self.refusals]
        self.live.update({work.rid: work for work in works if work.rid not in self.refusals})
        self.admitted.set()
        return over

    async def step(self) -> list[Finished]:
        self.steps += 1
        await asyncio.sleep(0)
        rids = list(self.live) if self.finishes_all else self.ready
        self.ready = []
        return [(rid, DONE) for rid in rids if self.live.pop(rid, None) is not None]

    def cancel(self, rid: str) -> None:
        self.cancelled.append(rid)
        self.live.pop(rid, None)

    def finish(self, *rids: str) -> None:
        self.ready += rids
        self.wake()


@pytest.fixture
async def lanes() -> ScriptedLanes:
    return ScriptedLanes()


@pytest.fixture
async def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_PAUSE_S", 0.01)


@asynccontextmanager
async def running(lanes: ScriptedLanes, backend: ScriptedBackend, *, timeout_s: float = 60) -> AsyncIterator[PoolExecutor]:
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=timeout_s)  # type: ignore[arg-type]
    task = asyncio.create_task(executor.run())
    yield executor
    backend.finishes_all = True
    executor.stop()
    async with asyncio.timeout(5):
        await task
    assert executor.num_held == 0


async def test_work_from_before_the_start_is_taken_and_settled(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    lanes.queue.extend([entry("a"), entry("b")])
    async with running(lanes, backend):
        assert await lanes.until_settled(2) == {"a": DONE, "b": DONE}
    assert lanes.round_trips == 1, "what ends together is settled in one round trip"


@pytest.mark.proves("I12")
async def test_an_idle_executor_asks_nothing_until_it_is_woken(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    async with running(lanes, backend) as executor:
        await asyncio.sleep(0.05)
        assert (lanes.takes, backend.steps) == (1, 0)
        lanes.queue.append(entry("late"))
        executor.wake()
        assert await lanes.until_settled(1) == {"late": DONE}
        await asyncio.sleep(0.05)
        assert lanes.takes == 3, "one more look after a take that brought something"


async def test_no_more_is_taken_than_there_is_room_for(lanes: ScriptedLanes) -> None:
    backend = ScriptedBackend(capacity=2)
    backend.finishes_all = False
    lanes.queue.extend([entry("a"), entry("b"), entry("c")])
    async with running(lanes, backend):
        await backend.admitted.wait()
        await asyncio.sleep(0.02)
        assert list(backend.live) == ["a", "b"]
        backend.finish("a")
        await lanes.until_settled(1)
        await asyncio.sleep(0.02)
        assert list(backend.live) == ["b", "c"], "the free place is filled without another event"


async def test_new_requests_join_while_others_run(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.append(entry("slow"))
    async with running(lanes, backend) as executor:
        await backend.admitted.wait()
        lanes.queue.append(entry("quick"))
        backend.admitted.clear()
        executor.wake()
        await backend.admitted.wait()
        backend.finish("quick")
        assert await lanes.until_settled(1) == {"quick": DONE}
        assert list(backend.live) == ["slow"]


@pytest.mark.proves("I10")
async def test_one_that_has_cost_a_worker_runs_alone(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.extend([entry("fresh"), entry("suspect", attempts=1), entry("other suspect", attempts=1), entry("late")])
    ran_together: list[list[str]] = []
    async with running(lanes, backend):
        for rid in ("fresh", "suspect", "other suspect", "late"):
            await asyncio.sleep(0.02)
            ran_together.append(list(backend.live))
            backend.finish(rid)
            await lanes.until_settled(len(ran_together))
    assert ran_together == [["fresh"], ["suspect"], ["other suspect"], ["late"]]


async def test_refused_undecodable_and_lost_commands_fail_alone(
    lanes: ScriptedLanes, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Outcome.failed(ValidationFailed("prompt: empty"), tainted=False)
    backend.refusals["refused"] = refusal
    lanes.lost_bodies.add("lost")
    lanes.queue.extend([entry("refused"), entry("garbage"), entry("lost"), entry("good")])
    async with running(lanes, backend):
        outcomes = await lanes.until_settled(4)
    assert outcomes["good"] == DONE
    assert outcomes["refused"] == refusal
    for rid in ("garbage", "lost"):
        failure = outcomes[rid].failure
        assert failure is not None
        assert failure.reason is ReasonCode.INTERNAL_ERROR
    assert "no sample" in caplog.text, "the traceback is in the log"


@pytest.mark.proves("R64")
async def test_a_request_that_does_not_end_is_cancelled_at_its_bound(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.append(entry("endless"))
    async with running(lanes, backend, timeout_s=0.05):
        outcomes = await lanes.until_settled(1)
    failure = outcomes["endless"].failure
    assert failure is not None
    assert failure.reason is ReasonCode.EXECUTION_TIMEOUT
    assert backend.cancelled == ["endless"]


async def test_outcomes_are_kept_while_the_store_is_away(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    lanes.failures["settle"] = [StateContention("away")] * 3
    lanes.queue.append(entry("a"))
    async with running(lanes, backend):
        assert await lanes.until_settled(1) == {"a": DONE}
    assert lanes.failures["settle"] == []
    assert lanes.settled == [(entry("a"), DONE)]


@pytest.mark.parametrize("error", [StateContention("away"), LeaseExpired("renew")])
async def test_a_failed_take_is_tried_again(lanes: ScriptedLanes, backend: ScriptedBackend, error: Exception) -> None:
    lanes.failures["take"] = [error] * 2
    lanes.queue.append(entry("a"))
    async with running(lanes, backend):
        assert await lanes.until_settled(1) == {"a": DONE}


async def test_entries_whose_bodies_could_not_be_read_are_not_lost(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    lanes.failures["bodies"] = [StateContention("away")]
    lanes.queue.append(entry("a"))
    async with running(lanes, backend) as executor:
        await asyncio.sleep(0)
        executor.stop()
        assert await lanes.until_settled(1) == {"a": DONE}
    assert lanes.takes == 1, "they are under our lease: nobody else would run them"


async def test_an_entry_that_comes_back_under_a_new_token_goes_on(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.append(entry("a"))
    async with running(lanes, backend) as executor:
        await backend.admitted.wait()
        lanes.queue.append(entry("a", token=2))
        executor.wake()
        await asyncio.sleep(0.02)
        assert len(backend.live) == 1
        backend.finish("a")
        await lanes.until_settled(1)
    assert lanes.settled == [(entry("a", token=2), DONE)]


async def test_a_kept_outcome_is_settled_under_the_newer_token(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    lanes.failures["settle"] = [StateContention("away")]
    lanes.queue.append(entry("a"))
    async with running(lanes, backend) as executor:
        await asyncio.sleep(0.02)
        assert lanes.settled == []
        lanes.queue.append(entry("a", token=2))
        executor.wake()
        await lanes.until_settled(1)
    assert lanes.settled == [(entry("a", token=2), DONE)]
    assert backend.steps == 1, "it was not run again"


async def test_an_outdated_outcome_is_forgotten(lanes: ScriptedLanes, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lanes.refused = frozenset({"a"})
    lanes.queue.append(entry("a"))
    async with running(lanes, backend):
        await lanes.until_settled(1)
    assert "came too late" in caplog.text


async def test_stop_finishes_what_was_taken_and_takes_nothing_more(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.append(entry("a"))
    async with running(lanes, backend) as executor:
        await backend.admitted.wait()
        executor.stop()
        lanes.queue.append(entry("b"))
        executor.wake()
        await asyncio.sleep(0.02)
        backend.finish("a")
        await lanes.until_settled(1)
    assert list(lanes.queue) == [entry("b")]


async def test_a_cancelled_executor_leaves_no_task_behind(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    blocked = asyncio.Event()

    async def never(*_: object) -> list[PoolEntry]:
        await blocked.wait()
        return []

    lanes.pool_take = never  # type: ignore[method-assign]
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=9)  # type: ignore[arg-type]
    task = asyncio.create_task(executor.run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_a_defect_in_the_intake_ends_the_executor(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    lanes.failures["take"] = [TypeError("a defect")]
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a defect"):
        await executor.run()


def test_pauses_grow_up_to_a_bound_and_end() -> None:
    pause = pool._Pause()
    lengths = []
    for _ in range(12):
        before = pause.length_s
        pause.lengthen(100.0)
        lengths.append(pause.until - 100.0)
        assert pause.until == 100.0 + before
    assert lengths == sorted(lengths)
    assert lengths[-1] == pool._LONGEST_PAUSE_S
    pause.end()
    assert replace(pause) == pool._Pause(length_s=pool._PAUSE_S)


async def test_large_takes_are_made_in_small_steps(lanes: ScriptedLanes) -> None:
    backend = ScriptedBackend(capacity=10)
    lanes.queue.extend([entry(str(number)) for number in range(9)])
    async with running(lanes, backend):
        await lanes.until_settled(9)
    assert lanes.largest_take == pool.TAKE_ENTRIES
