"""How runs and checkpoints look on the Tinker wire, and the pages in which they are listed.

What a caller may see is decided before: this module renders what it is given.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from starlette.datastructures import QueryParams

from tinsmith.gateway.deps import Services
from tinsmith.gateway.storage import size_of
from tinsmith.gateway.tinker.queries import MAX_PAGE, number, text_of
from tinsmith.gateway.tinker.session_admin import owner_urn
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, ModelRecord
from tinsmith.protocol.wire_bounds import MAX_SEQ
from tinsmith.state.publications import Publication

TYPE_OF = {CheckpointKind.TRAINING: "training", CheckpointKind.SAMPLER: "sampler", CheckpointKind.EXTERNAL: "external"}
_KNOWS_EXTERNAL = (0, 29)  # the first SDK that is known to take checkpoints of type external; 0.25 rejects a list that has one
_SDK = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)")

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Page:
    """`limit` entries from `offset` on."""

    offset: int
    limit: int

    @classmethod
    def of(cls, query: QueryParams, *, default: int) -> Self:
        """Raises ValidationFailed."""
        return cls(offset=number(query, "offset", 0, least=0, most=MAX_SEQ), limit=number(query, "limit", default, least=0, most=MAX_PAGE))

    def cut(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        return entries[self.offset : self.offset + self.limit]

    def cursor(self, num_entries: int) -> dict[str, int]:
        return {"offset": self.offset, "limit": self.limit, "total_count": num_entries}


def knows_external(headers: Mapping[str, str]) -> bool:
    """Whether the caller can read checkpoints of type external. Whoever is no SDK of that name can."""
    match = _SDK.match(headers.get("user-agent", ""))
    return match is None or (int(match[1]), int(match[2])) >= _KNOWS_EXTERNAL


@dataclass(frozen=True, slots=True)
class Shown:
    """A checkpoint with what its record does not say."""

    record: CheckpointRecord
    is_public: bool
    size_bytes: int

    def json(self) -> dict[str, object]:
        record = self.record
        return {
            "checkpoint_id": f"{record.kind}/{record.name}",
            "checkpoint_type": TYPE_OF[record.kind],
            "time": text_of(record.created_ms),
            "tinker_path": record.path,
            "size_bytes": self.size_bytes,
            "public": self.is_public,
            "user_metadata": record.user_metadata,
            "expires_at": None if record.expires_ms is None else text_of(record.expires_ms),
        }


def newest_first(records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Those of one moment by their paths, so that pages do not overlap."""
    return sorted(records, key=lambda record: (-record.created_ms, record.path))


async def shown(services: Services, records: Sequence[CheckpointRecord], published: Mapping[str, Publication]) -> list[Shown]:
    """In the order of the records."""
    return [Shown(record, _is_public(record, published.get(record.path)), await size_of(services, record)) for record in records]


def run_json(run: ModelRecord, checkpoints: Sequence[Shown], last_request_ms: int, *, is_own: bool) -> dict[str, object]:
    """`checkpoints`: of the run, newest first. What the owner noted about a run is shown to nobody else."""
    last = {kind: next((entry.json() for entry in checkpoints if entry.record.kind is kind), None) for kind in CheckpointKind}
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": owner_urn(run.tenant),
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora.rank,
        "last_request_time": text_of(last_request_ms),
        "last_checkpoint": last[CheckpointKind.TRAINING],
        "last_sampler_checkpoint": last[CheckpointKind.SAMPLER],
        "user_metadata": run.user_metadata if is_own else None,
    }


def _is_public(record: CheckpointRecord, publication: Publication | None) -> bool:
    return publication is not None and publication.covers(record)
