"""Routes of training runs: lists, and what is known of one. A run is a model, live or ended; its id is the model's.

Other tenants' runs are seen with `access_scope=accessible` alone, and only those of which a checkpoint is published.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.readable import own_checkpoints, published_checkpoints
from tinsmith.gateway.tinker.listing import Page, newest_first, run_json, shown
from tinsmith.gateway.tinker.queries import check_scope
from tinsmith.gateway.tinker.session_admin import DEFAULT_PROJECT
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, ModelRecord
from tinsmith.state.publications import Publication

router = APIRouter()


@dataclass(frozen=True, slots=True)
class _Run:
    """`checkpoints`: those that the caller may see. `last_request_ms`: the last sign of life."""

    model: ModelRecord
    checkpoints: Sequence[CheckpointRecord]
    last_request_ms: int


@router.get("/training_runs")
async def list_runs(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Newest first. `project_id`: the runs of that project's sessions, which are the caller's own."""
    page, project_id = Page.of(request.query_params, default=20), request.query_params.get("project_id")
    sees_others = _sees_others(request)
    models = await services.catalog.models(tenant)
    if project_id is not None:
        in_project = await _sessions_of(services, tenant, project_id)
        models = [model for model in models if model.session_id in in_project]
    published = await services.publications.all()
    runs = await _own_runs(services, tenant, models)
    if sees_others and project_id is None:
        runs += await _foreign_runs(services, tenant, published)
    runs.sort(key=lambda run: (-run.model.created_ms, run.model.model_id))
    listed = [await _json(services, tenant, run, published) for run in page.cut(runs)]
    return {"training_runs": listed, "cursor": page.cursor(len(runs))}


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    sees_others = _sees_others(request)
    published = await services.publications.all()
    try:
        model = await services.catalog.model(tenant, run_id)
    except NotFound:
        foreign = await _foreign_runs(services, tenant, published, run_id) if sees_others else []
        if not foreign:
            raise
        (run,) = foreign
    else:
        (run,) = await _own_runs(services, tenant, [model])
    return await _json(services, tenant, run, published)


async def _own_runs(services: Services, tenant: str, models: Iterable[ModelRecord]) -> list[_Run]:
    beats = await services.catalog.beats(tenant)
    checkpoints = _by_run(await own_checkpoints(services, tenant))
    return [_Run(model, checkpoints[model.model_id], _last_request_ms(model, beats)) for model in models]


async def _foreign_runs(services: Services, tenant: str, published: Mapping[str, Publication], run_id: str | None = None) -> list[_Run]:
    """The runs, or the run, of which other tenants have published something. Of their life no more is told than the newest of that."""
    runs: list[_Run] = []
    for of_run, checkpoints in _by_run(await published_checkpoints(services, tenant, published, run_id)).items():
        try:
            model = await services.catalog.model(checkpoints[0].tenant, of_run)
        except NotFound:  # forgotten between the two look-ups
            continue
        runs.append(_Run(model, checkpoints, max(record.created_ms for record in checkpoints)))
    return runs


async def _json(services: Services, tenant: str, run: _Run, published: Mapping[str, Publication]) -> dict[str, object]:
    """Of the checkpoints only the newest of a kind are told, so only they are measured."""
    newest: dict[CheckpointKind, CheckpointRecord] = {}
    for record in newest_first(run.checkpoints):
        newest.setdefault(record.kind, record)
    listed = await shown(services, list(newest.values()), published)
    return run_json(run.model, listed, run.last_request_ms, is_own=run.model.tenant == tenant)


def _sees_others(request: Request) -> bool:
    """Raises ValidationFailed."""
    return check_scope(request.query_params) == "accessible"


async def _sessions_of(services: Services, tenant: str, project_id: str) -> set[str]:
    sessions = await services.catalog.sessions(tenant)
    return {held.session_id for held in sessions if project_id == (DEFAULT_PROJECT if held.project_id is None else held.project_id)}


def _by_run(records: Iterable[CheckpointRecord]) -> defaultdict[str, list[CheckpointRecord]]:
    by_run: defaultdict[str, list[CheckpointRecord]] = defaultdict(list)
    for record in records:
        by_run[record.run_id].append(record)
    return by_run


def _last_request_ms(model: ModelRecord, beats: Mapping[str, int]) -> int:
    """The model's end, or the last sign of life of its session."""
    return model.ended_ms if model.ended_ms is not None else max(model.created_ms, beats.get(model.session_id, 0))
