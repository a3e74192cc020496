"""The pool executor over scripted lanes and a scripted backend: take, run, settle, and everything that can go wrong between them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tinsmith import telemetry
from tinsmith.protocol.errors import Cancelled, ReasonCode, StateContention, ValidationFailed
from tinsmith.protocol.futures import Outcome, State
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.queue import courier, pool
from tinsmith.queue.gate import TRANSFER_S
from tinsmith.queue.pool import Finished, PoolExecutor, Work
from tinsmith.state.inbox import StreamChunk
from tinsmith.state.inbox import decode as decode_message
from tinsmith.state.lanes import LeaseExpired, PoolEntry

DONE = Outcome(result=b"answer")


def entry(rid: str, token: int = 1, attempts: int = 0, reply_to: str = "") -> PoolEntry:
    return PoolEntry(rid=rid, tenant="local", digest=f"d-{rid}", size=3, tokens=5, token=token, attempts=attempts, reply_to=reply_to)


def chunk(rid: str, offset: int, *tokens: int, sequence: int = 0) -> StreamChunk:
    return StreamChunk(rid=rid, sequence=sequence, offset=offset, tokens=list(tokens), logprobs=[-float(token) for token in tokens])


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
        self.failures: dict[str, list[Exception]] = {"take": [], "settle": [], "bodies": [], "post": []}
        self.lost_bodies: set[str] = set()
        self.refused: frozenset[str] = frozenset()
        self.changed = asyncio.Event()
        self.posts: list[tuple[str, list[StreamChunk]]] = []
        self.may_post = asyncio.Event()
        self.may_post.set()

    async def post(self, topic: str, messages: Sequence[str]) -> None:
        await self.may_post.wait()
        self._fail("post")
        self.posts.append((topic, [decode_message(message) for message in messages]))  # type: ignore[misc]
        self.changed.set()

    async def until_posted(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.posts) < count:
                self.changed.clear()
                await self.changed.wait()

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
        self.chunks: list[StreamChunk] = []
        self.told: list[StreamChunk] = []  # by the step that comes next
        self.may_admit = asyncio.Event()
        self.may_admit.set()

    @property
    def is_idle(self) -> bool:
        return not self.live if self.finishes_all else not (self.ready or self.told)

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def room(self) -> int:
        return self.capacity - len(self.live)

    async def admit(self, works: Sequence[Work]) -> list[Finished]:
        over = [(work.rid, self.refusals[work.rid]) for work in works if work.rid in self.refusals]
        self.live.update({work.rid: work for work in works if work.rid not in self.refusals})
        self.admitted.set()
        await self.may_admit.wait()
        return over

    async def step(self) -> list[Finished]:
        self.steps += 1
        await asyncio.sleep(0)
        rids = list(self.live) if self.finishes_all else self.ready
        self.ready = []
        self.chunks, self.told = self.chunks + self.told, []
        return [(rid, DONE) for rid in rids if self.live.pop(rid, None) is not None]

    def take_chunks(self) -> list[StreamChunk]:
        chunks, self.chunks = self.chunks, []
        return chunks

    def cancel(self, rid: str) -> None:
        self.cancelled.append(rid)
        self.live.pop(rid, None)

    def tell(self, *chunks: StreamChunk) -> None:
        self.told += chunks
        self.wake()

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
    monkeypatch.setattr(courier, "_PAUSE_S", 0.01)


@asynccontextmanager
async def running(
    lanes: ScriptedLanes, backend: ScriptedBackend, *, timeout_s: float = 60, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[PoolExecutor]:
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=timeout_s, clock=clock)  # type: ignore[arg-type]
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
        assert {work.tenant for work in backend.live.values()} == {"local"}
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
    refusal = Outcome.failed(ValidationFailed("prompt: empty"), is_tainted=False)
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


@pytest.mark.proves("R3")
async def test_the_bound_of_a_sample_begins_after_its_admission(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    now = 0.0
    backend.finishes_all = False
    backend.may_admit.clear()
    lanes.queue.append(entry("a"))
    async with running(lanes, backend, timeout_s=10, clock=lambda: now) as executor:
        await backend.admitted.wait()
        now = 10 + TRANSFER_S - 1  # an adapter that takes as long as its declared bound allows
        executor.wake()
        await asyncio.sleep(0.02)
        assert lanes.settled == []
        backend.may_admit.set()
        await asyncio.sleep(0.02)
        now += 9
        executor.wake()
        await asyncio.sleep(0.02)
        assert lanes.settled == []
        now += 1
        executor.wake()
        outcomes = await lanes.until_settled(1)
    failure = outcomes["a"].failure
    assert failure is not None
    assert failure.reason is ReasonCode.EXECUTION_TIMEOUT


# --- abort


@pytest.mark.proves("R62")
async def test_an_aborted_sample_leaves_the_engine_and_is_settled_as_cancelled(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.append(entry("a"))
    async with running(lanes, backend) as executor:
        await backend.admitted.wait()
        executor.abort("a")
        executor.abort("a")
        outcomes = await lanes.until_settled(1)
        executor.abort("a")
    assert outcomes["a"].state is State.CANCELLED
    assert outcomes["a"].failure is not None
    assert outcomes["a"].failure.reason is Cancelled.reason
    assert backend.cancelled == ["a"]
    assert lanes.round_trips == 1


async def test_an_abort_frees_the_place_for_another_sample(lanes: ScriptedLanes) -> None:
    backend = ScriptedBackend(capacity=1)
    backend.finishes_all = False
    lanes.queue.extend([entry("a"), entry("b")])
    async with running(lanes, backend) as executor:
        await backend.admitted.wait()
        backend.admitted.clear()
        executor.abort("a")
        await backend.admitted.wait()
        assert list(backend.live) == ["b"]
        backend.finish("b")
        await lanes.until_settled(2)


async def test_an_abort_that_overtakes_its_sample_ends_it_before_it_runs(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    async with running(lanes, backend) as executor:
        executor.abort("a")
        lanes.queue.extend([entry("a"), entry("b")])
        executor.wake()
        outcomes = await lanes.until_settled(2)
    assert outcomes["a"].state is State.CANCELLED
    assert outcomes["b"] == DONE


async def test_aborts_of_ids_that_never_come_do_not_pile_up(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=9)  # type: ignore[arg-type]
    for number in range(3 * pool._ABORTS_KEPT):
        executor.abort(str(number))
    assert len(executor._aborted) == pool._ABORTS_KEPT


# --- tokens for those who watch


async def test_tokens_of_a_watched_sample_are_posted_to_its_watcher(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.queue.extend([entry("a", reply_to="inbox:g1"), entry("b"), entry("c", reply_to="inbox:g2")])
    async with running(lanes, backend):
        await backend.admitted.wait()
        assert {rid: work.is_watched for rid, work in backend.live.items()} == {"a": True, "b": False, "c": True}
        backend.tell(chunk("a", 0, 7), chunk("a", 0, 9, sequence=1), chunk("c", 0, 8), chunk("b", 0, 1), chunk("gone", 0, 1))
        await lanes.until_posted(2)
        backend.finish("a", "b", "c")
        await lanes.until_settled(3)
    assert lanes.posts == [("inbox:g1", [chunk("a", 0, 7), chunk("a", 0, 9, sequence=1)]), ("inbox:g2", [chunk("c", 0, 8)])]


async def test_a_slow_store_does_not_hold_up_the_steps_and_gets_fewer_larger_posts(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.may_post.clear()
    lanes.queue.append(entry("a", reply_to="inbox:g"))
    async with running(lanes, backend):
        await backend.admitted.wait()
        for number in range(5):
            backend.tell(chunk("a", number, 10 + number))
            await asyncio.sleep(0.005)
        assert backend.steps >= 5
        assert lanes.posts == []
        lanes.may_post.set()
        await lanes.until_posted(2)
        backend.finish("a")
        await lanes.until_settled(1)
    assert [posted for _, posted in lanes.posts] == [[chunk("a", 0, 10)], [chunk("a", 1, 11, 12, 13, 14)]]


async def test_tokens_wait_for_a_store_that_is_away(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.failures["post"] = [StateContention("away")] * 2
    lanes.queue.append(entry("a", reply_to="inbox:g"))
    async with running(lanes, backend):
        await backend.admitted.wait()
        backend.tell(chunk("a", 0, 7))
        await asyncio.sleep(0.005)
        backend.tell(chunk("a", 1, 8))
        await lanes.until_posted(1)
        backend.finish("a")
        await lanes.until_settled(1)
    assert lanes.posts == [("inbox:g", [chunk("a", 0, 7, 8)])]


async def test_tokens_of_a_sample_that_has_ended_are_forgotten(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.may_post.clear()
    lanes.queue.extend([entry("a", reply_to="inbox:g"), entry("b", reply_to="inbox:g")])
    async with running(lanes, backend):
        await backend.admitted.wait()
        backend.tell(chunk("a", 0, 7))
        await asyncio.sleep(0.005)
        backend.tell(chunk("a", 1, 8), chunk("b", 0, 9))
        await asyncio.sleep(0.005)
        backend.finish("a")
        await lanes.until_settled(1)
        lanes.may_post.set()
        await lanes.until_posted(2)
        backend.finish("b")
        await lanes.until_settled(2)
    assert [posted for _, posted in lanes.posts] == [[chunk("a", 0, 7)], [chunk("b", 0, 9)]]


async def test_a_sample_that_runs_again_begins_its_tokens_anew(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.may_post.clear()
    lanes.queue.extend([entry("a", reply_to="inbox:g"), entry("z", reply_to="inbox:h")])
    async with running(lanes, backend):
        await backend.admitted.wait()
        backend.tell(chunk("z", 0, 1))
        await asyncio.sleep(0.005)
        for told in (chunk("a", 0, 7), chunk("a", 1, 8), chunk("a", 0, 7)):
            backend.tell(told)
            await asyncio.sleep(0.005)
        lanes.may_post.set()
        await lanes.until_posted(2)
        backend.finish("a", "z")
        await lanes.until_settled(2)
    assert lanes.posts[1] == ("inbox:g", [chunk("a", 0, 7)])


async def test_a_defect_in_a_post_ends_the_executor(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.failures["post"] = [TypeError("a defect")]
    lanes.queue.append(entry("a", reply_to="inbox:g"))
    executor = PoolExecutor(lanes, "base", "replica", backend, decode, timeout_s=9)  # type: ignore[arg-type]
    task = asyncio.create_task(executor.run())
    await backend.admitted.wait()
    backend.tell(chunk("a", 0, 7))
    await asyncio.sleep(0.005)
    backend.tell(chunk("a", 1, 8))
    with pytest.raises(TypeError, match="a defect"):
        async with asyncio.timeout(5):
            await task


async def test_a_stop_ends_a_post_that_hangs(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    backend.finishes_all = False
    lanes.may_post.clear()
    lanes.queue.append(entry("a", reply_to="inbox:g"))
    async with running(lanes, backend):
        await backend.admitted.wait()
        backend.tell(chunk("a", 0, 7))
        await asyncio.sleep(0.005)
        backend.finish("a")
        await lanes.until_settled(1)
    assert len(asyncio.all_tasks()) == 1


async def test_samples_are_counted_by_outcome(lanes: ScriptedLanes, backend: ScriptedBackend) -> None:
    measured: list[telemetry.Measurement] = []
    lanes.queue.extend([entry("a"), entry("garbage")])
    with telemetry.recording(measured.append):
        async with running(lanes, backend):
            await lanes.until_settled(2)
    counted = [one.labels for one in measured if one.name == telemetry.EXECUTIONS]
    assert sorted((labels["kind"], labels["outcome"], labels["reason"]) for labels in counted) == [
        ("sample", "completed", ""),
        ("sample", "failed", "internal_error"),
    ]
    assert sum(one.name == telemetry.EXECUTION for one in measured) == 2
