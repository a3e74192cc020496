"""Routes that report on a tenant: its audit log, what it used by the hour, and what its checkpoints take now.

Each caller reads its own tenant's alone. Amounts are exact counts; no price is known here, so every cost is null.
"""

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import AwareDatetime

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.readable import own_checkpoints
from tinsmith.gateway.tinker.queries import read_query, text_of
from tinsmith.gateway.tinker.session_admin import num_bytes_of, owner_urn
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import CheckpointRecord, SessionRecord
from tinsmith.protocol.wire_json import Body
from tinsmith.state.audit import AuditEntry, AuditEvent, AuditLog
from tinsmith.state.days import HOUR_MS, day_of
from tinsmith.state.usage import Stored, UsageBook, UsageKind, Used

MAX_DAYS = 14  # of one report
GIGABYTE = 10**9
_HOUR = timedelta(hours=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RESOURCES = {"checkpoints": ("checkpoint_",), "projects": ("project_",), "teams": (), "organizations": ("key_",)}

router = APIRouter()


class AuditQuery(Body):
    """`day`: of UTC; today where it is left out."""

    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date | None = None

    def asks_for(self, event: AuditEvent) -> bool:
        return self.event_type == "all" or event.startswith(_RESOURCES[self.event_type])


class UsageQuery(Body):
    """`starting_on` inclusive, `ending_before` exclusive."""

    starting_on: AwareDatetime
    ending_before: AwareDatetime

    def hours(self, now_ms: int) -> tuple[int, int]:
        """First hour, and the one after the last, from 1970 UTC. Raises ValidationFailed."""
        for name, moment in (("starting_on", self.starting_on), ("ending_before", self.ending_before)):
            if (moment - _EPOCH) % _HOUR:
                raise ValidationFailed(f"{name}: {moment.isoformat()} is not the beginning of an hour (UTC); send one that is")
        first, end = (self.starting_on - _EPOCH) // _HOUR, (self.ending_before - _EPOCH) // _HOUR
        if first * HOUR_MS > now_ms:
            raise ValidationFailed(f"starting_on: {self.starting_on.isoformat()} is in the future; send an earlier time")
        if not 0 < end - first <= MAX_DAYS * 24:
            raise ValidationFailed(f"ending_before: send a time after starting_on, by at most {MAX_DAYS} days")
        return first, end


class StorageQuery(Body):
    project_id: str | None = None


@router.get("/audit")
async def audit(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Of one day, oldest first."""
    query = read_query(request.query_params, AuditQuery)
    day = day_of(await services.store.now_ms()) if query.day is None else (query.day - _EPOCH.date()).days
    entries = await AuditLog(services.store, tenant).day(day)
    return {"entries": [_audited(entry) for entry in entries if query.asks_for(entry.event)]}


@router.get("/billing/usage/events")
async def usage_events(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """By the hour; within one the largest amount of tokens first."""
    first, end = read_query(request.query_params, UsageQuery).hours(await services.store.now_ms())
    book = UsageBook(services.store, tenant)
    used, stored = await book.used(first, end), await book.stored(first, end)
    sessions = await _sessions_of(services, tenant, used)
    ordered = sorted(used, key=lambda row: (row.hour, -_num_tokens(row), row.kind, row.session_id, row.base_model))
    rows = [(row.hour, _used_row(tenant, row, sessions.get(row.session_id))) for row in ordered]
    rows += [(row.hour, _stored_row(row)) for row in sorted(stored, key=lambda row: (row.hour, row.base_model))]
    return {
        "data": [row for _, row in sorted(rows, key=lambda pair: pair[0])],
        "sessions": {row.session_id: {"user_metadata": _metadata_of(sessions.get(row.session_id))} for row in ordered},
        "cost_data_through": None,
    }


@router.get("/billing/usage/checkpoints/current")
async def current_storage(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Checkpoints that have not expired, by the project of their session."""
    query = read_query(request.query_params, StorageQuery)
    projects = {record.session_id: record.project_id for record in await services.catalog.sessions(tenant)}
    by_project: defaultdict[str | None, list[CheckpointRecord]] = defaultdict(list)
    for record in await own_checkpoints(services, tenant):
        by_project[projects.get(record.session_id)].append(record)
    wanted = [project for project in by_project if query.project_id in (None, project)]
    rows = [
        _storage_row(tenant, project, by_project[project]) for project in sorted(wanted, key=lambda project: (project is None, project))
    ]
    return {"effective_rate_usd_per_gigabyte_month": None, "data": rows}


def _audited(entry: AuditEntry) -> dict[str, object]:
    """A checkpoint's entry also has the two older fields that clients still read."""
    is_checkpoint = entry.event.startswith("checkpoint_")
    return {
        "timestamp": text_of(entry.at_ms),
        "event": entry.event.value,
        "event_details": {"subject": entry.subject, **entry.details},
        "model_id": entry.details.get("model_id") if is_checkpoint else None,
        "tinker_path": entry.subject if is_checkpoint else None,
    }


async def _sessions_of(services: Services, tenant: str, used: list[Used]) -> dict[str, SessionRecord]:
    """Those that the catalog still knows."""
    if not used:
        return {}
    named = {row.session_id for row in used}
    return {record.session_id: record for record in await services.catalog.sessions(tenant) if record.session_id in named}


def _metadata_of(record: SessionRecord | None) -> dict[str, str] | None:
    return None if record is None else record.user_metadata


def _num_tokens(row: Used) -> int:
    return 0 if row.kind is UsageKind.CHECKPOINT else row.amount


def _used_row(tenant: str, row: Used, session: SessionRecord | None) -> dict[str, object]:
    return _bucket(row.hour, row.base_model) | {
        "user_id": owner_urn(tenant),
        "session_id": row.session_id,
        "project_id": None if session is None else session.project_id,
        "event_info": _event_info(row),
    }


def _stored_row(row: Stored) -> dict[str, object]:
    info = {"type": "storage", "free": False, "gigabyte_hours": row.num_bytes / GIGABYTE}
    return _bucket(row.hour, row.base_model) | {"event_info": info}


def _bucket(hour: int, base_model: str) -> dict[str, object]:
    return {"bucket_start": text_of(hour * HOUR_MS), "bucket_end": text_of((hour + 1) * HOUR_MS), "base_model": base_model}


def _event_info(row: Used) -> dict[str, object]:
    match row.kind:
        case UsageKind.TRAINING:
            return {"type": "training", "token_count": row.amount}
        case UsageKind.SAMPLING:
            return {"type": "sampling_sample", "token_count": row.amount}
        case UsageKind.PREFILL | UsageKind.CACHED_PREFILL:
            return {"type": "sampling_prefill", "cached": row.kind is UsageKind.CACHED_PREFILL, "token_count": row.amount}
        case UsageKind.CHECKPOINT:
            return {"type": "checkpoint", "count": row.amount}


def _storage_row(tenant: str, project: str | None, records: list[CheckpointRecord]) -> dict[str, object]:
    num_bytes = num_bytes_of(records)
    return {
        "project_id": project,
        "org_user_urn": owner_urn(tenant),
        "checkpoint_count": len(records),
        "size_bytes": num_bytes,
        "size_gigabytes": num_bytes / GIGABYTE,
    }
