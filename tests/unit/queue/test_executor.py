"""The executor over memory lanes and the fake engine: whose turn it is, who owns what, and what it does when something else fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.cut_off import CutOff
from tests.fakes.training import ALWAYS, LORA, TENANT, World, lane_of, model_input, optim, resident, state_of, train, undisturbed, until
from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault
from tinsmith.protocol.errors import Category, InternalError, ReasonCode
from tinsmith.protocol.futures import Failure, State
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.training import CreateModel, Kind, TrainingCommand
from tinsmith.protocol.wire import encode_command
from tinsmith.queue.executor import LOOP_DECODES_BYTES, SnapshotPolicy
from tinsmith.state.futures import pool_lane
from tinsmith.state.lanes import LaneLimits, PoolSubmission, Replica

STEPS: list[TrainingCommand] = [CreateModel(lora=LORA), train(1, 2), optim(), train(3, 4), optim()]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "checkpoints", limits=LaneLimits(hole_grace_ms=40, lease_ms=200))
    yield world
    await world.close()


class Stop:
    """Holds the engine at every call of an operation until it is let go."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, operation: str, subject: str) -> None:
        if operation == self._operation:
            self.reached.set()
            self.let_go.wait(20)


class Broken:
    """Raises in the named operations."""

    def __init__(self, *operations: str) -> None:
        self.operations = set(operations)

    def __call__(self, operation: str, subject: str) -> None:
        if operation in self.operations:
            raise RuntimeError(f"broken {operation}")


# --- turns


async def test_lanes_take_turns_by_tokens(world: World) -> None:
    """A lane of 3,000-token batches gets as many tokens a round as one of 1,000-token batches: a third of the batches."""
    heavy, light = lane_of(0), lane_of(1)
    await world.submit_all([CreateModel(lora=LORA), *[train(*range(3000))] * 6], lane=heavy)
    rids = await world.submit_all([CreateModel(lora=LORA), *[train(*range(1000))] * 6], lane=light)
    replica = await world.start(world.build("a"))
    await world.all_settled(rids)
    done_for_heavy = sum(lane == heavy for lane, _ in replica.engine.ran)
    assert 1 <= done_for_heavy <= 3


async def test_a_long_lane_does_not_hold_up_a_new_one(world: World) -> None:
    stop = Stop("create_adapter")
    await world.submit_all([CreateModel(lora=LORA), *[optim()] * 60])
    replica = await world.start(world.build("a", before=stop))
    await asyncio.to_thread(stop.reached.wait, 5)
    rids = await world.submit_all(STEPS, lane=lane_of(1))
    stop.let_go.set()
    await world.all_settled(rids)
    assert sum(lane == lane_of(0) for lane, _ in replica.engine.ran) < 30


@pytest.mark.proves("I12")
async def test_an_idle_executor_asks_the_store_nothing(world: World) -> None:
    lanes = CutOff(world.lanes)
    replica = await world.start(world.build("a", lanes=lanes))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: not resident(replica).has_work)
    before = lanes.calls.total()
    await asyncio.sleep(0.1)
    assert lanes.calls.total() == before


async def test_a_bell_that_rings_while_the_lane_is_asked_is_not_lost(world: World) -> None:
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    for seq in range(len(STEPS), len(STEPS) + 20):
        assert (await world.settled(await world.submit(seq, optim()))).state is State.COMPLETED
    replica.executor.ring("not mine")


@pytest.mark.proves("I6", "R66")
async def test_a_hole_is_waited_for_and_then_given_up_without_delaying_another_lane(world: World) -> None:
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    late = await world.submit(len(STEPS) + 1, train(1))
    await world.all_settled(await world.submit_all(STEPS, lane=lane_of(1)))
    await until(lambda: resident(replica).hole is not None)
    assert not resident(replica).is_idle
    world.now_ms += 40
    assert (await world.settled(late)).state is State.COMPLETED


async def test_a_hole_that_is_filled_runs_in_order(world: World) -> None:
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    first = len(STEPS)
    rids = [await world.submit(first + offset, train(offset + 1)) for offset in (1, 2, 0)]
    await world.all_settled(rids)
    assert [seq for _, seq in replica.engine.ran][-3:] == [first, first + 1, first + 2]


