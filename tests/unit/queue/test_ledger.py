"""What a settled command leaves in its tenant's books."""

import pytest

from tinsmith.protocol.errors import InternalError
from tinsmith.protocol.futures import Outcome, SampledTokens, State, Tally, Write
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord
from tinsmith.protocol.training import Kind, LoraConfig
from tinsmith.queue.ledger import entered, entered_sample
from tinsmith.state.audit import AuditEntry, AuditEvent
from tinsmith.state.catalog import checkpoint_write
from tinsmith.state.lanes import Entry, LaneInfo, PoolEntry

INFO = LaneInfo(
    lane="s:train:0",
    tenant="t",
    session="s",
    base="org/tiny",
    is_open=True,
    owner="r",
    token=1,
    durable=-1,
    snapshot=None,
    num_pending=0,
    held_bytes=0,
    last_seq=1,
)
SAVED = checkpoint_write(
    CheckpointRecord(
        tenant="t",
        session_id="s",
        run_id="s:train:0",
        kind=CheckpointKind.TRAINING,
        name="n",
        artifact="a",
        base_model="org/tiny",
        lora=LoraConfig(rank=8, seed=0),
        created_ms=86_400_000,
        size_bytes=1,
    )
)


def entry(kind: Kind, tokens: int) -> Entry:
    return Entry(rid="r", seq=1, kind=kind, digest="d", size=1, tokens=tokens, state=State.RUNNING, attempts=0)


def added(outcome: Outcome) -> dict[str, int]:
    """Amounts by the kind of their sum."""
    tallies = [write for write in outcome.writes if isinstance(write, Tally)]
    assert all(tally.table == "t/used" and tally.id.endswith("/s/org/tiny") for tally in tallies)
    return {tally.id.partition("/")[0]: tally.amount for tally in tallies}


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.EVALUATE, Kind.TRAIN_STEP])
def test_a_pass_counts_its_tokens(kind: Kind) -> None:
    assert added(entered(INFO, Outcome(result=b"{}"), entry(kind, 7))) == {"training": 7}


@pytest.mark.parametrize("kind", [Kind.OPTIM_STEP, Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS])
def test_a_command_without_data_counts_nothing(kind: Kind) -> None:
    assert entered(INFO, Outcome(result=b"{}"), entry(kind, 1)) == Outcome(result=b"{}")


def test_a_failed_command_counts_nothing() -> None:
    failed = Outcome.failed(InternalError("m"), is_tainted=True)
    assert entered(INFO, failed, entry(Kind.FORWARD_BACKWARD, 7)) is failed


@pytest.mark.parametrize("replayed", [False, True])
def test_a_save_counts_its_checkpoint_and_is_noted(replayed: bool) -> None:
    outcome = Outcome(result=b"{}", writes=(SAVED,))
    written = entered(INFO, outcome, None if replayed else entry(Kind.SAVE_WEIGHTS, 1))
    assert added(written) == {"checkpoint": 1}
    assert written.writes[0] == SAVED
    line, day = [write for write in written.writes if isinstance(write, Write) and "/audit" in write.table]
    assert (line.table, day) == ("t/audit/1", Write("t/audit", "1", b""))
    assert line.value is not None
    noted = AuditEntry.model_validate_json(line.value)
    assert (noted.event, noted.subject) == (AuditEvent.CHECKPOINT_SAVE, "tinker://s:train:0/weights/n")
    assert noted.details == {"session_id": "s", "model_id": "s:train:0", "base_model": "org/tiny"}


def test_a_sample_counts_prompt_cache_and_draws_apart() -> None:
    sample = PoolEntry(rid="r", tenant="t", digest="d", size=1, tokens=99, token=1, attempts=0, session="s")
    outcome = Outcome(result=b"{}", sampled=SampledTokens(num_prompt=10, num_cached=4, num_drawn=3))
    assert added(entered_sample("org/tiny", sample, outcome)) == {"prefill": 6, "cached_prefill": 4, "sampling": 3}
    failed = Outcome.failed(InternalError("m"), is_tainted=False)
    assert entered_sample("org/tiny", sample, failed) is failed
