"""The invariants of the lane protocol, each by name, and all of them together in a random run with everything that can go wrong."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import combinations

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import (
    ENDED,
    FORWARD,
    LANE,
    NEVER_MS,
    OPTIM,
    REFUSED,
    SAVE,
    TENANT,
    command,
    completed,
    done,
    failed,
    open_lane,
    own,
    replica,
    rid_of,
    run_up_to,
    seqs,
    take,
)
from tests.contract.simulation import GRACE_MS, LEASE_MS, POISON, TOY, Simulation, applied, run_toy
from tests.fakes.lost_replies import LostReplies
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.futures import State as FutureState
from tinsmith.state.lanes import SETTLED, Acquired, Fenced, Lanes, LeaseExpired, Settlement, Wake

WORN_OUT = "the worker died three times while running this command"


async def record_of(lanes: Lanes, rid: str, tenant: str = TENANT) -> FutureRecord:
    record = await lanes.look(tenant, rid)
    assert record is not None
    return record


# One by one


@pytest.mark.proves("I1")
async def test_i1_of_all_tokens_a_lane_ever_had_only_the_last_can_settle(state: State) -> None:
    await open_lane(state.lanes, command(1))
    await run_up_to(state.lanes, "r0", (await own(state.lanes, "r0")).token, 0)
    tokens = {}
    for name in ("r0", "r1", "r2"):
        tokens[name] = (await own(state.lanes, name)).token
        await take(state.lanes, name, tokens[name], 1)
        await state.lanes.bury(name)
    assert len(set(tokens.values())) == 3
    for name in tokens:
        await state.lanes.renew(replica(name))  # all awake again
    for name in ("r0", "r1"):
        for token in tokens.values():
            with pytest.raises(Fenced):
                await state.lanes.settle(LANE, name, token, done(1))
    assert await state.lanes.settle(LANE, "r2", tokens["r2"], done(1)) == frozenset()


@pytest.mark.proves("I1")
async def test_i1_a_paused_replica_that_wakes_after_its_lease_cannot_write(make_state: MakeState) -> None:
    state = await make_state(lease_ms=250)
    await open_lane(state.lanes)
    paused = await own(state.lanes, "r1")
    await take(state.lanes, "r1", paused.token, 0)
    await state.pass_ms(300)
    with pytest.raises(LeaseExpired):
        await state.lanes.settle(LANE, "r1", paused.token, done(0))
    awake = await own(state.lanes, "r2")
    with pytest.raises(Fenced):
        await state.lanes.settle(LANE, "r1", paused.token, done(0))
    await state.lanes.renew(replica("r1"))
    with pytest.raises(Fenced):
        await state.lanes.settle(LANE, "r1", paused.token, done(0))
    await state.lanes.renew(replica("r2"))
    assert seqs(await take(state.lanes, "r2", awake.token, 0)) == [0]
    assert await state.lanes.settle(LANE, "r2", awake.token, done(0)) == frozenset()


@pytest.mark.proves("I2")
async def test_i2_every_accepted_entry_is_settled_exactly_once(state: State) -> None:
    cursors = await state.lanes.tail([SETTLED])
    await open_lane(state.lanes, command(1), command(2), command(3), command(4))
    await state.lanes.cancel(TENANT, rid_of(3))
    for name, last in (("r1", 1), ("r2", 2), ("r3", 4)):
        owner = await own(state.lanes, name)
        cursor = owner.cursor
        while cursor <= last:
            taken = await take(state.lanes, name, owner.token, cursor)
            for _ in range(2):
                await state.lanes.settle(LANE, name, owner.token, done(*seqs(taken)))
            cursor = taken.cursor
        await state.lanes.bury(name)
    await state.lanes.close(TENANT, LANE, ENDED)
    wake = await state.lanes.wait(cursors, 0)
    assert sorted(wake.events[SETTLED]) == sorted(rid_of(seq) for seq in range(5))


@pytest.mark.proves("I2")
async def test_i2_a_save_killed_while_it_is_published_holds_the_weights_of_its_own_seq(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2, SAVE), command(3), command(4, OPTIM))
    first = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", first.token, 1)
    await take(state.lanes, "r1", first.token, 2)  # captured, and then ...
    await take(state.lanes, "r1", first.token, 3)
    await state.lanes.settle(LANE, "r1", first.token, done(3, 4))  # ... later steps complete
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    adapter, captured = TOY, {}
    for entry in second.replay:
        if entry.kind.is_save:
            captured[entry.seq] = adapter
        else:
            (body,) = await state.lanes.bodies([(entry.rid, entry.digest)])
            assert body is not None
            adapter = applied(adapter, body)
    assert captured == {2: applied(applied(TOY, command(0).body), command(1).body)}
    settlement = Settlement(2, completed(artifact="save-2"))
    assert await state.lanes.settle(LANE, "r2", second.token, [settlement]) == frozenset()
    assert (await record_of(state.lanes, rid_of(2))).state is FutureState.COMPLETED


@pytest.mark.proves("I3")
async def test_i3_a_lost_reply_to_any_operation_changes_nothing_more(make_state: MakeState) -> None:
    """The same story, told with no reply lost and with every one."""
    histories, num_lost = [], []
    for chance in (0.0, 1.0):
        lanes = LostReplies((await make_state()).lanes, chance, random.Random(1))
        await lanes.submit(command(0))
        for seq in (1, 2, 4):
            await lanes.submit(command(seq))
        await lanes.void(command(3), REFUSED)
        await lanes.submit(command(5, OPTIM))
        await lanes.renew(replica("r1"))
        first = await lanes.acquire(LANE, "r1")
        taken = [seqs(await take(lanes, "r1", first.token, cursor, max_commands=2)) for cursor in (0, 1)]
        await lanes.settle(LANE, "r1", first.token, done(0, 1))
        former = [await lanes.commit_snapshot(LANE, "r1", first.token, seq, f"snapshot-{seq}") for seq in (0, 1)]
        await lanes.cancel(TENANT, rid_of(4))
        await lanes.release(LANE, "r1", first.token)
        await lanes.renew(replica("r2"))
        second = await lanes.acquire(LANE, "r2")
        taken.append(seqs(await take(lanes, "r2", second.token, second.cursor)))
        await lanes.settle(LANE, "r2", second.token, [Settlement(2, failed()), *done(5)])
        events = (await lanes.wait({SETTLED: 0, "bell:r1": 0, "bell:r2": 0, "work:llama": 0}, 0)).events
        states = [(await record_of(lanes, rid_of(seq))).state for seq in range(6)]
        histories.append((taken, former, second.token, second.cursor, states, events, await lanes.lane(LANE)))
        num_lost.append(lanes.num_lost)
    assert num_lost[0] == 0
    assert num_lost[1] > 20
    assert histories[0] == histories[1]


@pytest.mark.proves("I4")
async def test_i4_a_terminal_record_never_changes(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    await take(state.lanes, "r1", owner.token, 1, max_commands=2)
    await state.lanes.settle(LANE, "r1", owner.token, [*done(1), Settlement(2, failed())])
    await state.lanes.cancel(TENANT, rid_of(3))
    before = [await record_of(state.lanes, rid_of(seq)) for seq in range(4)]
    results = [await state.lanes.result(TENANT, rid_of(seq)) for seq in (2, 3)]
    await state.lanes.settle(LANE, "r1", owner.token, [Settlement(1, failed()), *done(2, 3)])
    for seq in range(4):
        await state.lanes.cancel(TENANT, rid_of(seq))
        await state.lanes.submit(command(seq))
        await state.lanes.void(command(seq), REFUSED)
    await state.lanes.bury("r1")
    await own(state.lanes, "r2")
    await state.lanes.sweep(stuck_ms=0, orphan_ms=NEVER_MS)
    await state.lanes.close(TENANT, LANE, ENDED)
    assert [await record_of(state.lanes, rid_of(seq)) for seq in range(4)] == before
    assert results == [None, None]
    for record in before:
        assert (record.failure is None) == (record.result_size is not None) == (record.state is FutureState.COMPLETED)


class Waiters:
    """The waiting side of a gateway: one reader, a local future for each waiter, registered before its record is read."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._waiting: dict[str, asyncio.Event] = {}
        self._read: asyncio.Task[Wake] | None = None
        self.num_broken = 0

    async def sleep_until_settled(self, rid: str) -> float:
        """Answers when it woke."""
        self._waiting[rid] = asyncio.Event()
        if not (await record_of(self._lanes, rid)).state.is_terminal:
            await self._waiting[rid].wait()
        return time.monotonic()

    def break_read(self) -> None:
        if self._read is not None:
            self._read.cancel()

    async def read_forever(self, cursors: dict[str, int]) -> None:
        while True:
            self._read = asyncio.create_task(self._lanes.wait(cursors, 5))
            await asyncio.wait([self._read])
            if self._read.cancelled() or isinstance(self._read.exception(), StateContention):
                self.num_broken += 1
                continue
            wake = self._read.result()
            assert not wake.resync
            for rid in wake.events.get(SETTLED, ()):
                self._waiting[rid].set()
            cursors = dict(wake.cursors)


