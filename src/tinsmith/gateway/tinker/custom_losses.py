"""create_custom_loss, and what becomes of a pass that asks for such a loss.

A loss is checked before it is kept, and checked again by the engine that runs it. A queued pass carries the loss itself and not its id, so
that it can be replayed whatever became of the session.
"""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.submission import BARRIER_TOKENS
from tinsmith.protocol.capabilities import TRAINING_ENGINES
from tinsmith.protocol.custom_losses import (
    CUSTOM,
    MAX_INPUTS,
    MAX_LOSSES,
    MAX_NAME,
    CustomLoss,
    LossGraph,
    LossParameter,
    check_custom_loss,
)
from tinsmith.protocol.errors import EndpointUnavailable, ValidationFailed
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import Compute
from tinsmith.protocol.wire_json import Body
from tinsmith.state.custom_losses import CustomLosses, CustomLossRecord

_LOSS_ID = "loss_id"

router = APIRouter()


class CreateCustomLossBody(Body):
    session_id: str
    custom_loss_seq_id: Annotated[int, Field(ge=0, lt=MAX_LOSSES)]
    name: str = Field(max_length=MAX_NAME)
    inputs: list[LossParameter] = Field(min_length=1, max_length=MAX_INPUTS)
    graph: LossGraph

    def decode(self) -> CustomLoss:
        """Raises ValidationFailed, PayloadTooLarge."""
        loss = CustomLoss(name=self.name, inputs=tuple(self.inputs), graph=self.graph)
        check_custom_loss(loss)
        return loss


@router.post("/create_custom_loss")
async def create_custom_loss(request: Request, services: ServicesDep, tenant: TenantDep) -> dict[str, object]:
    """Kept at once; its promise answers with the loss's id."""
    if not services.config.gateway.custom_losses:
        await bodies.receive(request)
        raise EndpointUnavailable("custom losses run in the client here; use forward_backward_custom with the client-side path")
    body = await bodies.read(request, CreateCustomLossBody)
    await services.catalog.live_session(tenant, body.session_id)
    loss = body.decode()
    loss_id = await services.request_id(WorkKind.CONTROL, tenant, body.session_id, f"custom_loss/{body.custom_loss_seq_id}")
    await services.budgets.admit(tenant, BARRIER_TOKENS)
    record = CustomLossRecord(
        tenant=tenant, session_id=body.session_id, loss_id=loss_id, loss=loss, created_ms=await services.store.now_ms()
    )
    await CustomLosses(services.store).add(record)
    return {"request_id": loss_id}


async def created_loss(services: Services, tenant: str, rid: str) -> dict[str, object] | None:
    """The answer to the promise of this id, if it is one of a custom loss."""
    record = await CustomLosses(services.store).find(tenant, rid)
    return None if record is None else {"loss_id": record.loss_id, "type": "create_custom_loss"}


async def with_custom_loss(services: Services, model: ModelRecord, command: Compute) -> Compute:
    """The pass with the loss that it names in place of the name; any other pass as it is.

    Raises ValidationFailed, also where the model's engine runs no custom losses, and NotFound for a loss of another session.
    """
    if command.loss_fn != CUSTOM or not services.config.gateway.custom_losses:
        return command
    engine = services.config.model(model.base_model).trainer.engine
    if not TRAINING_ENGINES[engine].has_custom_losses:
        raise ValidationFailed(f"loss_fn: engine {engine!r} runs no custom losses; run the loss in the client")
    loss_id = command.loss_fn_config.get(_LOSS_ID)
    if not isinstance(loss_id, str) or len(command.loss_fn_config) > 1:
        raise ValidationFailed(f"loss_fn_config: custom takes {_LOSS_ID} alone, a text; send what create_custom_loss answered")
    loss = await CustomLosses(services.store).of_session(model.tenant, model.session_id, loss_id)
    return replace(command, loss_fn_config={}, custom_loss=loss)
