"""Routes of a model's weights: save, save for sampling, load."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field

from tinsmith.gateway import bodies
from tinsmith.gateway.checkpoints import check_fits, checked_ttl, reader_of, training_checkpoint
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata
from tinsmith.gateway.submission import new_model_id
from tinsmith.gateway.tinker.refusals import refuse_creation
from tinsmith.gateway.tinker.submit import submit_creation, submit_turn
from tinsmith.gateway.tinker.training import OptimizerBody
from tinsmith.protocol import ids, wire_json
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import CheckpointRecord, ModelRecord
from tinsmith.protocol.training import Kind, LoadWeights, LoraConfig, SaveWeights, SaveWeightsForSampler
from tinsmith.protocol.wire_json import Body, Count

router = APIRouter()


class SaveBody(Body):
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, object] | None = None

    def decode(self) -> SaveWeights:
        """Raises ValidationFailed."""
        if self.path is None:
            raise ValidationFailed("path: missing; send a name for the checkpoint")
        return SaveWeights(
            name=ids.check_name(self.path, "path"),
            overwrite=self.overwrite,
            ttl_seconds=checked_ttl(self.ttl_seconds),
            user_metadata=checked_metadata(self.user_metadata),
        )


class SaveForSamplerBody(SaveBody):
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"

    def decode_for(self, session_id: str) -> SaveWeightsForSampler:
        """Raises ValidationFailed."""
        if self.kind == "inflight" and self.path is not None:
            raise ValidationFailed(
                "kind: a checkpoint with a name stays as it is; send snapshot, or sampling_session_seq_id in place of path"
            )
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValidationFailed("path, sampling_session_seq_id: send a name for the checkpoint, or the number of a sampling session")
        sampler_id = None
        if self.sampling_session_seq_id is not None:
            sampler_id = ids.sampling_session_id(session_id, self.sampling_session_seq_id)
        return SaveWeightsForSampler(
            name=None if self.path is None else ids.check_name(self.path, "path"),
            sampling_session_id=sampler_id,
            ttl_seconds=checked_ttl(self.ttl_seconds),
            user_metadata=checked_metadata(self.user_metadata),
            mode=self.kind,
        )


class LoadBody(Body):
    """Into an existing model (model_id, seq_id), or into a new one (session_id, model_seq_id) whose first request this is.

    A `weights_access_token` is another account's credential: the path is looked up as that account's. It is not kept.
    """

    path: str
    optimizer: bool = False
    optimizer_config: OptimizerBody = OptimizerBody()
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    weights_access_token: str | None = Field(default=None, repr=False)


class NewModelBody(LoadBody):
    session_id: str
    model_seq_id: Count

    def checked_metadata(self) -> dict[str, str] | None:
        """Of a body whose optimizer is known. Raises ValidationFailed."""
        self.optimizer_config.check("optimizer_config.type")
        return checked_metadata(self.user_metadata)


@router.post("/save_weights")
async def save_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    tree = await bodies.read_tree(request)

    async def build(_: ModelRecord) -> SaveWeights:
        return wire_json.validate(SaveBody, tree).decode()

    return await submit_turn(services, tenant, wire_json.json_head(tree), Kind.SAVE_WEIGHTS, build)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    tree = await bodies.read_tree(request)

    async def build(model: ModelRecord) -> SaveWeightsForSampler:
        return wire_json.validate(SaveForSamplerBody, tree).decode_for(model.session_id)

    return await submit_turn(services, tenant, wire_json.json_head(tree), Kind.SAVE_WEIGHTS_FOR_SAMPLER, build)


@router.post("/load_weights")
async def load_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    tree = await bodies.read_tree(request)
    head = wire_json.json_head(tree)
    if head.model_id is None:
        return await _load_into_new(services, tenant, wire_json.validate(NewModelBody, tree))

    async def build(model: ModelRecord) -> LoadWeights:
        body = wire_json.validate(LoadBody, tree)
        checkpoint = await _loadable(services, tenant, body)
        check_fits(checkpoint, model, with_optimizer=body.optimizer, field="path")
        return _load(body, checkpoint, lora=None)

    return await submit_turn(services, tenant, head, Kind.LOAD_WEIGHTS, build)


async def _load_into_new(services: Services, tenant: str, body: NewModelBody) -> dict[str, object]:
    model_id, rid = await new_model_id(services, tenant, body.session_id, body.model_seq_id)
    try:
        metadata = body.checked_metadata()
    except ValidationFailed as refusal:
        return await refuse_creation(services, tenant, body.session_id, model_id, refusal)
    checkpoint = await _loadable(services, tenant, body)
    model = ModelRecord(
        tenant=tenant,
        session_id=body.session_id,
        model_id=model_id,
        base_model=services.base_model(checkpoint.base_model).name,
        lora=checkpoint.lora,
        optimizer=checkpoint.optimizer if body.optimizer else None,
        schedule=checkpoint.schedule if body.optimizer else None,
        created_ms=await services.store.now_ms(),
        user_metadata=metadata,
    )
    return await submit_creation(services, rid, model, _load(body, checkpoint, lora=checkpoint.lora))


async def _loadable(services: Services, tenant: str, body: LoadBody) -> CheckpointRecord:
    body.optimizer_config.check("optimizer_config.type")
    reader = await reader_of(services, tenant, body.weights_access_token)
    return await training_checkpoint(services, reader, body.path, base_model=body.base_model, field="path")


def _load(body: LoadBody, checkpoint: CheckpointRecord, *, lora: LoraConfig | None) -> LoadWeights:
    return LoadWeights(path=body.path, artifact=checkpoint.artifact, optimizer=body.optimizer, lora=lora)