async def insist(operation: Callable[[], Awaitable[object]]) -> None:
    """Every operation may be repeated, so a broken connection costs a repetition."""
    for _ in range(20):
        try:
            await operation()
        except StateContention:
            await asyncio.sleep(0.01)
        else:
            return
    raise AssertionError("the store did not come back")


@pytest.mark.proves("I5")
async def test_i5_no_wake_up_is_lost_when_the_readers_connections_are_killed(state: State, seed: int) -> None:
    source, num_commands = random.Random(seed), 60
    await open_lane(state.lanes, *(command(seq) for seq in range(1, num_commands)))
    _, reading = await state.connect()
    waiters = Waiters(reading)
    reader = asyncio.create_task(waiters.read_forever(await state.lanes.tail([SETTLED])))
    sleepers = [asyncio.create_task(waiters.sleep_until_settled(rid_of(seq))) for seq in range(num_commands)]
    await asyncio.sleep(0.05)
    settled: list[float] = []
    for seq in range(num_commands):
        roll = source.random()
        if roll < 0.2:
            await state.cut_connections()
        elif roll < 0.4:
            waiters.break_read()
        await insist(lambda seq=seq: state.lanes.cancel(TENANT, rid_of(seq)))
        settled.append(time.monotonic())
        await asyncio.sleep(source.choice([0, 0, 0.002, 0.01]))
    woken = await asyncio.wait_for(asyncio.gather(*sleepers), 10)
    assert not reader.done()
    reader.cancel()
    assert waiters.num_broken > 0
    assert max(after - at for after, at in zip(woken, settled, strict=True)) < 1.0


