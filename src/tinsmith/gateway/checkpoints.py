"""Which checkpoint a request means, and whether a model may load it: the same rules on each face.

`field`: what the face calls the path, for messages.
"""

from tinsmith.gateway.deps import Services
from tinsmith.protocol.errors import Unauthenticated, ValidationFailed
from tinsmith.protocol.sessions import MAX_TTL_S, MIN_TTL_S, CheckpointKind, CheckpointRecord, ModelRecord
from tinsmith.protocol.training import AdamParams, LoraConfig, OptimizerParams


async def training_checkpoint(services: Services, tenant: str, path: str, *, base_model: str | None, field: str) -> CheckpointRecord:
    """Looked up once: a command names its artifact, so a later overwrite of the name changes nothing. `base_model`: what the caller
    takes it to belong to. Raises ValidationFailed, NotFound."""
    checkpoint = await services.checkpoint(tenant, path, field=field)
    if checkpoint.kind is not CheckpointKind.TRAINING:
        raise ValidationFailed(f"{field}: a checkpoint of {checkpoint.kind} cannot be trained on; load one that save_weights made")
    if base_model not in (None, checkpoint.base_model):
        raise ValidationFailed(f"base_model: the checkpoint belongs to {checkpoint.base_model}; leave base_model out")
    return checkpoint


def check_fits(checkpoint: CheckpointRecord, model: ModelRecord, *, with_optimizer: bool, field: str) -> None:
    """Raises ValidationFailed where the model has another base, other tensors or, if its state is loaded too, another optimizer."""
    if checkpoint.base_model != model.base_model:
        raise ValidationFailed(f"{field}: the checkpoint belongs to {checkpoint.base_model}, the model to {model.base_model}; load another")
    if _shape(checkpoint.lora) != _shape(model.lora):
        raise ValidationFailed(
            f"{field}: the checkpoint has LoRA {_shape(checkpoint.lora)}, the model {_shape(model.lora)}; load it into a model of its own"
        )
    if with_optimizer:
        check_same_optimizer(checkpoint, model.optimizer, field=field)


def check_same_optimizer(checkpoint: CheckpointRecord, optimizer: OptimizerParams | None, *, field: str) -> None:
    """Raises ValidationFailed where the state of one optimizer would be loaded into another."""
    saved, wanted = optimizer_type(checkpoint.optimizer), optimizer_type(optimizer)
    if saved != wanted:
        raise ValidationFailed(f"{field}: the checkpoint has the state of {saved}, the model uses {wanted}; load it without the optimizer")


def optimizer_type(optimizer: OptimizerParams | None) -> str:
    """Of a model or a checkpoint; one that names none uses AdamW."""
    return AdamParams().type if optimizer is None else optimizer.type


async def reader_of(services: Services, tenant: str, token: str | None) -> str:
    """The tenant as which a checkpoint is read. `token`: a credential of another account, where the caller sent one; it is neither logged
    nor kept. Raises Unauthenticated for one that is no account's."""
    if token is None:
        return tenant
    reader = await services.tenant_of_key(token)
    if reader is None:
        raise Unauthenticated("weights_access_token: it belongs to no account of this server; send a valid API key of the other account")
    return reader


def checked_ttl(ttl_s: int | None) -> int | None:
    """A time to live, in s; None: for ever. Raises ValidationFailed."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise ValidationFailed(f"ttl_seconds: {ttl_s} is out of bounds; send {MIN_TTL_S} (1 hour) to {MAX_TTL_S} (10 years)")
    return ttl_s


def _shape(lora: LoraConfig) -> str:
    """All that decides which tensors an adapter has; the seed does not."""
    return lora.model_dump_json(exclude={"seed"})