async def test_a_long_command_runs_like_a_short_one(world: World) -> None:
    await world.start(world.build("a"))
    large = replace(train(*range(1000)), data=train(*range(1000)).data * 120)
    assert len(encode_command(large)) > LOOP_DECODES_BYTES
    records = await world.all_settled(await world.submit_all([CreateModel(lora=LORA), large, optim()]))
    assert {record.state for record in records} == {State.COMPLETED}


# --- lanes come and go


async def test_an_idle_lane_makes_room_and_comes_back_as_it_was(world: World, tmp_path: Path) -> None:
    replica = await world.start(world.build("a", capacity=1))
    await world.all_settled(await world.submit_all(STEPS[:2]))
    await world.all_settled(await world.submit_all(STEPS, lane=lane_of(1)))
    assert replica.executor.lanes == (lane_of(1),)
    info = await world.lanes.lane(lane_of())
    assert info is not None
    assert (info.owner, info.durable) == (None, 1)
    await world.all_settled(await world.submit_all(STEPS[2:], first=2))
    assert state_of(replica) == await undisturbed(tmp_path, STEPS)
    assert replica.engine.residents == {lane_of()}


async def test_a_busy_replica_leaves_a_lane_to_others(world: World) -> None:
    stop = Stop("optim_step")
    first = await world.start(world.build("a", capacity=1, before=stop))
    await world.submit_all(STEPS)
    await asyncio.to_thread(stop.reached.wait, 5)
    rids = await world.submit_all(STEPS, lane=lane_of(1))
    second = await world.start(world.build("b", capacity=1))
    await world.all_settled(rids)
    assert second.executor.lanes == (lane_of(1),)
    stop.let_go.set()
    await until(lambda: not first.executor._candidates)
    assert first.executor.lanes == (lane_of(),)


async def test_a_dead_owners_lane_is_worth_an_eviction_and_a_living_ones_is_not(world: World) -> None:
    replica = await world.start(world.build("a", capacity=1))
    await world.all_settled(await world.submit_all(STEPS))
    owner = Replica("other", "tiny", "there", 2, "")
    await world.lanes.renew(owner)
    rids = await world.submit_all(STEPS, lane=lane_of(1))
    if (info := await world.lanes.lane(lane_of(1))) is not None and info.owner is None:
        await world.lanes.acquire(lane_of(1), owner.id)
    replica.executor.offer([lane_of(1)])
    await until(lambda: not replica.executor._candidates)
    assert replica.executor.lanes == (lane_of(),)
    await world.lanes.bury(owner.id)
    replica.executor.offer([lane_of(1)])
    await world.all_settled(rids)
    assert replica.executor.lanes == (lane_of(1),)


async def test_the_lane_that_was_used_last_is_not_the_one_that_makes_room(world: World) -> None:
    replica = await world.start(world.build("a", capacity=2))
    for lane in (lane_of(0), lane_of(1)):
        await world.all_settled(await world.submit_all(STEPS, lane=lane))
    await world.settled(await world.submit(len(STEPS), optim(), lane=lane_of(0)))
    await until(lambda: resident(replica, lane_of(0)).is_idle and resident(replica, lane_of(1)).is_idle)
    await world.all_settled(await world.submit_all(STEPS, lane=lane_of(2)))
    assert set(replica.executor.lanes) == {lane_of(0), lane_of(2)}


@pytest.mark.proves("I11")
async def test_a_closed_lane_is_dropped(world: World) -> None:
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    reason = Failure(reason=ReasonCode.SESSION_ENDED, message="ended", category=Category.USER)
    await world.lanes.close(TENANT, lane_of(), reason)
    await until(lambda: not replica.executor.lanes)
    assert replica.engine.residents == frozenset()
    assert len(replica.slots) == 0


async def test_a_drain_leaves_nothing_to_run_again(world: World, tmp_path: Path) -> None:
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS[:4]))
    await first.stop()
    info = await world.lanes.lane(lane_of())
    assert info is not None
    assert (info.owner, info.durable) == (None, 3)
    second = await world.start(world.build("b"))
    await world.all_settled(await world.submit_all(STEPS[4:], first=4))
    assert [seq for _, seq in second.engine.ran] == [4]
    assert state_of(second) == await undisturbed(tmp_path, STEPS)


