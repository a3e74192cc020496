"""Datums to tensors: everything that can be wrong with a request is found here, before any compute.

Knows the vocabulary size and the context limit, and nothing of models. Micro-batches are a function of the command alone, so a command
computes the same whatever else the server runs.

Dimensions: B sequences of a micro-batch, T padded length, N tokens of one datum, K targets a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.losses import LOSSES, LossInput, LossSpec
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.tensors import Tensor as WireTensor
from tinsmith.protocol.training import Compute

_NUMPY: dict[DType, str] = {DType.FLOAT32: "<f4", DType.INT64: "<i8"}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Limits:
    """`vocab_size` counts real ids; `max_context` is in tokens."""

    vocab_size: int
    max_context: int


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A checked datum on the CPU. `targets` is int64 [N] or [N,K]; `inputs` are the other loss inputs, float32, dense."""

    tokens_N: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]

    def __len__(self) -> int:
        return self.tokens_N.shape[0]

    @property
    def num_targets(self) -> int:
        """K."""
        return 1 if self.targets.dim() == 1 else self.targets.shape[1]


def read_config(command: Compute) -> dict[str, float]:
    """The loss's config with its defaults filled in. Raises ValidationFailed naming the accepted keys."""
    spec = _spec_of(command.loss_fn)
    accepted = ", ".join(sorted(spec.config)) or "none"
    values = dict(spec.config)
    for key, value in command.loss_fn_config.items():
        if key not in spec.config:
            raise ValidationFailed(f"loss_fn_config: {command.loss_fn} does not take {key!r}; accepted keys: {accepted}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ValidationFailed(f"loss_fn_config: {key} must be a finite number, got {value!r}; accepted keys: {accepted}")
        values[key] = float(value)
    return values


def read_examples(command: Compute, limits: Limits) -> list[Example]:
    """All datums of a command, checked, in order.

    Raises InputTokensExceeded for a datum longer than the context, else ValidationFailed; either names datum, key, expected and actual.
    """
    spec = _spec_of(command.loss_fn)
    if not command.data:
        raise ValidationFailed("data: a command needs at least one datum, got none")
    return [_read_example(f"datum {index}", datum, command.loss_fn, spec, limits) for index, datum in enumerate(command.data)]


def plan(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Split datums into micro-batches of at most `budget` padded tokens, longest first, so that little is padded.

    Returns positions in `lengths`, each once; a datum longer than the budget is a micro-batch of its own.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        if current and (len(current) + 1) * lengths[current[0]] > budget:
            batches.append(tuple(current))
            current = []
        current.append(position)
    return [*batches, tuple(current)] if current else batches


def pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """tokens_BT int64, padded on the right with id 0, and mask_BT, true where a token is real.

    Under causal attention no real token sees the padding behind it; the mask removes the padded rows from everything that follows.
    """
    longest = max(len(example) for example in examples)
    tokens_BT = torch.zeros(len(examples), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens_BT[row, : len(example)] = example.tokens_N
        mask_BT[row, : len(example)] = True
    return tokens_BT, mask_BT


def _spec_of(loss_fn: str) -> LossSpec:
    if loss_fn not in LOSSES:
        raise ValidationFailed(f"loss_fn: {loss_fn!r} is not offered; choose one of {', '.join(sorted(LOSSES))}")
    return LOSSES[loss_fn]


def _read_example(where: str, datum: Datum, loss_fn: str, spec: LossSpec, limits: Limits) -> Example:
    tokens = _read_tokens(where, datum, limits)
    _check_keys(where, datum.loss_fn_inputs, loss_fn, spec)
    arrays: dict[str, Array] = {}
    for key, tensor in datum.loss_fn_inputs.items():
        arrays[key] = _read_input(f"{where}: {key}", tensor, spec.inputs[key], len(tokens))
    targets = arrays.pop("target_tokens")
    _check_ids(f"{where}: target_tokens", targets, limits.vocab_size)
    for key, array in arrays.items():
        if array.shape != targets.shape:
            raise ValidationFailed(f"{where}: {key}: expected the shape of target_tokens {list(targets.shape)}, got {list(array.shape)}")
    return Example(torch.from_numpy(tokens), torch.from_numpy(targets), {key: torch.from_numpy(array) for key, array in arrays.items()})


def _read_tokens(where: str, datum: Datum, limits: Limits) -> Array:
    num_tokens = len(datum.model_input)
    if num_tokens == 0:
        raise ValidationFailed(f"{where}: model_input: expected at least one token, got none")
    if num_tokens > limits.max_context:
        raise InputTokensExceeded(f"{where}: model_input: {num_tokens} tokens, the context holds {limits.max_context}; shorten it")
    tokens = np.frombuffer(datum.model_input.token_bytes, dtype="<i4").astype(np.int64)
    _check_ids(f"{where}: model_input", tokens, limits.vocab_size)
    return tokens


def _check_keys(where: str, inputs: Mapping[str, WireTensor], loss_fn: str, spec: LossSpec) -> None:
    required = [key for key, wanted in spec.inputs.items() if wanted.required]
    missing = [key for key in required if key not in inputs]
    if missing:
        raise ValidationFailed(f"{where}: loss_fn_inputs: {loss_fn} needs {', '.join(missing)}; got {', '.join(sorted(inputs)) or 'none'}")
    unknown = sorted(set(inputs) - set(spec.inputs))
    if unknown:
        raise ValidationFailed(
            f"{where}: loss_fn_inputs: {loss_fn} does not take {', '.join(unknown)}; accepted keys: {', '.join(sorted(spec.inputs))}"
        )


def _read_input(field: str, tensor: WireTensor, wanted: LossInput, num_rows: int) -> Array:
    tensor.check(field)
    if len(tensor.shape) not in wanted.ranks:
        ranks = " or ".join(map(str, wanted.ranks))
        raise ValidationFailed(f"{field}: expected rank {ranks}, got shape {list(tensor.shape)}")
    if tensor.shape[0] != num_rows or 0 in tensor.shape:
        rest = ", K >= 1" if len(tensor.shape) == 2 else ""
        raise ValidationFailed(f"{field}: expected shape [{num_rows}{rest}], one row a token of model_input, got {list(tensor.shape)}")
    if wanted.dtype is DType.INT64 and tensor.dtype is not DType.INT64:
        raise ValidationFailed(f"{field}: expected dtype int64, got {tensor.dtype}")
    dense = _densify(tensor)
    if wanted.dtype is DType.INT64:
        return dense
    values = dense.astype(np.float32)  # integer torch tensors arrive as int64
    if not np.isfinite(values).all():
        raise ValidationFailed(f"{field}: expected finite numbers, got {int((~np.isfinite(values)).sum())} of NaN or infinity")
    return values


def _densify(tensor: WireTensor) -> Array:
    """A writable dense array; entries that a sparse tensor does not list are 0, repeated ones add."""
    values = np.frombuffer(tensor.data, dtype=_NUMPY[tensor.dtype])
    if tensor.csr is None:
        return values.reshape(tensor.shape).copy()
    crow = np.frombuffer(tensor.csr.crow, dtype="<i8")
    col = np.frombuffer(tensor.csr.col, dtype="<i8")
    dense = np.zeros(tensor.shape, dtype=values.dtype)
    np.add.at(dense, (np.repeat(np.arange(tensor.shape[0]), np.diff(crow)), col), values)
    return dense


def _check_ids(field: str, ids: Array, vocab_size: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValidationFailed(f"{field}: expected token ids in [0, {vocab_size}), got {lowest if lowest < 0 else highest}")
