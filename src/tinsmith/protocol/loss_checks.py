"""What a command with a loss is refused for, with one message wherever it is found: gateways check before anything is queued, engines again
before they compute.

A function of the command, `protocol/losses.py` and two facts of the base model; bytes are looked at, never unpacked. What takes the numbers
of a tensor (target ids, finiteness, bounds) is found by engines, which unpack them anyway: `check_ids`, `check_finite`, `check_bounds` and
`check_ratio_mask` have the words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, prod

from tinsmith.protocol.custom_inputs import CUSTOM_SPEC, check_custom_inputs
from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput
from tinsmith.protocol.losses import LOSSES, RATIO_MASK, REFUSED_LOSSES, LossInput, LossSpec
from tinsmith.protocol.tensors import MAX_COMMAND_ELEMENTS, DType, Tensor, int32_values
from tinsmith.protocol.training import Compute

_QUOTED = 100  # characters of a caller's text that a message repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """`vocab_size` counts real ids; `max_context` is in tokens."""

    vocab_size: int
    max_context: int


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a face calls the parts of a command, for messages. `{}` takes the number of a datum, in `input` then the input's name. The
    defaults are the Tinker wire's, and those of engines, which do not know the face."""

    loss: str = "loss_fn"
    config: str = "loss_fn_config"
    data: str = "data"
    datum: str = "data[{}]"
    tokens: str = "data[{}].model_input"
    inputs: str = "data[{}].loss_fn_inputs"
    input: str = "data[{}].loss_fn_inputs.{}"


TINKER_NAMES = FieldNames()


def check_compute(command: Compute, limits: Limits, offered: Iterable[str] = LOSSES, names: FieldNames = TINKER_NAMES) -> None:
    """All that needs no tensor unpacked. `offered`: the losses of the engine that asks.

    Raises InputTokensExceeded for a datum longer than the context, PayloadTooLarge for more elements than a command may hold, else
    ValidationFailed; each names the field, what was expected and what came.
    """
    spec = CUSTOM_SPEC if command.custom_loss is not None else spec_of(command.loss_fn, offered, names)
    if command.custom_loss is None:
        read_config(command, names)
    _check_count(command, spec, names)
    _check_elements(command, names)
    for index, datum in enumerate(command.data):
        check_input(datum.model_input, names.tokens.format(index), limits)
        if command.custom_loss is None:
            _check_loss_inputs(datum, index, command.loss_fn, spec, names)
        else:
            check_custom_inputs(datum, command.custom_loss, partial(names.input.format, index))


def spec_of(loss_fn: str, offered: Iterable[str] = LOSSES, names: FieldNames = TINKER_NAMES) -> LossSpec:
    """Raises ValidationFailed naming the losses that are offered, or what to use in place of one that cannot be."""
    if loss_fn in REFUSED_LOSSES:
        raise ValidationFailed(f"{names.loss}: {loss_fn!r} {REFUSED_LOSSES[loss_fn]}")
    known = sorted(offered)
    if loss_fn not in known:
        raise ValidationFailed(f"{names.loss}: {loss_fn[:_QUOTED]!r} is not implemented; use one of {', '.join(known)}")
    return LOSSES[loss_fn]


def read_config(command: Compute, names: FieldNames = TINKER_NAMES) -> dict[str, float]:
    """The loss's config with its defaults filled in. Raises ValidationFailed naming the accepted keys."""
    spec = LOSSES[command.loss_fn]
    accepted = f"{command.loss_fn} accepts {', '.join(sorted(spec.config)) or 'no keys'}"
    values = dict(spec.config)
    for key, value in command.loss_fn_config.items():
        if key not in spec.config:
            raise ValidationFailed(f"{names.config}: unknown key {key[:_QUOTED]!r}; {accepted}")
        if isinstance(value, bool | str) or not isfinite(value):
            raise ValidationFailed(f"{names.config}.{key}: {str(value)[:_QUOTED]!r} is no finite number; {accepted}")
        values[key] = float(value)
        bounds = spec.bounds.get(key)
        if bounds is not None and values[key] not in bounds:
            hint = f", {bounds.hint}" if bounds.hint else ""
            raise ValidationFailed(f"{names.config}.{key}: must be {bounds}, got {value}; the default is {spec.config[key]}{hint}")
    return values


def check_input(model_input: ModelInput, field: str, limits: Limits) -> None:
    """Raises ValidationFailed, InputTokensExceeded."""
    length = len(model_input)
    if length == 0:
        raise ValidationFailed(f"{field}: has no tokens; send at least one")
    if length > limits.max_context:
        raise InputTokensExceeded(f"{field}: {length} tokens exceed the context of {limits.max_context}; shorten it")
    tokens = int32_values(model_input.token_bytes)
    check_ids(field, min(tokens), max(tokens), limits.vocab_size)


