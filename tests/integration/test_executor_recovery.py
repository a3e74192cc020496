"""Replicas die, hang and wake up again: the caller sees latency, and the weights are those of a run that nothing disturbed."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.lost_replies import LostReplies
from tests.fakes.training import (
    ALWAYS,
    LORA,
    NEVER,
    TENANT,
    TrainerReplica,
    World,
    lane_of,
    optim,
    resident,
    state_of,
    train,
    undisturbed,
    until,
)
from tinsmith.engines.fake_faults import Fault
from tinsmith.lifecycle.checkpoints import model_folder
from tinsmith.protocol.errors import ReasonCode
from tinsmith.protocol.futures import Outcome, State
from tinsmith.protocol.training import CreateModel, SaveWeights, TrainingCommand
from tinsmith.queue.executor import SnapshotPolicy
from tinsmith.state.lanes import Settlement

ANY_RESULT = Outcome(result=b"{}")

STEPS: list[TrainingCommand] = [
    CreateModel(lora=LORA),
    train(1, 2, 3),
    optim(),
    train(4, 5),
    train(6, 7, 8, 9),
    optim(),
    train(3, 1),
    optim(0.2),
]


class Stall:
    """Holds the engine's thread at one call, and lets it go on when told. `seq` picks a job of the first lane."""

    def __init__(self, operation: str, seq: int | None = None) -> None:
        self._operation = operation
        self._subject = lane_of() if seq is None else f"{lane_of()}/{seq}"
        self._reached = threading.Event()
        self._go_on = threading.Event()
        STALLS.append(self)

    def __call__(self, operation: str, subject: str) -> None:
        if (operation, subject) == (self._operation, self._subject) and not self._reached.is_set():
            self._reached.set()
            self._go_on.wait(20)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 5)

    def go_on(self) -> None:
        self._go_on.set()


STALLS: list[Stall] = []


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "checkpoints")
    yield world
    while STALLS:
        STALLS.pop().go_on()
    await world.close()


async def killed_at(world: World, stall: Stall, name: str = "a", *, snapshots: SnapshotPolicy = NEVER) -> TrainerReplica:
    """A replica that dies in the call at which it stalls."""
    victim = await world.start(world.build(name, before=stall, snapshots=snapshots))
    await stall.reached()
    victim.kill()
    await world.bury(victim)
    return victim


async def test_an_undisturbed_run_executes_each_command_once_in_order(world: World) -> None:
    replica = await world.start(world.build("a"))
    records = await world.all_settled(await world.submit_all(STEPS))
    assert {record.state for record in records} == {State.COMPLETED}
    assert [seq for _, seq in replica.engine.ran] == list(range(1, len(STEPS)))


@pytest.mark.proves("I2")
@pytest.mark.parametrize(
    ("operation", "seq"),
    [("create_adapter", None), ("forward_backward", 1), ("optim_step", 2), ("forward_backward", 4), ("optim_step", 7)],
)
async def test_a_replica_killed_in_a_command_is_followed_by_one_with_equal_weights(
    world: World, tmp_path: Path, operation: str, seq: int | None
) -> None:
    rids = await world.submit_all(STEPS)
    await killed_at(world, Stall(operation, seq))
    heir = await world.start(world.build("b"))
    records = await world.all_settled(rids)
    assert {record.state for record in records} == {State.COMPLETED}
    assert state_of(heir) == await undisturbed(tmp_path, STEPS)


@pytest.mark.proves("I8", "I9")
async def test_a_restore_from_a_snapshot_equals_never_stopping(world: World, tmp_path: Path) -> None:
    """The snapshot falls between forward_backward and optim_step, so it must hold the unspent gradient."""
    rids = await world.submit_all(STEPS)
    await killed_at(world, Stall("optim_step", 5), snapshots=ALWAYS)
    info = await world.lanes.lane(lane_of())
    assert info is not None
    assert info.durable == 4
    heir = await world.start(world.build("b"))
    await world.all_settled(rids)
    assert [seq for _, seq in heir.engine.ran] == [5, 6, 7]
    assert state_of(heir) == await undisturbed(tmp_path, STEPS)


@pytest.mark.proves("I7")
async def test_snapshots_trim_the_log_and_replace_each_other(world: World) -> None:
    replica = await world.start(world.build("a", snapshots=ALWAYS))
    await world.all_settled(await world.submit_all(STEPS))
    await until(lambda: not resident(replica).has_work)
    info = await world.lanes.lane(lane_of())
    assert info is not None
    # an optimizer step has a body too, so the last entry is always in the snapshot
    assert (info.durable, info.held_bytes) == (len(STEPS) - 1, 0)
    assert list(world.checkpoints.artifacts()) == [info.snapshot]


