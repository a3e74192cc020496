"""retrieve_futures: which samples of one client of a sampling session have ended, as one long poll in place of one a sample.

It tells that a sample has ended and not how: callers fetch each result by retrieve_future. A sample that no answer ever named would hang
its waiter for ever, so everything here errs to the other side: what was told may be told again.
"""

from fastapi import APIRouter, Request
from pydantic import Field

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.waiting import told
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.wire_bounds import MAX_SAMPLE_SEQ
from tinsmith.protocol.wire_json import Body
from tinsmith.state.feeds import CLIENT_SPAN, Completion, feed_name

MAX_COMPLETIONS = 1000  # of one answer; the rest follows under its cursor
MAX_WINDOW_S = 30.0  # clients break a poll off after 45 s

_TARGET = "sampling_session"

router = APIRouter()


class TargetBody(Body):
    type: str = _TARGET
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=MAX_SAMPLE_SEQ // CLIENT_SPAN)


class RetrieveFuturesBody(Body):
    target: TargetBody
    prev_cursor: int = Field(default=0, ge=0, le=2**63 - 1)
    timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: list[str] = Field(default=[])


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """What has ended since the cursor, as soon as there is something; at once with timeout 0. The results that the caller reports as
    retrieved are freed."""
    body = await bodies.read(request, RetrieveFuturesBody)
    if body.target.type != _TARGET:
        raise ValidationFailed(f"target.type: {body.target.type[:40]!r} is not followed here; send {_TARGET}")
    sampler = await services.catalog.sampler(tenant, body.target.sampling_session_id)
    feed = feed_name(sampler.sampler_id, body.target.cloned_sampler_id)
    if body.retrieved_request_ids:
        await services.lanes.acknowledge(tenant, feed, body.retrieved_request_ids)
    page = await told(services, sampler, feed, body.prev_cursor, MAX_COMPLETIONS, _window_s(services, body.timeout))
    return {"completions": [_body_of(completion) for completion in page.completions], "cursor": page.cursor}


def _window_s(services: Services, timeout_s: float | None) -> float:
    longest_s = min(services.config.execution.long_poll_s, MAX_WINDOW_S)
    return longest_s if timeout_s is None else min(timeout_s, longest_s)


def _body_of(completion: Completion) -> dict[str, object]:
    if completion.result_size is None:
        return {"state": "failed", "request_id": completion.rid}
    return {"state": "finished", "request_id": completion.rid, "response_payload_uncompressed_size": completion.result_size}
