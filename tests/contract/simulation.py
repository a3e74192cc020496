"""A random run of the whole lane protocol: callers, three replicas, a janitor, and everything that can go wrong.

One operation at a time is chosen at random from a seeded source; each is atomic, so their interleaving is all that matters. Worker fall
asleep for longer than their lease, die between any two of their steps, and lose replies; commands arrive out of order, twice, never, or
too late; some kill whoever runs them. The "adapter" is a hash chain over the bodies of the commands that it has applied, so a command
that is lost, doubled or out of order shows in every hash after it.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.contract.conftest import State
from tests.contract.scenes import BASE, ENDED, FB, FORWARD, NEVER_MS, OPTIM, REFUSED, SAVE, TENANT, command, replica, sample
from tests.fakes.lost_replies import LostReplies
from tinsmith.protocol.errors import RequestRejected, SessionEnded, ValidationFailed
from tinsmith.protocol.futures import FutureRecord, Outcome, Write
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import SETTLED, Entry, Fenced, LeaseExpired, PoolEntry, PoolSubmission, Settlement, Submission

LEASE_MS, GRACE_MS = 150, 300
MAX_STEPS = 60_000
POISON, FAULTY = b"poison", b"faulty"
TOY = b""  # an adapter before its creation


def applied(adapter: bytes, body: bytes) -> bytes:
    return hashlib.sha256(adapter + body).digest()


def run_toy(adapter: bytes, kind: Kind, body: bytes) -> tuple[bytes, bytes]:
    """(adapter afterwards, result)."""
    after = applied(adapter, body) if kind.is_replayed else adapter
    return after, applied(after, b"result of " + body)


class WorkerDied(Exception):
    """A poisonous command took its worker with it."""


@dataclass
class Holding:
    """What a replica has in memory for a lane that it owns."""

    token: int
    cursor: int
    adapter: bytes
    durable: int
    taken: tuple[Entry, ...] = ()
    outcomes: list[Settlement] = field(default_factory=list)
    saves: dict[int, bytes] = field(default_factory=dict)  # captured, not yet published


@dataclass
class Worker:
    """A replica process."""

    name: str
    asleep_until_ms: int = 0
    renewed_ms: int = -LEASE_MS
    held: dict[str, Holding] = field(default_factory=dict)
    samples: list[PoolEntry] = field(default_factory=list)
    free: list[str] = field(default_factory=list)


class Simulation:
    """`run` plays to the end; then the `check_*` functions of the test compare what is stored with what must be."""

    def __init__(self, state: State, seed: int, *, num_lanes: int = 4, num_turns: int = 60, num_samples: int = 150) -> None:
        self.source = random.Random(seed)
        self.state = state
        self.lanes = LostReplies(state.lanes, 0.15, self.source)
        self.submissions: dict[str, Submission] = {}  # by rid, all that callers will ever send
        self.turns = {f"lane-{index}": self._plan(f"lane-{index}", num_turns) for index in range(num_lanes)}
        self.doomed = f"lane-{num_lanes - 1}"  # its session ends half-way
        self.lost_chunks: list[Submission] = []
        self.samples = [self._sample(index) for index in range(num_samples)]
        self.accepted: dict[str, str] = {}  # rid -> tenant
        self.settled: Counter[str] = Counter()
        self.terminal: dict[str, FutureRecord] = {}  # as first seen
        self.deaths: Counter[str] = Counter()  # by poisonous rid
        self.artifacts: dict[str, bytes] = {}
        self.workers = [Worker(f"r{index}") for index in range(3)]
        self.num_started = 3
        self.cursors = {SETTLED: 0}
        self.calm = False  # no more faults: only finish
        self.counts: Counter[str] = Counter()  # what happened, so that a test can see that it did

    async def run(self) -> None:
        for step in range(MAX_STEPS):
            self.calm = self.calm or not (any(self.turns.values()) or self.samples)
            if self.calm and step % 20 == 0:
                await self._read_events()
                if self.settled.keys() >= self.accepted.keys():
                    return
            await self._step()
        raise AssertionError(f"unsettled after {MAX_STEPS} steps: {sorted(self.accepted.keys() - self.settled.keys())}")

    async def _step(self) -> None:
        roll = self.source.random()
        if roll < 0.25:
            await self._caller_step()
        elif roll < 0.28:
            await self._observe()
        elif roll < 0.36:
            await self.state.pass_ms(self.source.choice([1, 2, 5, 10]))
        else:
            await self._replica_step(self.source.choice(self.workers))

    # Callers

    def _plan(self, lane: str, num_turns: int) -> list[list[Submission]]:
        """Turns of commands: one barrier, or the chunks of a call in the order in which they will arrive."""
        turns = [[self._command(lane, 0, Kind.CREATE_MODEL)]]
        seq = 1
        for _ in range(num_turns):
            if self.source.random() < 0.5:
                turns.append([self._command(lane, seq, self.source.choice([OPTIM, OPTIM, SAVE]))])
            else:
                kind = self.source.choice([FB, FB, FORWARD])
                chunks = [self._command(lane, seq + index, kind) for index in range(self.source.randint(1, 4))]
                turns.append(chunks[1:] + chunks[:1] if self.source.random() < 0.7 else chunks)
            seq += len(turns[-1])
        return turns

    def _command(self, lane: str, seq: int, kind: Kind) -> Submission:
        roll = self.source.random()
        flavour = POISON if seq and roll < 0.03 else FAULTY if seq and roll < 0.1 else b"body"
        body = b"%s %d %s %s %d" % (flavour, seq, kind.encode(), lane.encode(), self.source.getrandbits(32))
        submission = command(seq, kind, lane=lane, body=body, tokens=self.source.randint(1, 30))
        self.submissions[submission.rid] = submission
        return submission

    def _sample(self, index: int) -> PoolSubmission:
        body = b"%s sample %d" % (POISON if index % 11 == 5 else b"body", index)
        return sample(f"s:{index}", tenant=self.source.choice([TENANT, "other"]), body=body, tokens=self.source.randint(1, 50))

    async def _caller_step(self) -> None:
        roll = self.source.random()
        open_lanes = [lane for lane, turns in self.turns.items() if turns]
        if self.calm:
            return
        if roll < 0.1 and self.accepted:
            await self._repeat(self.source.choice(sorted(self.accepted)))
        elif roll < 0.14 and self.accepted:
            rid = self.source.choice(sorted(self.accepted))
            await self.lanes.cancel(self.accepted[rid], rid)
        elif roll < 0.17 and self.lost_chunks:
            await self._submit(self.lost_chunks.pop())
            self.counts["late"] += 1
        elif roll < 0.35 and self.samples:
            await self._submit_sample(self.samples.pop())
        elif open_lanes:
            await self._send_next(self.source.choice(open_lanes))

    async def _send_next(self, lane: str) -> None:
        turn = self.turns[lane][0]
        submission = turn.pop(0)
        if not turn:
            self.turns[lane].pop(0)
        if lane == self.doomed and len(self.turns[lane]) == 4:
            self.turns[lane].clear()
            await self.lanes.close(TENANT, lane, ENDED)
            await self.lanes.close_session("other", "session of other", ENDED)
            self.counts["closed"] += 1
        elif submission.seq and not submission.kind.is_barrier and self.source.random() < 0.08:
            self.lost_chunks.append(submission)  # a hole
        elif submission.seq and self.source.random() < 0.03:
            self.accepted[submission.rid] = TENANT
            await self.lanes.void(submission, REFUSED)
            self.counts["refused"] += 1
        else:
            await self._submit(submission)

    async def _submit(self, submission: Submission) -> None:
        try:
            await self.lanes.submit(submission)
        except SessionEnded:
            assert submission.lane == self.doomed
            return
        self.accepted[submission.rid] = TENANT

    async def _submit_sample(self, submission: PoolSubmission) -> None:
        try:
            await self.lanes.pool_submit(submission)
        except SessionEnded:
            assert (submission.tenant, self.counts["closed"]) == ("other", 1)
            return
        self.accepted[submission.rid] = submission.tenant

    async def _repeat(self, rid: str) -> None:
        submission = self.submissions.get(rid)
        if submission is None or submission.lane == self.doomed:
            return
        if self.source.random() < 0.3:
            try:
                await self.lanes.submit(command(submission.seq, submission.kind, lane=submission.lane, digest="something else"))
            except RequestRejected:
                return
            raise AssertionError("other content under a used seq was taken")
        answer = await self.lanes.submit(submission)
        assert (answer.rid, answer.is_fresh) == (rid, False)

    async def _observe(self) -> None:
        """A caller looks at something: what is terminal never changes again."""
        if not self.accepted:
            return
        if self.source.random() < 0.1:
            await self._sweep()
        rid = self.source.choice(sorted(self.accepted))
        record = await self.lanes.look(self.accepted[rid], rid)
        assert record is not None
        if record.state.is_terminal:
            assert self.terminal.setdefault(rid, record) == record

    async def _sweep(self) -> None:
        """A janitor that finds nothing old, and one who watches: what is closed is no queue, and the work of the others is counted."""
        await self.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
        for queue in await self.lanes.queues(BASE):
            info = await self.lanes.lane(queue.lane)
            assert queue.num_pending > 0
            assert info is None or (info.is_open, info.num_pending) == (True, queue.num_pending)
        self.counts["swept"] += 1

    async def _read_events(self) -> None:
        wake = await self.lanes.wait(self.cursors, 0)
        assert not wake.resync
        self.settled.update(wake.events.get(SETTLED, ()))
        self.cursors = dict(wake.cursors)

    # Worker

    async def _replica_step(self, worker: Worker) -> None:
        now_ms = self.state.now_ms()
        if worker.asleep_until_ms > now_ms:
            await self.state.pass_ms(1)
            return
        roll = 1.0 if self.calm else self.source.random()
        if roll < 0.016:
            worker.asleep_until_ms = now_ms + self.source.randint(LEASE_MS // 3, 2 * LEASE_MS)
            self.counts["paused"] += 1
        elif roll < 0.026:
            await self._die(worker)
        else:
            try:
                await self._work(worker, now_ms)
            except LeaseExpired:
                self.counts["lapsed"] += 1
                await self._renew(worker, now_ms)
            except WorkerDied:
                await self._die(worker)

    async def _die(self, worker: Worker) -> None:
        """A new process takes the place of one that is gone with its memory; a peer may notice at once."""
        self.workers.remove(worker)
        self.workers.append(Worker(f"r{self.num_started}"))
        self.num_started += 1
        self.counts["died"] += 1
        if self.source.random() < 0.5:
            await self.lanes.bury(worker.name)

    async def _renew(self, worker: Worker, now_ms: int) -> None:
        worker.free = await self.lanes.renew(replica(worker.name))
        worker.renewed_ms = now_ms

    async def _work(self, worker: Worker, now_ms: int) -> None:
        is_due = worker.renewed_ms + LEASE_MS // 3 < now_ms
        if self.source.random() < (0.3 if is_due else 0.03):
            await self._renew(worker, now_ms)
        elif worker.free and self.source.random() < 0.3:
            await self._acquire(worker, worker.free.pop(0))
        elif self.source.random() < 0.25:
            await self._serve_samples(worker)
        elif worker.held:
            lane = self.source.choice(sorted(worker.held))
            try:
                await self._advance(worker, lane, worker.held[lane])
            except Fenced:
                del worker.held[lane]
                self.counts["fenced"] += 1

    async def _acquire(self, worker: Worker, lane: str) -> None:
        """Load the snapshot, replay, go on: the way back from every kind of loss."""
        acquired = None if lane in worker.held else await self.lanes.acquire(lane, worker.name)
        if acquired is None:
            return
        adapter = TOY if acquired.info.snapshot is None else self.artifacts[acquired.info.snapshot]
        holding = Holding(acquired.token, acquired.cursor, adapter, acquired.info.durable)
        bodies = await self.lanes.bodies([(entry.rid, entry.digest) for entry in acquired.replay])
        for entry, body in zip(acquired.replay, bodies, strict=True):
            if entry.kind.is_save and entry.state is FutureState.RUNNING:
                holding.saves[entry.seq] = holding.adapter
                self.counts["recaptured"] += 1
            elif entry.kind.is_save:
                assert entry.artifact is not None
                assert self.artifacts[entry.artifact] == holding.adapter
            elif entry.kind.is_replayed:
                assert body is not None, f"{lane}: the body of completed command {entry.seq} is gone"
                holding.adapter = applied(holding.adapter, body)
        worker.held[lane] = holding
        self.counts["acquired"] += 1

    async def _advance(self, worker: Worker, lane: str, holding: Holding) -> None:
        roll = self.source.random()
        if holding.outcomes:
            await self._settle(worker, lane, holding)
        elif holding.taken:
            await self._run(lane, holding)
        elif holding.saves and roll < 0.25:
            await self._publish(worker, lane, holding, self.source.choice(sorted(holding.saves)))
        elif roll < 0.1 and not holding.saves and holding.cursor - 1 > holding.durable:
            await self._snapshot(worker, lane, holding)
        elif roll < 0.13 and not self.calm:
            await self.lanes.release(lane, worker.name, holding.token)
            del worker.held[lane]
            self.counts["released"] += 1
        else:
            budget = (self.source.randint(1, 5), self.source.randint(1, 60))
            taken = await self.lanes.take(lane, worker.name, holding.token, holding.cursor, *budget)
            assert len(taken.entries) <= budget[0]
            assert len(taken.entries) == 1 or all(entry.attempts == 0 for entry in taken.entries)
            assert [entry.seq for entry in taken.entries] == sorted(entry.seq for entry in taken.entries)
            assert all(entry.seq >= holding.cursor for entry in taken.entries)
            holding.taken, holding.cursor = taken.entries, taken.cursor

    async def _run(self, lane: str, holding: Holding) -> None:
        entries, holding.taken = holding.taken, ()
        bodies = await self.lanes.bodies([(entry.rid, entry.digest) for entry in entries])
        if any(body is None for body in bodies):  # somebody else is at work here; the owner would hold every body
            info = await self.lanes.lane(lane)
            assert info is None or info.token != holding.token
            raise Fenced(lane)
        for entry, body in zip(entries, bodies, strict=True):
            assert body is not None
            holding.outcomes += self._outcome(holding, entry, body)

    def _outcome(self, holding: Holding, entry: Entry, body: bytes) -> list[Settlement]:
        if body.startswith(POISON):
            self.deaths[entry.rid] += 1
            raise WorkerDied
        if body.startswith(FAULTY):
            return [Settlement(entry.seq, Outcome.failed(ValidationFailed("weights: wrong length"), is_tainted=False))]
        if entry.kind.is_save:
            holding.saves[entry.seq] = holding.adapter
            return []
        holding.adapter, result = run_toy(holding.adapter, entry.kind, body)
        return [Settlement(entry.seq, Outcome(result=result))]

    async def _settle(self, worker: Worker, lane: str, holding: Holding) -> None:
        await self.lanes.settle(lane, worker.name, holding.token, holding.outcomes)
        holding.outcomes = []

    async def _publish(self, worker: Worker, lane: str, holding: Holding, seq: int) -> None:
        """A save becomes visible after later commands may have run; it holds the weights of its own place."""
        artifact = f"{lane}/{seq}/{holding.token}"
        self.artifacts[artifact] = holding.saves[seq]
        write = Write(f"{TENANT}/checkpoints", f"{lane}/{seq}", holding.saves[seq])
        outcome = Outcome(result=applied(holding.saves[seq], b"saved"), artifact=artifact, writes=(write,))
        await self.lanes.settle(lane, worker.name, holding.token, [Settlement(seq, outcome)])
        del holding.saves[seq]

    async def _snapshot(self, worker: Worker, lane: str, holding: Holding) -> None:
        seq = holding.cursor - 1
        artifact = f"{lane}/snapshot/{seq}/{holding.token}"
        self.artifacts[artifact] = holding.adapter
        former = await self.lanes.commit_snapshot(lane, worker.name, holding.token, seq, artifact)
        holding.durable = seq
        self.artifacts.pop(former or "", None)
        self.counts["snapshots"] += 1

    async def _serve_samples(self, worker: Worker) -> None:
        if not worker.samples:
            worker.samples = await self.lanes.pool_take(BASE, worker.name, self.source.randint(1, 4), 100)
            assert len(worker.samples) <= 1 or all(entry.attempts == 0 for entry in worker.samples)
            return
        taken, worker.samples = worker.samples, []
        bodies = await self.lanes.bodies([(entry.rid, entry.digest) for entry in taken])
        for entry, body in zip(taken, bodies, strict=True):
            if body is None:  # another replica has settled it
                continue
            if body.startswith(POISON):
                self.deaths[entry.rid] += 1
                raise WorkerDied
            await self.lanes.pool_settle(worker.name, [(entry, Outcome(result=applied(b"", body)))])
