"""Routes of sampling: sampling sessions and asample."""

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.preflight import check_sample
from tinsmith.gateway.samplers import adapter_of, open_sampler
from tinsmith.gateway.submission import derived_seed, submit_sample
from tinsmith.protocol import wire_json
from tinsmith.protocol.errors import InvalidRequest, ValidationFailed
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sampling import MAX_NUM_SAMPLES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOP_K, Sample, SamplingParams
from tinsmith.protocol.sessions import CheckpointRecord
from tinsmith.protocol.wire_bounds import MAX_SAMPLE_SEQ
from tinsmith.protocol.wire_json import Body, Count, ModelInputBody, TensorBody
from tinsmith.state.feeds import feed_of
from tinsmith.state.sampler_clients import SamplerClients

BACKPRESSURE = "X-Tinker-Sampling-Backpressure"  # the client treats a 429 as a call to hold back

router = APIRouter()


class SamplingSessionBody(Body):
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class JoinBody(Body):
    sampling_session_id: str


class ParamsBody(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def decode(self, rid: str) -> SamplingParams:
        """Raises ValidationFailed."""
        try:
            return SamplingParams(
                seed=derived_seed(rid) if self.seed is None else self.seed,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                stop=_stops(self.stop),
            )
        except ValidationError as error:
            raise ValidationFailed(f"sampling_params.{wire_json.describe(error)}") from error


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0, le=MAX_SAMPLE_SEQ)
    prompt: ModelInputBody
    sampling_params: ParamsBody = ParamsBody()
    num_samples: int = Field(default=1, ge=1, le=MAX_NUM_SAMPLES)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=MAX_TOP_K)
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False

    def decode(self, rid: str, adapter: str | None) -> Sample:
        """Raises ValidationFailed."""
        if self.record_stability_info:
            raise ValidationFailed(
                "record_stability_info: what stable_reinforce records is not published and cannot be served; leave it out, and train "
                "off-policy data with the losses cispo or ppo"
            )
        targets = self.target_prompt_logprobs
        return Sample(
            prompt=self.prompt.decode("prompt"),
            params=self.sampling_params.decode(rid),
            num_samples=self.num_samples,
            adapter=adapter,
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            target_prompt_logprobs=None if targets is None else targets.decode("target_prompt_logprobs"),
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
        )


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Cheap: the checkpoint is looked up, a sampler loads it with the first sample. Idempotent by the number in the session."""
    body = await bodies.read(request, SamplingSessionBody)
    await services.catalog.live_session(tenant, body.session_id)
    checkpoint = await _checkpoint(services, tenant, body)
    base_model = checkpoint.base_model if checkpoint is not None else body.base_model
    if base_model is None:
        raise InvalidRequest("base_model, model_path: send one of them")
    record = await open_sampler(
        services, tenant, body.session_id, body.sampling_session_seq_id, base_model, checkpoint, field="sampling_session_seq_id"
    )
    return {"sampling_session_id": record.sampler_id, "type": "create_sampling_session"}


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """The number of a further client of the sampling session, which no other client of it has."""
    body = await bodies.read(request, JoinBody)
    sampler = await services.catalog.sampler(tenant, body.sampling_session_id)
    await services.catalog.live_session(tenant, sampler.session_id)
    number = await SamplerClients(services.store).join(tenant, sampler.sampler_id)
    return {"client_counter": number, "type": "join_sampling_session"}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    record = await services.catalog.sampler(tenant, sampler_id)
    return {"sampler_id": record.sampler_id, "base_model": record.base_model, "model_path": record.model_path}


@router.post("/asample")
async def asample(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Seq ids need be neither contiguous nor in order; the same one again is a repeat and answers the same promise.

    429 with nothing written where too much waits: a client that says that it knows what this means holds back, and sends the same seq id
    again.
    """
    body = await bodies.read(request, SampleBody)
    holds_back = request.headers.get(BACKPRESSURE) == "1"
    sampler = await services.catalog.sampler(tenant, body.sampling_session_id)
    await services.catalog.live_session(tenant, sampler.session_id)
    rid = await services.request_id(WorkKind.SAMPLING, tenant, sampler.sampler_id, body.seq_id)
    sample = body.decode(rid, await adapter_of(services, sampler))
    base = services.base_model(sampler.base_model)
    check_sample(sample, base)
    await submit_sample(
        services,
        sampler,
        body.seq_id,
        rid,
        sample,
        room=base.max_context - len(sample.prompt),
        feed=feed_of(sampler.sampler_id, body.seq_id),
        max_waiting=services.config.limits.max_pending_samples if holds_back else None,
    )
    return {"request_id": rid, "sample_sequence_ids": [f"{rid}-{index}" for index in range(sample.num_samples)]}


async def _checkpoint(services: Services, tenant: str, body: SamplingSessionBody) -> CheckpointRecord | None:
    if body.model_path is None:
        return None
    try:
        checkpoint = await services.checkpoint(tenant, body.model_path, field="model_path")
    except ValidationFailed as error:
        raise InvalidRequest(error.message) from error
    if body.base_model not in (None, checkpoint.base_model):
        raise InvalidRequest(f"base_model: the checkpoint belongs to {checkpoint.base_model}; leave base_model out")
    return checkpoint


def _stops(stop: str | list[str] | list[int] | None) -> tuple[str, ...] | tuple[int, ...] | None:
    if stop is None:
        return None
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) > MAX_STOPS:
        raise ValidationFailed(f"sampling_params.stop: {len(stop)} entries, the bound is {MAX_STOPS}; send fewer")
    texts = tuple(entry for entry in stop if isinstance(entry, str))
    if any(not 1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise ValidationFailed(f"sampling_params.stop: a string must have 1 to {MAX_STOP_CHARACTERS} characters; leave others out")
    return texts if texts else tuple(entry for entry in stop if isinstance(entry, int))