async def test_a_drain_of_a_lane_that_was_taken_over_is_quiet(world: World) -> None:
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS[:4]))
    await world.bury(first)
    heir = Replica("b", "tiny", "here", 2, "")
    await world.lanes.renew(heir)
    assert await world.lanes.acquire(lane_of(), heir.id) is not None
    await first.stop()
    assert first.executor.lanes == ()


async def test_pool_lanes_are_no_candidates(world: World) -> None:
    lanes = CutOff(world.lanes)
    replica = await world.start(world.build("a", lanes=lanes))
    await until(lambda: lanes.calls["renew"] == 1)
    replica.executor.offer([pool_lane("tiny", TENANT)])
    await world.lanes.pool_submit(PoolSubmission(TENANT, "s", "tiny", "k", "s" * 41, "d", b"", 1))
    await world.all_settled(await world.submit_all(STEPS))
    assert lanes.calls["lane"] == lanes.calls["acquire"] == 1


async def test_lost_hints_are_made_up_for_by_a_look(world: World) -> None:
    replica = world.build("a")
    await world.lanes.renew(replica.replica)
    replica.tasks.append(asyncio.create_task(replica.executor.run()))  # it hears nothing
    rids = await world.submit_all(STEPS)
    replica.executor.resync()
    await world.all_settled(rids)
    rid = await world.submit(len(STEPS), optim())
    replica.executor.resync()
    await world.settled(rid)


# --- what may fail


async def test_a_store_that_is_away_costs_time_and_no_outcome(world: World, tmp_path: Path) -> None:
    lanes = CutOff(world.lanes)
    stop = Stop("forward_backward")
    replica = await world.start(world.build("a", lanes=lanes, before=stop))
    rids = await world.submit_all(STEPS)
    await asyncio.to_thread(stop.reached.wait, 5)
    lanes.is_away = True
    stop.let_go.set()
    await until(lambda: lanes.refused["settle"] > 0)
    lanes.is_away = False
    await world.all_settled(rids)
    assert [seq for _, seq in replica.engine.ran] == [1, 2, 3, 4]
    assert state_of(replica) == await undisturbed(tmp_path, STEPS)


async def test_after_an_outage_lanes_of_others_are_spared_for_one_lease(tmp_path: Path) -> None:
    world = World(tmp_path, limits=LaneLimits(lease_ms=1000))
    lanes = CutOff(world.lanes)
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    first.kill()
    await world.bury(first)
    lanes.is_away = True
    second = await world.start(world.build("b", lanes=lanes))
    await until(lambda: lanes.refused["renew"] > 0)
    rid = await world.submit(len(STEPS), optim())
    fresh = await world.submit_all(STEPS, lane=lane_of(1))
    lanes.is_away = False
    await world.all_settled(fresh)  # a lane that nobody ever owned is nobody's
    assert second.executor.lanes == (lane_of(1),)
    await world.settled(rid)
    assert second.executor.lanes == (lane_of(1), lane_of())
    await world.close()


async def test_an_outage_that_only_the_heartbeat_met_spares_the_lanes_of_others(tmp_path: Path) -> None:
    world = World(tmp_path, limits=LaneLimits(lease_ms=500))
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    first.kill()
    await world.bury(first)
    second = await world.start(world.build("b"))
    second.executor.spare()
    began = asyncio.get_running_loop().time()
    await world.settled(await world.submit(len(STEPS), optim()))
    assert asyncio.get_running_loop().time() - began >= 0.5
    await world.close()


async def test_a_lapsed_lease_is_renewed_and_the_lane_goes_on(world: World) -> None:
    stop = Stop("forward_backward")
    replica = await world.start(world.build("a", before=stop))
    rids = await world.submit_all(STEPS)
    await asyncio.to_thread(stop.reached.wait, 5)
    world.now_ms += 1000
    stop.let_go.set()
    records = await world.all_settled(rids)
    assert {record.state for record in records} == {State.COMPLETED}
    assert [seq for _, seq in replica.engine.ran] == [1, 2, 3, 4]