@pytest.mark.proves("I6", "R66")
async def test_i6_a_hole_delays_no_other_lane_and_its_own_at_most_for_the_grace(make_state: MakeState) -> None:
    state = await make_state(hole_grace_ms=300)
    for lane in ("holed", "whole"):
        await open_lane(state.lanes, command(2, lane=lane), lane=lane)
    await state.lanes.submit(command(1, lane="whole"))
    tokens = {lane: (await own(state.lanes, "r1", lane)).token for lane in ("holed", "whole")}
    for lane, token in tokens.items():
        await run_up_to(state.lanes, "r1", token, 0, lane=lane)
    assert seqs(await take(state.lanes, "r1", tokens["holed"], 1, lane="holed")) == []
    assert seqs(await take(state.lanes, "r1", tokens["whole"], 1, lane="whole")) == [1, 2]
    await state.pass_ms(320)
    assert seqs(await take(state.lanes, "r1", tokens["holed"], 1, lane="holed")) == [2]


@pytest.mark.proves("I7")
async def test_i7_held_bytes_are_the_bodies_of_the_lane_at_every_moment(state: State) -> None:
    commands = [command(0), command(1), command(2, FORWARD), command(3), command(4), command(5, SAVE), command(6)]
    checks = 0

    async def check() -> None:
        nonlocal checks
        lane = await state.lanes.lane(LANE)
        assert lane is not None
        bodies = await state.lanes.bodies([(submission.rid, submission.digest) for submission in commands])
        assert lane.held_bytes == sum(len(body) for body in bodies if body is not None)
        checks += lane.held_bytes > 0

    for submission in commands:
        await state.lanes.submit(submission)
        await check()
    await state.lanes.cancel(TENANT, rid_of(4))
    await check()
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 2)
    await check()
    taken = await take(state.lanes, "r1", owner.token, 3)
    await state.lanes.settle(LANE, "r1", owner.token, [Settlement(3, failed()), Settlement(5, completed(artifact="save-5"))])
    await check()
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1")
    await check()
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, taken.cursor - 1, "snapshot-5")
    await check()
    await state.lanes.close(TENANT, LANE, ENDED)
    await check()
    assert checks > 10


