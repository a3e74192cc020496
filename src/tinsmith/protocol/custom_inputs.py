"""What the datums of a request with a custom loss must hold: targets, and the inputs that the loss declared.

A datum may hold more: the loss names what it reads, so nothing is ignored behind its author's back.
"""

from collections.abc import Callable
from math import prod

from tinsmith.protocol.custom_losses import CustomLoss
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.losses import LossInput, LossSpec
from tinsmith.protocol.tensors import DType, Tensor

TARGETS = "target_tokens"
CUSTOM_SPEC = LossSpec(inputs={TARGETS: LossInput(DType.INT64, ranks=(1, 2))}, config={})  # of every custom loss


def read_names(loss: CustomLoss) -> tuple[str, ...]:
    """The datum's inputs that the loss reads, in the order in which it takes them."""
    return tuple(parameter.name for parameter in loss.inputs[1:])


def check_custom_inputs(datum: Datum, loss: CustomLoss, field: Callable[[str], str]) -> None:
    """`field`: what messages call an input. Bytes are looked at, never unpacked. Raises ValidationFailed."""
    logprobs, *others = loss.inputs
    for name, rank in [(TARGETS, logprobs.rank), *((parameter.name, parameter.rank) for parameter in others)]:
        if name not in datum.loss_fn_inputs:
            raise ValidationFailed(f"{field(name)}: missing; loss {loss.name!r} reads {', '.join([TARGETS, *read_names(loss)])}")
        _check_shape(datum.loss_fn_inputs[name], rank, len(datum.model_input), field(name), loss.name)
    if datum.loss_fn_inputs[TARGETS].dtype is not DType.INT64:
        raise ValidationFailed(f"{field(TARGETS)}: must be int64, got {datum.loss_fn_inputs[TARGETS].dtype}; send whole numbers")
    for name, tensor in datum.loss_fn_inputs.items():
        tensor.check(field(name))


def _check_shape(tensor: Tensor, rank: int, num_rows: int, field: str, loss: str) -> None:
    shape = list(tensor.shape)
    if rank == 0:
        # The binary wire has no scalars: they travel as vectors of one element.
        if len(shape) > 1 or prod(shape) != 1:
            raise ValidationFailed(f"{field}: has shape {shape}, loss {loss!r} declared a scalar; send one value")
        return
    if len(shape) != rank:
        raise ValidationFailed(f"{field}: has rank {len(shape)}, loss {loss!r} declared rank {rank}; reshape it")
    if shape[0] != num_rows or 0 in shape:
        raise ValidationFailed(f"{field}: has shape {shape} for {num_rows} tokens; send one row a token")