@pytest.mark.proves("I5")
async def test_work_that_came_while_the_lease_had_lapsed_is_run(world: World) -> None:
    """The store offers it to everybody then, and rings no bell; a lane that is offered may be one's own."""
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: resident(replica).is_idle)
    await world.bury(replica)
    record = await world.settled(await world.submit(len(STEPS), optim()))
    assert record.state is State.COMPLETED
    assert replica.engine.ran[-1] == (lane_of(), len(STEPS))


async def test_a_lane_that_was_lost_unnoticed_can_be_had_again(world: World, tmp_path: Path) -> None:
    """Taken over while this replica slept, by one that has died since."""
    replica = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS[:4]))
    await until(lambda: resident(replica).is_idle)
    await world.bury(replica)
    heir = Replica("b", "tiny", "there", 2, "")
    await world.lanes.renew(heir)
    assert await world.lanes.acquire(lane_of(), heir.id) is not None
    await world.lanes.bury(heir.id)
    rids = await world.submit_all(STEPS[4:], first=4)
    await until(lambda: not replica.executor.lanes)
    replica.executor.offer(await world.lanes.renew(replica.replica))  # the next beat
    await world.all_settled(rids)
    assert state_of(replica) == await undisturbed(tmp_path, STEPS)


async def test_a_stop_without_the_store_ends(world: World) -> None:
    lanes = CutOff(world.lanes)
    replica = await world.start(world.build("a", lanes=lanes))
    await world.all_settled(await world.submit_all(STEPS))
    replica.executor._drain_s = 0.1
    lanes.is_away = True
    await replica.stop()
    assert replica.executor.lanes == (lane_of(),)


async def test_a_stop_does_not_wait_for_a_call_that_hangs(world: World) -> None:
    stop = Stop("forward_backward")
    replica = await world.start(world.build("a", bound_s=0.05, before=stop))
    replica.executor._drain_s = 0.1
    rids = await world.submit_all(STEPS)
    failed = await world.settled(rids[1])
    assert failed.failure is not None
    assert failed.failure.reason is ReasonCode.EXECUTION_TIMEOUT
    await replica.stop()
    assert replica.executor.lanes == (lane_of(),)
    stop.let_go.set()


async def test_a_lane_whose_creation_failed_is_handed_back_without_a_snapshot(world: World) -> None:
    replica = await world.start(world.build("a", before=Broken("create_adapter")))
    records = await world.all_settled(await world.submit_all(STEPS[:2]))
    assert [record.failure is not None for record in records] == [True, True]
    await replica.stop()
    assert replica.engine.calls["capture"] == 0


@pytest.mark.proves("I7")
async def test_engine_time_alone_makes_a_snapshot_due(world: World) -> None:
    replica = await world.start(world.build("a", snapshots=SnapshotPolicy(max_bytes=1 << 30, max_engine_s=0)))
    await world.all_settled(await world.submit_all(STEPS[:2]))
    await until(lambda: resident(replica).info.durable == 1)


