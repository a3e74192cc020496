"""The timeline of a session as a trace file, for ui.perfetto.dev or chrome://tracing.

A caller asks for the export and gets a signed link at once: the file is built when it is downloaded, from the records of requests that are
still kept, so it is never out of date. One process of the trace is one model or sampler; a request is a span with its wait and its run
inside. Format: the "JSON array with metadata" of the Trace Event Format (Chromium project), nestable asynchronous events, times in us.
"""

import json
from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.bodies import off_loop
from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.downloads import PREFIX
from tinsmith.gateway.signing import Link, Links
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.training import Kind

MAX_REQUESTS = 50_000  # the newest of a session: about 50 MB of trace
_TRACE = "trace.json"
_INLINE_REQUESTS = 100  # building more than this would hold the loop for over a millisecond
_US = 1000  # in a ms

router = APIRouter()
downloads = APIRouter(prefix="/downloads/traces")


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, str]:
    """Always ready: a repeat answers a fresh link."""
    record = await services.catalog.session(tenant, session_id)
    links = Links(services.store)
    query = await links.query(Link("GET", tenant, _artifact(record.session_id), _TRACE, await links.expiry_s()))
    return {"status": "ready", "url": f"{str(request.base_url).rstrip('/')}{PREFIX}/traces/{record.session_id}?{query}"}


@downloads.get("/{session_id}")
async def download_trace(session_id: str, request: Request, services: ServicesDep) -> Response:
    """For whoever has the link; the tenant is the one that it was made for. Raises NotFound."""
    await Links(services.store).check(request.method, _artifact(session_id), _TRACE, request.query_params)
    records = await services.lanes.requests(request.query_params["tenant"], session_id, MAX_REQUESTS)
    headers = {"Content-Disposition": f'attachment; filename="{_TRACE}"', "Cache-Control": "private, no-store"}
    now_ms = await services.store.now_ms()
    trace = await off_loop(lambda: json.dumps(trace_of(records, now_ms), separators=(",", ":")), is_large=len(records) > _INLINE_REQUESTS)
    return Response(trace, media_type="application/json", headers=headers)


def trace_of(records: Iterable[FutureRecord], now_ms: int) -> dict[str, object]:
    """The trace as plain data. What has not ended ends now."""
    tracks: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for record in sorted(records, key=lambda record: (record.submitted_ms, record.rid)):
        track = _track_of(record)
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            events.append({"ph": "M", "name": "process_name", "pid": tracks[track], "tid": 0, "args": {"name": track}})
        events += _spans(record, tracks[track], now_ms)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _artifact(session_id: str) -> str:
    """What a link to a trace is signed for; no artifact of a checkpoint has a name of two segments."""
    return f"traces/{session_id}"


def _track_of(record: FutureRecord) -> str:
    """The model, or of a sample the sampler."""
    if record.kind is Kind.SAMPLE:
        return str(record.seq).rpartition("/")[0]
    return record.lane


def _spans(record: FutureRecord, pid: int, now_ms: int) -> Iterator[dict[str, object]]:
    """The request, and inside of it what it waited and what it ran. A request that never started only waited."""
    ended_ms = now_ms if record.ended_ms is None else record.ended_ms
    started_ms = ended_ms if record.started_ms is None else record.started_ms
    args: dict[str, object] = {"request_id": record.rid, "seq": str(record.seq), "state": record.state.value}
    if record.failure is not None:
        args["reason"] = record.failure.reason.value
    common: dict[str, object] = {"cat": "request", "id": record.rid, "pid": pid, "tid": 0}

    def span(name: str, begin_ms: int, end_ms: int, **more: object) -> Iterator[dict[str, object]]:
        yield common | {"ph": "b", "name": name, "ts": begin_ms * _US} | more
        yield common | {"ph": "e", "name": name, "ts": end_ms * _US}

    whole, end = span(record.kind.value, record.submitted_ms, ended_ms, args=args)
    yield whole
    yield from span("wait", record.submitted_ms, started_ms)
    if record.started_ms is not None:
        yield from span("run", started_ms, ended_ms)
    yield end