async def restored(lanes: Lanes, acquired: Acquired, snapshots: dict[str, bytes]) -> bytes:
    adapter = TOY if acquired.info.snapshot is None else snapshots[acquired.info.snapshot]
    for entry in acquired.replay:
        if entry.kind.is_replayed:
            (body,) = await lanes.bodies([(entry.rid, entry.digest)])
            assert body is not None
            adapter = applied(adapter, body)
    return adapter


@pytest.mark.proves("I8")
@pytest.mark.parametrize("cuts", [(), (0,), (3,), (5,), *combinations(range(6), 2)][:12])
async def test_i8_restoring_a_snapshot_and_replaying_equals_never_stopping(state: State, cuts: tuple[int, ...]) -> None:
    commands = [command(0), command(1), command(2, FORWARD), command(3), command(4, OPTIM), command(5)]
    snapshots: dict[str, bytes] = {}
    adapter = TOY
    for submission in commands:
        await state.lanes.submit(submission)
    owner = await own(state.lanes, "r1")
    for submission in commands:
        await take(state.lanes, "r1", owner.token, submission.seq, max_commands=1)
        adapter, result = run_toy(adapter, submission.kind, submission.body)
        await state.lanes.settle(LANE, "r1", owner.token, [Settlement(submission.seq, completed(result))])
        if submission.seq in cuts:
            artifact = f"snapshot-{submission.seq}"
            snapshots[artifact] = adapter
            snapshots.pop(await state.lanes.commit_snapshot(LANE, "r1", owner.token, submission.seq, artifact) or "", None)
    await state.lanes.bury("r1")
    assert await restored(state.lanes, await own(state.lanes, "r2"), snapshots) == adapter


@pytest.mark.proves("I9")
async def test_i9_nothing_above_the_floor_and_no_promised_save_is_trimmed(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2, SAVE), command(3), command(4, SAVE), command(5))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await take(state.lanes, "r1", owner.token, 2)
    await take(state.lanes, "r1", owner.token, 3)
    await state.lanes.settle(LANE, "r1", owner.token, [*done(3), Settlement(4, completed(artifact="save-4"))])
    for seq in (2, 3, 4):
        with pytest.raises(StateContention):
            await state.lanes.commit_snapshot(LANE, "r1", owner.token, seq, "over an unpublished save")
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 1, "snapshot-1")
    await state.lanes.bury("r1")
    second = await own(state.lanes, "r2")
    assert [(entry.seq, entry.state, entry.artifact) for entry in second.replay] == [
        (2, FutureState.RUNNING, None),
        (3, FutureState.COMPLETED, None),
        (4, FutureState.COMPLETED, "save-4"),
    ]
    assert None not in await state.lanes.bodies([(entry.rid, entry.digest) for entry in second.replay])


@pytest.mark.proves("I10")
async def test_i10_a_deadly_command_kills_three_times_and_alone_after_the_first(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2), command(3))
    await run_up_to(state.lanes, "r0", (await own(state.lanes, "r0")).token, 0)
    await state.lanes.bury("r0")
    batches: list[list[int]] = []
    name = ""
    for number in range(1, 20):
        name = f"r{number}"
        owner = await own(state.lanes, name)
        cursor = owner.cursor
        while entries := (taken := await take(state.lanes, name, owner.token, cursor)).entries:
            if 2 in seqs(taken):
                batches.append(seqs(taken))
                break
            cursor = taken.cursor
            await state.lanes.settle(LANE, name, owner.token, done(*seqs(taken)))
        if not entries:
            break
        await state.lanes.bury(name)
    assert batches == [[1, 2, 3], [2], [2]]
    assert [(await record_of(state.lanes, rid_of(seq))).state for seq in range(4)] == [
        FutureState.COMPLETED,
        FutureState.COMPLETED,
        FutureState.FAILED,
        FutureState.COMPLETED,
    ]


