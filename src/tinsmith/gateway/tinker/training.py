"""Routes of models and their training steps: create, describe, forward, forward_backward, optim_step, unload."""

from fastapi import APIRouter, Request
from pydantic import ValidationError

from tinsmith.gateway import bodies
from tinsmith.gateway.auth import PROTOBUF, content_type
from tinsmith.gateway.bodies import Received
from tinsmith.gateway.checkpoints import optimizer_type
from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.metadata import checked_metadata
from tinsmith.gateway.models import unload, unload_id
from tinsmith.gateway.preflight import check_compute
from tinsmith.gateway.submission import derived_seed, is_long, new_model_id
from tinsmith.gateway.tinker.custom_losses import with_custom_loss
from tinsmith.gateway.tinker.refusals import refuse_creation
from tinsmith.gateway.tinker.submit import submit_creation, submit_turn
from tinsmith.protocol import wire, wire_json
from tinsmith.protocol.errors import InvalidRequest, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import spec_of
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import AdamParams, Compute, CreateModel, Kind, LoraConfig, OptimStep
from tinsmith.protocol.wire_bounds import Head, read_head
from tinsmith.protocol.wire_json import Body, Count, ForwardBackwardBody

router = APIRouter()


class OptimizerBody(Body):
    type: str = "adamw"

    def check(self, field: str) -> None:
        if self.type != "adamw":
            raise ValidationFailed(f"{field}: {self.type[:100]!r} is not implemented; use adamw")


class LoraBody(Body):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def decode(self, rid: str) -> LoraConfig:
        """Raises ValidationFailed."""
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValidationFailed("lora_config: all of train_unembed, train_mlp and train_attn are false; set at least one")
        try:
            return LoraConfig(
                rank=self.rank,
                seed=derived_seed(rid) if self.seed is None else self.seed,
                train_attn=self.train_attn,
                train_mlp=self.train_mlp,
                train_unembed=self.train_unembed,
            )
        except ValidationError as error:
            raise ValidationFailed(f"lora_config.{wire_json.describe(error)}") from error


class CreateModelBody(Body):
    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: LoraBody = LoraBody()
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: dict[str, object] | None = None

    def decode(self, rid: str) -> tuple[LoraConfig, dict[str, str] | None]:
        """The adapter's config and the metadata. Raises ValidationFailed."""
        self.optimizer_config.check("optimizer_config.type")
        return self.lora_config.decode(rid), checked_metadata(self.user_metadata)


class ModelBody(Body):
    model_id: str


class AdamBody(Body):
    """The defaults are the wire's: old SDKs leave out what equals them."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    adam_params: AdamBody = AdamBody()
    optimizer_params: OptimizerBody = OptimizerBody()

    def decode(self) -> OptimStep:
        """Raises ValidationFailed."""
        self.optimizer_params.check("optimizer_params.type")
        try:
            return OptimStep(optimizer=AdamParams.model_validate(self.adam_params.model_dump()))
        except ValidationError as error:
            raise ValidationFailed(f"adam_params.{wire_json.describe(error)}") from error


@router.post("/create_model")
async def create_model(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    body = await bodies.read(request, CreateModelBody)
    services.base_model(body.base_model)
    model_id, rid = await new_model_id(services, tenant, body.session_id, body.model_seq_id)
    try:
        lora, metadata = body.decode(rid)
    except ValidationFailed as refusal:
        return await refuse_creation(services, tenant, body.session_id, model_id, refusal)
    model = ModelRecord(
        tenant=tenant,
        session_id=body.session_id,
        model_id=model_id,
        base_model=body.base_model,
        lora=lora,
        created_ms=await services.store.now_ms(),
        user_metadata=metadata,
    )
    return await submit_creation(services, rid, model, CreateModel(lora=lora))


@router.post("/get_info")
async def get_info(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Answered from the catalog, so a model that is being restored answers too."""
    body = await bodies.read(request, ModelBody)
    model = await services.catalog.model(tenant, body.model_id)
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_data": {"model_name": model.base_model, "tokenizer_id": model.base_model},
        "model_name": model.base_model,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "optimizer_config": {"type": optimizer_type(model.optimizer)},
    }


@router.post("/forward_backward")
@router.post("/forward")
async def forward_backward(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Protobuf from SDK 0.22 on, JSON before; what the body holds tells whether a backward pass is wanted."""
    head, decoded = await _read_pass(request)

    async def build(model: ModelRecord) -> Compute:
        if isinstance(decoded, TinsmithError):
            raise decoded
        base = services.base_model(model.base_model)
        command = await with_custom_loss(services, model, decoded)
        _check_is_offered(command)
        await bodies.off_loop(lambda: check_compute(command, base), is_large=is_long(command))
        return command

    if isinstance(decoded, TinsmithError) and (head.model_id is None or head.seq_id is None):
        raise decoded
    kind = decoded.kind if isinstance(decoded, Compute) else Kind.FORWARD_BACKWARD
    return await submit_turn(services, tenant, head, kind, build)


@router.post("/optim_step")
async def optim_step(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    tree = await bodies.read_tree(request)

    async def build(model: ModelRecord) -> OptimStep:
        step = wire_json.validate(OptimStepBody, tree).decode()
        if optimizer_type(model.optimizer) != step.optimizer.type:
            raise ValidationFailed(f"adam_params: the model uses {optimizer_type(model.optimizer)}; send its steps to /native/v1")
        return step

    return await submit_turn(services, tenant, wire_json.json_head(tree), Kind.OPTIM_STEP, build)


@router.post("/unload_model")
async def unload_model(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Closes the model at once; pending requests of it fail. Idempotent."""
    body = await bodies.read(request, ModelBody)
    model = await unload(services, tenant, body.model_id)
    return {"request_id": await unload_id(services, tenant, model.model_id), "model_id": model.model_id}


def _check_is_offered(command: Compute) -> None:
    """Raises ValidationFailed for a loss that this wire has no place for."""
    if command.custom_loss is None:
        spec_of(command.loss_fn, [name for name, spec in LOSSES.items() if not spec.is_native])


async def _read_pass(request: Request) -> tuple[Head, Compute | TinsmithError]:
    """Where the body says that it belongs, and the command, or why there is none. The head of a refused body is read all the same."""
    received = await bodies.receive(request)
    decode = _decode_protobuf if content_type(request.headers) == PROTOBUF else _decode_json
    return await bodies.off_loop(lambda: decode(received), is_large=received.is_large)


def _decode_protobuf(received: Received) -> tuple[Head, Compute | TinsmithError]:
    try:
        head = read_head(received.decoded_head())
    except InvalidRequest as error:
        return Head(None, None), error
    try:
        return head, wire.decode_forward_backward(received.decoded()).compute
    except TinsmithError as error:
        return head, error


def _decode_json(received: Received) -> tuple[Head, Compute | TinsmithError]:
    try:
        tree = wire_json.parse(received.decoded())
    except TinsmithError as error:
        return Head(None, None), error
    head = wire_json.json_head(tree)
    try:
        return head, wire_json.validate(ForwardBackwardBody, tree).decode()
    except TinsmithError as error:
        return head, error