def check_ids(field: str, lowest: int, highest: int, vocab_size: int) -> None:
    """Raises ValidationFailed unless all token ids between the two are real."""
    if lowest < 0 or highest >= vocab_size:
        raise ValidationFailed(
            f"{field}: token ids must lie in [0, {vocab_size}), got {lowest} to {highest}; use the base model's tokenizer"
        )


def check_finite(field: str, num_bad: int) -> None:
    """Raises ValidationFailed if there are elements of NaN or infinity."""
    if num_bad:
        raise ValidationFailed(f"{field}: {num_bad} elements are NaN or infinite; send finite numbers")


def check_bounds(field: str, wanted: LossInput, lowest: float, highest: float) -> None:
    """Raises ValidationFailed unless all elements between the two are what the input may hold."""
    bounds = wanted.bounds
    if bounds is not None and not (lowest in bounds and highest in bounds):
        raise ValidationFailed(f"{field}: must be {bounds}, got {lowest:g} to {highest:g}; {bounds.hint}")


def check_ratio_mask(index: int, *, has_members: bool, trains: bool) -> None:
    """Raises ValidationFailed for a sequence without a row to take its ratio from, if a row of it would be trained with that ratio."""
    if trains and not has_members:
        field = TINKER_NAMES.input.format(index, RATIO_MASK)
        raise ValidationFailed(f"{field}: is 0 everywhere and advantages are not; set the rows that were sampled to 1")


def not_finite(index: int, loss_fn: str) -> ValidationFailed:
    """The refusal of a command whose loss, or its gradient, overflows at one datum."""
    return ValidationFailed(
        f"data[{index}]: {loss_fn}: the loss or its gradient is not finite; check weights, advantages and log-probs, or load an earlier "
        "checkpoint if the model has diverged"
    )


def _check_count(command: Compute, spec: LossSpec, names: FieldNames) -> None:
    if not command.data:
        raise ValidationFailed(f"{names.data}: empty; send at least one datum")
    if spec.is_paired and len(command.data) % 2:
        raise ValidationFailed(
            f"{names.datum.format(len(command.data) - 1)}: half a pair; {command.loss_fn} reads consecutive datums as pairs, send an even "
            "number of them"
        )


def _check_elements(command: Compute, names: FieldNames) -> None:
    """A few bytes of sparse tensor may stand for megabytes: what all of them unfold to is bounded too."""
    elements = sum(prod(tensor.shape) for datum in command.data for tensor in datum.loss_fn_inputs.values())
    if elements > MAX_COMMAND_ELEMENTS:
        raise PayloadTooLarge(
            f"{names.data}: the loss inputs have {elements} elements when dense, the bound is {MAX_COMMAND_ELEMENTS}; send smaller chunks"
        )


def _check_loss_inputs(datum: Datum, index: int, loss_fn: str, spec: LossSpec, names: FieldNames) -> None:
    field = names.inputs.format(index)
    known = ", ".join(sorted(spec.inputs)) or "none"
    for name in datum.loss_fn_inputs:
        if name not in spec.inputs:
            raise ValidationFailed(f"{field}: {loss_fn} reads no input {name[:_QUOTED]!r}; it reads {known}")
    for name, wanted in spec.inputs.items():
        if wanted.is_required and name not in datum.loss_fn_inputs:
            raise ValidationFailed(f"{field}: {loss_fn} needs {name!r}; it reads {known}")
    for name, tensor in datum.loss_fn_inputs.items():
        _check_tensor(tensor, names.input.format(index, name), spec.inputs[name], len(datum.model_input))
    _check_shapes(datum.loss_fn_inputs, index, names)


def _check_tensor(tensor: Tensor, field: str, wanted: LossInput, num_rows: int) -> None:
    if len(tensor.shape) not in wanted.ranks:
        raise ValidationFailed(f"{field}: has rank {len(tensor.shape)}, allowed are {_listed(wanted.ranks)}; reshape it")
    if tensor.shape[0] != num_rows:
        raise ValidationFailed(f"{field}: has {tensor.shape[0]} rows for {num_rows} tokens; send one row a token")
    if 0 in tensor.shape:
        raise ValidationFailed(f"{field}: shape {list(tensor.shape)} has no columns; send at least one value a token")
    # Whole numbers may stand for float32: a caller's integer tensor.
    if wanted.dtype is DType.INT64 and tensor.dtype is not DType.INT64:
        raise ValidationFailed(f"{field}: must be int64, got {tensor.dtype}; send whole numbers")
    tensor.check(field)


def _check_shapes(inputs: Mapping[str, Tensor], index: int, names: FieldNames) -> None:
    targets = [tensor.shape for name, tensor in inputs.items() if name == "target_tokens"]
    for name, tensor in inputs.items():
        if targets and tensor.shape != targets[0]:
            field = names.input.format(index, name)
            raise ValidationFailed(f"{field}: has shape {list(tensor.shape)}, target_tokens {list(targets[0])}; send the same shape")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