@pytest.mark.proves("I11", "R67")
async def test_i11_a_closed_lane_leaves_nothing_but_its_records(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=300)
    before = set(await state.keys())
    await open_lane(state.lanes, *(command(seq) for seq in range(1, 5)), command(9))
    await state.lanes.void(command(6), REFUSED)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 1)
    await state.lanes.commit_snapshot(LANE, "r1", owner.token, 0, "snapshot-0")
    await take(state.lanes, "r1", owner.token, 2, max_commands=1)
    await state.lanes.close(TENANT, LANE, ENDED)
    await state.lanes.bury("r1")
    submitted = [command(seq) for seq in (0, 1, 2, 3, 4, 6, 9)]
    assert await state.lanes.bodies([(submission.rid, submission.digest) for submission in submitted]) == [None] * 7
    assert [await state.lanes.result(TENANT, submission.rid) for submission in submitted] == [None] * 7
    names = [LANE, *(submission.rid for submission in submitted)]
    left = [key for key in set(await state.keys()) - before if any(name in key for name in names)]
    assert len(left) <= len(submitted) + 1  # a record each, and one mark that the lane is closed
    for submission in submitted:
        assert (await record_of(state.lanes, submission.rid)).state.is_terminal
    await state.pass_ms(350)
    await state.lanes.sweep(stuck_ms=10**9, orphan_ms=NEVER_MS)
    assert [key for key in await state.keys() if any(name in key for name in names)] == []
    assert await state.lanes.look(TENANT, rid_of(0)) is None


# All together


@pytest.mark.proves("I1", "I2", "I3", "I4", "I6", "I7", "I8", "I9", "I10")
async def test_a_random_run_with_pauses_lost_replies_and_kills_keeps_every_invariant(make_state: MakeState, seed: int) -> None:
    state = await make_state(lease_ms=LEASE_MS, hole_grace_ms=GRACE_MS)
    simulation = Simulation(state, seed, num_turns=14, num_samples=30) if state.is_slow else Simulation(state, seed)
    await simulation.run()
    print(f"seed {seed}: {dict(simulation.counts)}, {simulation.lanes.num_lost} replies lost")
    assert simulation.lanes.num_lost > 50
    assert min(simulation.counts[event] for event in ("died", "acquired", "closed")) > 0
    assert simulation.counts["paused"] + simulation.counts["lapsed"] > 0
    await check_records(simulation)
    await check_deaths(simulation)
    for lane in simulation.turns:
        await check_effects(simulation, lane)
        await check_bodies(simulation, lane)


async def check_records(simulation: Simulation) -> None:
    """Settled once each, for good, and with either a result or a failure."""
    assert simulation.settled.keys() == simulation.accepted.keys()
    assert set(simulation.settled.values()) == {1}
    for rid, tenant in simulation.accepted.items():
        record = await record_of(simulation.state.lanes, rid, tenant)
        assert record.state.is_terminal
        assert simulation.terminal.get(rid, record) == record
        assert (record.failure is None) == (record.result_size is not None) == (record.state is FutureState.COMPLETED)


async def check_deaths(simulation: Simulation) -> None:
    for rid, num_deaths in simulation.deaths.items():
        assert num_deaths <= 3
        record = await record_of(simulation.state.lanes, rid, simulation.accepted[rid])
        assert record.failure is not None
        assert record.failure.message in (WORN_OUT, ENDED.message) or record.state is FutureState.CANCELLED


async def check_effects(simulation: Simulation, lane: str) -> None:
    """A run of the completed commands, in order, gives every result that was answered, every save, and the adapter at the end."""
    lanes, store = simulation.state.lanes, simulation.state.store
    is_open = lane != simulation.doomed
    adapter = TOY
    for submission in sorted((held for held in simulation.submissions.values() if held.lane == lane), key=lambda held: held.seq):
        record = await lanes.look(TENANT, submission.rid)
        if record is None or record.state is not FutureState.COMPLETED:
            continue
        assert not submission.body.startswith(POISON)
        adapter, result = run_toy(adapter, submission.kind, submission.body)
        if submission.kind.is_save:
            result = applied(adapter, b"saved")
            saved = await store.get(f"{TENANT}/checkpoints", f"{lane}/{submission.seq}")
            assert saved is not None
            assert (saved.value, saved.version) == (adapter, 1)
        assert await lanes.result(TENANT, submission.rid) == (result if is_open else None)
    if is_open:
        for worker in simulation.workers:
            await lanes.bury(worker.name)
        assert await restored(lanes, await own(lanes, "the last", lane), simulation.artifacts) == adapter
        await lanes.bury("the last")


async def check_bodies(simulation: Simulation, lane: str) -> None:
    info = await simulation.state.lanes.lane(lane)
    assert info is not None
    commands = [(held.rid, held.digest) for held in simulation.submissions.values() if held.lane == lane]
    bodies = await simulation.state.lanes.bodies(commands)
    assert (info.num_pending, info.held_bytes) == (0, sum(len(body) for body in bodies if body is not None))
