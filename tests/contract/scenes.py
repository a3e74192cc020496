"""Short names for what the contract tests say again and again: commands, samples, outcomes, owners."""

from tinsmith.protocol.errors import Category, InternalError, ReasonCode
from tinsmith.protocol.futures import Failure, Outcome, Write
from tinsmith.protocol.ids import WorkKind, request_id
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import (
    Acquired,
    Lanes,
    PoolEntry,
    PoolSubmission,
    Replica,
    Role,
    Settlement,
    Submission,
    Taken,
)

TENANT, BASE, LANE = "local", "llama", "model-1"
FB, OPTIM, FORWARD = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.FORWARD
SAVE = Kind.SAVE_WEIGHTS
NEVER_MS = 10**12  # a time that no test takes
ENDED = Failure(reason=ReasonCode.SESSION_ENDED, message="the session has ended", category=Category.USER)
REFUSED = Failure(reason=ReasonCode.VALIDATION_FAILED, message="datum 3: weights are too long", category=Category.USER)


def rid_of(seq: int | str, lane: str = LANE, tenant: str = TENANT) -> str:
    work = WorkKind.SAMPLING if isinstance(seq, str) else WorkKind.TRAINING
    return request_id(work, epoch="0123abcd", secret=b"secret", tenant=tenant, lane=lane, seq=seq)


def command(
    seq: int,
    kind: Kind = FB,
    *,
    lane: str = LANE,
    tenant: str = TENANT,
    base: str = BASE,
    body: bytes | None = None,
    digest: str | None = None,
    tokens: int = 10,
    writes: tuple[Write, ...] = (),
) -> Submission:
    kind = Kind.CREATE_MODEL if seq == 0 else kind
    return Submission(
        tenant=tenant,
        session=f"session of {tenant}",
        lane=lane,
        base=base,
        seq=seq,
        kind=kind,
        rid=rid_of(seq, lane, tenant),
        digest=f"digest-{seq}-{kind}" if digest is None else digest,
        body=f"{kind} {seq} of {lane}".encode() if body is None else body,
        tokens=tokens,
        writes=writes,
    )


def sample(
    key: str, *, tenant: str = TENANT, base: str = BASE, body: bytes = b"sample", tokens: int = 10, digest: str = "d"
) -> PoolSubmission:
    return PoolSubmission(
        tenant=tenant,
        session=f"session of {tenant}",
        base=base,
        key=key,
        rid=rid_of(key, f"pool:{base}", tenant),
        digest=digest,
        body=body,
        tokens=tokens,
    )


def replica(name: str, base: str = BASE, role: Role = Role.TRAINER) -> Replica:
    return Replica(id=name, base=base, node="node-1", pid=4711, started="1700000000.5", role=role)


def completed(result: bytes = b"result", artifact: str | None = None, writes: tuple[Write, ...] = ()) -> Outcome:
    return Outcome(result=result, artifact=artifact, writes=writes)


def failed(message: str = "boom") -> Outcome:
    return Outcome.failed(InternalError(message), is_tainted=True)


def done(*seqs: int) -> list[Settlement]:
    return [Settlement(seq, completed(b"result of %d" % seq)) for seq in seqs]


async def open_lane(lanes: Lanes, *commands: Submission, lane: str = LANE) -> None:
    """A lane with its creation and the commands submitted."""
    await lanes.submit(command(0, lane=lane))
    for submission in commands:
        await lanes.submit(submission)


async def own(lanes: Lanes, name: str, lane: str = LANE, *, base: str = BASE) -> Acquired:
    """Renew the replica and make it the owner, which must be possible."""
    await lanes.renew(replica(name, base))
    acquired = await lanes.acquire(lane, name)
    assert acquired is not None
    return acquired


async def take(
    lanes: Lanes, name: str, token: int, from_seq: int, *, lane: str = LANE, max_commands: int = 64, max_tokens: int = 100_000
) -> Taken:
    return await lanes.take(lane, name, token, from_seq, max_commands, max_tokens)


async def run_up_to(lanes: Lanes, name: str, token: int, seq: int, *, lane: str = LANE) -> None:
    """Take and complete every command from the lane's start up to and including `seq`."""
    cursor = 0
    while cursor <= seq:
        taken = await take(lanes, name, token, cursor, lane=lane, max_commands=seq + 1 - cursor)
        assert taken.cursor > cursor
        await lanes.settle(lane, name, token, done(*seqs(taken)))
        cursor = taken.cursor


def seqs(taken: Taken) -> list[int]:
    return [entry.seq for entry in taken.entries]


def rids(entries: list[PoolEntry]) -> list[str]:
    return [entry.rid for entry in entries]