async def test_a_snapshot_that_cannot_be_committed_is_tried_again_later(world: World) -> None:
    lanes = CutOff(world.lanes)
    lanes.away_for = {"commit_snapshot"}
    replica = await world.start(world.build("a", lanes=lanes, snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: lanes.refused["commit_snapshot"] == len(STEPS))
    lanes.away_for = set()
    await world.settled(await world.submit(len(STEPS), optim()))
    await until(lambda: resident(replica).info.durable == len(STEPS))


async def test_a_snapshot_that_cannot_be_made_stops_nothing(world: World) -> None:
    replica = await world.start(world.build("a", snapshots=SnapshotPolicy(max_bytes=1 << 30, max_engine_s=0), before=Broken("capture")))
    records = await world.all_settled(await world.submit_all(STEPS))
    assert {record.state for record in records} == {State.COMPLETED}
    assert resident(replica).info.durable == -1


async def test_a_former_snapshot_that_cannot_be_deleted_stops_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(artifact: str) -> bool:
        raise OSError("read-only")

    monkeypatch.setattr(world.checkpoints, "delete", fail)
    replica = await world.start(world.build("a", snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: resident(replica).info.durable == len(STEPS) - 1)


async def test_memory_that_cannot_be_dropped_does_not_keep_the_lane(world: World) -> None:
    broken = Broken()
    replica = await world.start(world.build("a", before=broken))
    await world.all_settled(await world.submit_all(STEPS))
    broken.operations.add("drop_adapter")
    await replica.stop()
    assert replica.executor.lanes == ()


@pytest.mark.proves("R8")
async def test_an_engine_that_keeps_what_it_was_to_drop_costs_its_replica(world: World) -> None:
    """Its slot would be counted as free, and no adapter would fit there."""
    broken = Broken()
    replica = await world.start(world.build("a", before=broken))
    await world.all_settled(await world.submit_all(STEPS))
    broken.operations.add("drop_adapter")
    reason = Failure(reason=ReasonCode.SESSION_ENDED, message="ended", category=Category.USER)
    await world.lanes.close(TENANT, lane_of(), reason)
    with pytest.raises(InternalError, match="did not drop an adapter"):
        await asyncio.wait_for(replica.tasks[0], 5)


async def test_a_command_that_comes_while_a_rebuild_fails_is_told_of_it(world: World) -> None:
    class Breaks(Stop):
        def __call__(self, operation: str, subject: str) -> None:
            super().__call__(operation, subject)
            if operation == "restore":
                raise RuntimeError("broken restore")

    breaks = Breaks("restore")
    replica = await world.start(world.build("a", snapshots=ALWAYS, before=breaks))
    await world.all_settled(await world.submit_all(STEPS))
    await world.settled(await world.submit(len(STEPS), train(FAULT_TOKEN, int(Fault.RAISE_HALFWAY))))
    assert await asyncio.to_thread(breaks.reached.wait, 5)
    rid = await world.submit(len(STEPS) + 1, train(1))
    breaks.let_go.set()
    record = await world.settled(rid)
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.INTERNAL_ERROR
    assert replica.engine.calls["restore"] == 1


async def test_a_model_that_cannot_be_rebuilt_fails_its_commands_one_by_one_and_recovers(world: World, tmp_path: Path) -> None:
    first = await world.start(world.build("a", snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await first.stop()
    broken = Broken("restore")
    second = await world.start(world.build("b", before=broken))
    failed = await world.settled(await world.submit(len(STEPS), optim()))
    assert failed.failure is not None
    assert failed.failure.category is Category.SERVER
    broken.operations.clear()
    await world.all_settled(await world.submit_all([train(1), optim()], first=len(STEPS) + 1))
    assert second.engine.weights(lane_of()) == (await undisturbed(tmp_path, [*STEPS, train(1), optim()]))[0]


async def test_a_damaged_snapshot_is_the_servers_fault(world: World) -> None:
    first = await world.start(world.build("a", snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await first.stop()
    (artifact,) = world.checkpoints.artifacts()
    (world.root / artifact / "progress.json").write_bytes(b"{}")
    await world.start(world.build("b"))
    failed = await world.settled(await world.submit(len(STEPS), optim()))
    assert failed.failure is not None
    assert failed.failure.reason is ReasonCode.INTERNAL_ERROR
    assert "rebuilt" in failed.failure.message


@pytest.mark.parametrize("way", ["missing", "sample", "undecodable"])
async def test_a_command_that_cannot_be_read_fails_without_a_rebuild(world: World, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    replica = world.build("a")
    await world.start(replica)
    await world.all_settled(await world.submit_all(STEPS))
    if way == "missing":
        monkeypatch.setattr(world.lanes, "bodies", _no_bodies)
    else:
        monkeypatch.setattr(replica.executor, "_decode", _to_sample if way == "sample" else _to_nothing)
    failed = await world.settled(await world.submit(len(STEPS), optim()))
    assert failed.failure is not None
    assert failed.failure.category is Category.SERVER
    assert replica.engine.calls["create_adapter"] == 1
    assert resident(replica).is_built


async def _no_bodies(commands: Sequence[tuple[str, str]]) -> list[bytes | None]:
    return [None for _ in commands]


def _to_sample(kind: Kind, body: bytes) -> Sample:
    return Sample(model_input(1), SamplingParams(seed=1), 1, None)


def _to_nothing(kind: Kind, body: bytes) -> Sample:
    raise ValueError("truncated")
