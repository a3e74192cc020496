"""An executor whose commands end while they wait, or were settled by another: the engine never sees them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.training import LORA, TENANT, World, lane_of, optim, state_of, train, undisturbed
from tinsmith.protocol.futures import State
from tinsmith.protocol.training import CreateModel, TrainingCommand
from tinsmith.state.lanes import LaneLimits

STEPS: list[TrainingCommand] = [CreateModel(lora=LORA), train(1, 2), optim(), train(3, 4), optim()]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "checkpoints", limits=LaneLimits(hole_grace_ms=40, lease_ms=200))
    yield world
    await world.close()


@pytest.mark.proves("R29")
async def test_a_command_that_was_cancelled_while_it_waited_never_reaches_the_engine(world: World, tmp_path: Path) -> None:
    reached, let_go = threading.Event(), threading.Event()

    def hold_creation(operation: str, _: str) -> None:
        if operation == "create_adapter":
            reached.set()
            let_go.wait(20)

    replica = await world.start(world.build("a", before=hold_creation))
    rids = await world.submit_all(STEPS)
    await asyncio.to_thread(reached.wait, 5)
    for seq in (3, 4):
        assert await world.lanes.cancel(TENANT, rids[seq]) is State.CANCELLED
    let_go.set()
    records = await world.all_settled(rids)
    assert [record.state for record in records] == [State.COMPLETED] * 3 + [State.CANCELLED] * 2
    assert [seq for _, seq in replica.engine.ran] == [1, 2]
    assert state_of(replica) == await undisturbed(tmp_path, STEPS[:3])


@pytest.mark.proves("R29")
async def test_what_a_former_owner_settled_is_not_run_for_its_result_again(world: World) -> None:
    first = await world.start(world.build("a"))
    await world.all_settled(await world.submit_all([*STEPS, train(5, 6, backward=False)]))
    first.kill()
    await world.bury(first)
    second = await world.start(world.build("b"))
    (rid,) = await world.submit_all([optim()], first=len(STEPS) + 1)
    assert (await world.settled(rid)).state is State.COMPLETED
    forward = len(STEPS)
    assert (lane_of(), forward) in first.engine.ran
    assert (lane_of(), forward) not in second.engine.ran  # a forward pass leaves nothing to rebuild
