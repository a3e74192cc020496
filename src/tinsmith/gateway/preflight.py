"""What a request is refused for before it is queued: known losses and inputs, lengths, token ids, the context limit.

A pure function of the command and the facts of its base model. An engine checks again what its numerics depend on; this is so that
bad input costs its caller no turn in a queue.
"""

from math import isfinite, prod

from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput
from tinsmith.protocol.losses import LOSSES, LossSpec
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import MAX_COMMAND_ELEMENTS, DType, Tensor, int32_values
from tinsmith.protocol.training import Compute


def check_compute(command: Compute, base: BaseModelInfo) -> None:
    """Raises ValidationFailed or InputTokensExceeded, naming the field and the remedy."""
    spec = LOSSES.get(command.loss_fn)
    if spec is None:
        raise ValidationFailed(f"loss_fn: {command.loss_fn[:100]!r} is not implemented; use one of {', '.join(sorted(LOSSES))}")
    _check_config(command, spec)
    if not command.data:
        raise ValidationFailed("data: empty; send at least one datum")
    _check_elements(command)
    for index, datum in enumerate(command.data):
        _check_input(datum.model_input, f"data[{index}].model_input", base)
        _check_loss_inputs(datum, f"data[{index}].loss_fn_inputs", command.loss_fn, spec)


def check_sample(sample: Sample, base: BaseModelInfo) -> None:
    """Raises ValidationFailed or InputTokensExceeded, naming the field and the remedy.

    max_tokens may be more than the context has room for: the sample then ends where the context does.
    """
    _check_input(sample.prompt, "prompt", base)


def _check_config(command: Compute, spec: LossSpec) -> None:
    accepted = f"{command.loss_fn} accepts {', '.join(sorted(spec.config)) or 'no keys'}"
    for key, value in command.loss_fn_config.items():
        if key not in spec.config:
            raise ValidationFailed(f"loss_fn_config: unknown key {key[:100]!r}; {accepted}")
        if isinstance(value, str) or not isfinite(value):
            raise ValidationFailed(f"loss_fn_config.{key}: {str(value)[:100]!r} is no finite number; {accepted}")


def _check_elements(command: Compute) -> None:
    """A few bytes of sparse tensor may stand for megabytes: what all of them unfold to is bounded too."""
    elements = sum(prod(tensor.shape) for datum in command.data for tensor in datum.loss_fn_inputs.values())
    if elements > MAX_COMMAND_ELEMENTS:
        raise PayloadTooLarge(
            f"data: the loss inputs have {elements} elements when dense, the bound is {MAX_COMMAND_ELEMENTS}; send smaller chunks"
        )


def _check_input(model_input: ModelInput, field: str, base: BaseModelInfo) -> None:
    length = len(model_input)
    if length == 0:
        raise ValidationFailed(f"{field}: has no tokens; send at least one")
    if length > base.max_context:
        raise InputTokensExceeded(f"{field}: {length} tokens exceed the context of {base.max_context}; shorten it")
    tokens = int32_values(model_input.token_bytes)
    if min(tokens) < 0 or max(tokens) >= base.vocab_size:
        raise ValidationFailed(f"{field}: token ids must lie in [0, {base.vocab_size}), got {min(tokens)} to {max(tokens)}")


def _check_loss_inputs(datum: Datum, field: str, loss_fn: str, spec: LossSpec) -> None:
    known = ", ".join(sorted(spec.inputs))
    for name in datum.loss_fn_inputs:
        if name not in spec.inputs:
            raise ValidationFailed(f"{field}: {loss_fn} reads no input {name[:100]!r}; it reads {known}")
    for name, wanted in spec.inputs.items():
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is None:
            if wanted.required:
                raise ValidationFailed(f"{field}: {loss_fn} needs {name!r}; it reads {known}")
            continue
        _check_rows(tensor, f"{field}.{name}", len(datum.model_input), wanted.ranks)
        # Whole numbers may stand for float32: a caller's integer tensor.
        if wanted.dtype is DType.INT64 and tensor.dtype is not DType.INT64:
            raise ValidationFailed(f"{field}.{name}: must be int64, got {tensor.dtype}")


def _check_rows(tensor: Tensor, field: str, num_rows: int, ranks: tuple[int, ...]) -> None:
    if len(tensor.shape) not in ranks:
        raise ValidationFailed(f"{field}: has rank {len(tensor.shape)}, allowed are {', '.join(map(str, ranks))}; reshape it")
    if tensor.shape[0] != num_rows:
        raise ValidationFailed(f"{field}: has {tensor.shape[0]} rows for {num_rows} tokens of model_input; send one row a token")
    if 0 in tensor.shape:
        raise ValidationFailed(f"{field}: shape {list(tensor.shape)} has no columns; send at least one value a token")