@pytest.mark.proves("I1", "I2")
async def test_a_paused_replica_that_wakes_after_its_lease_writes_nothing(world: World, tmp_path: Path) -> None:
    stall = Stall("forward_backward", 3)
    sleeper = await world.start(world.build("a", before=stall))
    rids = await world.submit_all(STEPS)
    await stall.reached()
    world.now_ms += world.lanes.limits.lease_ms + 1
    heir = await world.start(world.build("b"))
    records = await world.all_settled(rids)
    stall.go_on()
    await until(lambda: not sleeper.executor.lanes)
    await until(lambda: not sleeper.engine.residents)
    assert await world.all_settled(rids) == records
    assert heir.executor.lanes == (lane_of(),)
    assert state_of(heir) == await undisturbed(tmp_path, STEPS)


@pytest.mark.proves("P9")
async def test_a_publisher_paused_past_its_lease_never_becomes_visible(world: World) -> None:
    stall = Stall("capture")
    sleeper = await world.start(world.build("a", before=stall))
    steps: list[TrainingCommand] = [*STEPS[:3], SaveWeights(name="mine"), *STEPS[3:6]]
    rids = await world.submit_all(steps)
    await stall.reached()
    world.now_ms += world.lanes.limits.lease_ms + 1
    await world.start(world.build("b"))
    await world.all_settled(rids)
    stall.go_on()
    await until(lambda: not sleeper.executor.lanes)
    record = await world.catalog.checkpoint(TENANT, f"tinker://{lane_of()}/weights/mine")
    assert record.artifact.endswith("/3-2")
    leftovers = world.checkpoints.unnamed({record.artifact}, {model_folder(TENANT, lane_of())}, min_age_s=-1)
    assert [leftover.rpartition("/")[2] for leftover in leftovers] == ["3-1"]  # the sleeper's
    assert world.checkpoints.read(record.artifact)


@pytest.mark.proves("I2", "I9")
async def test_a_save_killed_while_published_holds_the_weights_of_its_own_seq(world: World, tmp_path: Path) -> None:
    """Its owner had gone on with later steps: they were settled, the save was not."""
    steps: list[TrainingCommand] = [*STEPS[:3], SaveWeights(name="mine"), *STEPS[3:6]]
    rids = await world.submit_all(steps)
    early = world.build("early")
    await world.lanes.renew(early.replica)
    acquired = await world.lanes.acquire(lane_of(), early.id)
    assert acquired is not None
    cursor = 0
    while cursor < len(steps):
        taken = await world.lanes.take(lane_of(), early.id, acquired.token, cursor, 1, 1)
        (entry,) = taken.entries
        cursor = taken.cursor
        if entry.seq != 3:
            await world.lanes.settle(lane_of(), early.id, acquired.token, [Settlement(entry.seq, ANY_RESULT)])
    await world.bury(early)
    heir = await world.start(world.build("heir"))
    record = await world.settled(rids[3])
    assert record.state is State.COMPLETED
    later = await world.submit_all(STEPS[6:], first=len(steps))
    await world.all_settled(later)
    checkpoint = await world.catalog.checkpoint(TENANT, f"tinker://{lane_of()}/weights/mine")
    reader = world.build("reader").engine
    reader.create_adapter("copy", LORA)
    reader.load("copy", world.checkpoints.read(checkpoint.artifact), optimizer=True)
    assert reader.weights("copy") == (await undisturbed(tmp_path, STEPS[:3]))[0]
    assert state_of(heir) == await undisturbed(tmp_path, STEPS)


@pytest.mark.proves("R7")
async def test_a_call_that_timed_out_leaves_nothing_of_its_late_effect(world: World, tmp_path: Path) -> None:
    replica = await world.start(world.build("a", bound_s=0.1))
    poisoned = [*STEPS[:4], train(31337, Fault.LATE, 300), *STEPS[4:]]
    began = asyncio.get_running_loop().time()
    rids = await world.submit_all(poisoned)
    failed = await world.settled(rids[4])
    assert asyncio.get_running_loop().time() - began < 0.35  # settled at its bound and not at its end
    assert failed.failure is not None
    assert failed.failure.reason is ReasonCode.EXECUTION_TIMEOUT
    records = await world.all_settled(rids)
    assert [record.seq for record in records if record.state is not State.COMPLETED] == [4]
    weights, _ = await undisturbed(tmp_path, STEPS)
    assert replica.engine.weights(lane_of()) == weights


