"""What a settled command leaves in its tenant's books: amounts used and lines of the audit log, as writes of its own settle.

A settle takes effect once, so each command is entered once. A command that failed leaves nothing. Decides nothing.
"""

from dataclasses import replace

from tinsmith.protocol.futures import Outcome, Write
from tinsmith.protocol.sessions import CheckpointRecord
from tinsmith.protocol.training import Kind
from tinsmith.state.audit import AuditEntry, AuditEvent, audit_writes
from tinsmith.state.lanes import Entry, LaneInfo, PoolEntry
from tinsmith.state.usage import UsageKind, amounts_of, tallies

_COMPUTES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.EVALUATE, Kind.TRAIN_STEP})


def entered(info: LaneInfo, outcome: Outcome, entry: Entry | None = None) -> Outcome:
    """The outcome of a command of a model lane with what it leaves in the books. `entry`: where the command itself costs something; a
    save that a rebuild has made again costs nothing but its checkpoint."""
    if outcome.failure is not None:
        return outcome
    saved = _checkpoints_of(info.tenant, outcome)
    amounts = {
        UsageKind.TRAINING: entry.tokens if entry is not None and entry.kind in _COMPUTES else 0,
        UsageKind.CHECKPOINT: len(saved),
    }
    noted = [write for record in saved for write in audit_writes(_saving_of(record))]
    return replace(outcome, writes=(*outcome.writes, *tallies(info.tenant, info.session, info.base, amounts), *noted))


def entered_sample(base: str, entry: PoolEntry, outcome: Outcome) -> Outcome:
    """As `entered`, of a sample."""
    if outcome.sampled is None:
        return outcome
    return replace(outcome, writes=(*outcome.writes, *tallies(entry.tenant, entry.session, base, amounts_of(outcome.sampled))))


def _checkpoints_of(tenant: str, outcome: Outcome) -> list[CheckpointRecord]:
    table = f"{tenant}/checkpoints"  # of state/catalog.py
    return [
        CheckpointRecord.model_validate_json(write.value)
        for write in outcome.writes
        if isinstance(write, Write) and write.table == table and write.value is not None
    ]


def _saving_of(record: CheckpointRecord) -> AuditEntry:
    return AuditEntry(
        tenant=record.tenant,
        at_ms=record.created_ms,
        event=AuditEvent.CHECKPOINT_SAVE,
        subject=record.path,
        details={"session_id": record.session_id, "model_id": record.run_id, "base_model": record.base_model},
    )