@pytest.mark.proves("R10")
@pytest.mark.parametrize(
    ("fault", "reason", "num_rebuilds"),
    [
        (Fault.RAISE, ReasonCode.INTERNAL_ERROR, 1),
        (Fault.RAISE_HALFWAY, ReasonCode.INTERNAL_ERROR, 1),
        (Fault.REFUSE, ReasonCode.VALIDATION_FAILED, 0),
    ],
)
async def test_a_failed_command_has_no_effect(world: World, tmp_path: Path, fault: Fault, reason: ReasonCode, num_rebuilds: int) -> None:
    replica = await world.start(world.build("a"))
    rids = await world.submit_all([*STEPS[:4], train(31337, fault), *STEPS[4:]])
    records = await world.all_settled(rids)
    failure = records[4].failure
    assert failure is not None
    assert failure.reason is reason
    assert all(record.failure is None for record in records if record.seq != 4)
    weights, _ = await undisturbed(tmp_path, STEPS)
    assert replica.engine.weights(lane_of()) == weights
    assert replica.engine.calls["create_adapter"] == 1 + num_rebuilds


@pytest.mark.proves("R65", "I10")
async def test_a_command_that_kills_its_worker_does_so_three_times(world: World, tmp_path: Path) -> None:
    poisoned = await world.submit_all([*STEPS[:4], train(2, 2), *STEPS[4:]])
    others = await world.submit_all(STEPS, lane=lane_of(1))
    for name in ("a", "b", "c"):
        await killed_at(world, Stall("forward_backward", 4), name)
    heir = await world.start(world.build("d"))
    records = await world.all_settled([*poisoned, *others])
    (failed,) = [record for record in records if record.failure is not None]
    assert failed.rid == poisoned[4]
    assert failed.failure is not None
    assert failed.failure.reason is ReasonCode.INTERNAL_ERROR
    assert "three times" in failed.failure.message
    weights, _ = await undisturbed(tmp_path, STEPS)
    assert (heir.engine.weights(lane_of()), heir.engine.weights(lane_of(1))) == (weights, weights)


@pytest.mark.proves("R65")
async def test_a_command_whose_model_kills_the_workers_that_rebuild_it_is_given_up_after_three(world: World) -> None:
    """Nothing of the lane ran when they died, so only what they had taken before tells that they died of it."""
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all(STEPS[:2]))
    first.kill()
    await world.bury(first)
    (lost,) = await world.submit_all([train(6, 7)], first=2)
    for name in ("b", "c", "d"):
        await killed_at(world, Stall("create_adapter"), name)
    await world.start(world.build("e"))
    (record,) = await world.all_settled([lost])
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.INTERNAL_ERROR
    assert "three times" in record.failure.message


@pytest.mark.proves("I2", "I3")
@pytest.mark.parametrize("seed", range(4))
async def test_random_deaths_and_lost_replies_change_nothing(world: World, tmp_path: Path, seed: int) -> None:
    """Three replicas over a store that loses one reply in five; whoever owns the lane dies after a random number of settled commands."""
    chance = random.Random(seed)
    lanes = LostReplies(world.lanes, 0.2, chance)
    alive = [await world.start(world.build(f"r{index}", lanes=lanes, snapshots=chance.choice([NEVER, ALWAYS]))) for index in range(3)]
    steps = list(STEPS)
    rids = await world.submit_all(steps)
    while len(alive) > 1:
        more = [train(len(alive), 9), optim(), train(8, 8), optim(0.01)]
        rids += await world.submit_all(more, first=len(steps))
        steps += more
        await world.settled(rids[-chance.randrange(1, len(more))])
        info = await world.lanes.lane(lane_of())
        assert info is not None
        (victim,) = [replica for replica in alive if replica.id == info.owner]
        victim.kill()
        await world.bury(victim)
        alive.remove(victim)
        for replica in alive:
            replica.executor.resync()  # as their next renewal would
    rids += await world.submit_all([train(5), optim()], first=len(steps))
    steps += [train(5), optim()]
    records = await world.all_settled(rids)
    assert {record.state for record in records} == {State.COMPLETED}
    assert lanes.num_lost > 0
    assert state_of(alive[0]) == await undisturbed(tmp_path, steps)
