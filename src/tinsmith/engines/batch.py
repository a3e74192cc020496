"""Datums to tensors: everything that can be wrong with a request is found here, before any compute.

What needs no tensor is checked by `protocol/loss_checks.py`; here are the numbers themselves. Knows nothing of models. Micro-batches are a
function of the command alone, so a command computes the same whatever else the server runs.

Dimensions: B sequences of a micro-batch, T padded length, N tokens of one datum, K targets a token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.protocol.custom_inputs import TARGETS, read_names
from tinsmith.protocol.custom_losses import CustomLoss
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import Limits, check_bounds, check_compute, check_finite, check_ids, check_ratio_mask
from tinsmith.protocol.losses import LOSSES, RATIO_MASK, LossInput, LossSpec
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.tensors import Tensor as WireTensor
from tinsmith.protocol.training import Compute

_NUMPY: dict[DType, str] = {DType.FLOAT32: "<f4", DType.INT64: "<i8"}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A checked datum on the CPU. `inputs` are the loss inputs, dense: target_tokens int64 [N] or [N,K], the others float32."""

    tokens_N: Tensor
    inputs: Mapping[str, Tensor]

    def __len__(self) -> int:
        return self.tokens_N.shape[0]

    @property
    def targets(self) -> Tensor:
        return self.inputs["target_tokens"]

    @property
    def num_targets(self) -> int:
        """K."""
        return 1 if self.targets.dim() == 1 else self.targets.shape[1]


def read_examples(command: Compute, limits: Limits, offered: Collection[str] = LOSSES) -> list[Example]:
    """All datums of a command, checked, in order. Raises what `loss_checks.check_compute` raises, and ValidationFailed for target ids that
    are not real, for numbers that are not finite or out of their bounds, and for a sequence that has advantages and no row in its mask."""
    check_compute(command, limits, offered)
    spec = LOSSES[command.loss_fn]
    return [_read_example(index, datum, spec, limits) for index, datum in enumerate(command.data)]


def read_custom_examples(command: Compute, loss: CustomLoss, limits: Limits) -> list[Example]:
    """As `read_examples`, of a command with a custom loss: `inputs` are the targets and what the loss reads, in the dtypes that came."""
    check_compute(command, limits)
    return [_read_custom(index, datum, loss, limits) for index, datum in enumerate(command.data)]


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


def _read_example(index: int, datum: Datum, spec: LossSpec, limits: Limits) -> Example:
    tokens = np.frombuffer(datum.model_input.token_bytes, dtype="<i4").astype(np.int64)
    inputs: dict[str, Tensor] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        wanted, field = spec.inputs[name], f"data[{index}].loss_fn_inputs.{name}"
        is_ids = wanted.dtype is DType.INT64
        array = _read_ids(field, tensor, limits.vocab_size) if is_ids else _read_numbers(field, tensor, wanted)
        inputs[name] = torch.from_numpy(array)
    if RATIO_MASK in inputs:
        check_ratio_mask(index, has_members=bool(inputs[RATIO_MASK].any()), trains=_trains(inputs))
    return Example(torch.from_numpy(tokens), inputs)


def _read_custom(index: int, datum: Datum, loss: CustomLoss, limits: Limits) -> Example:
    tokens = np.frombuffer(datum.model_input.token_bytes, dtype="<i4").astype(np.int64)
    fields = {name: f"data[{index}].loss_fn_inputs.{name}" for name in (TARGETS, *read_names(loss))}
    arrays = {name: _densify(datum.loss_fn_inputs[name]) for name in fields}
    for name, array in arrays.items():
        check_finite(fields[name], int((~np.isfinite(array)).sum()))
    check_ids(fields[TARGETS], int(arrays[TARGETS].min()), int(arrays[TARGETS].max()), limits.vocab_size)
    scalars = {parameter.name for parameter in loss.inputs if parameter.rank == 0}
    inputs = {name: torch.from_numpy(array.reshape(()) if name in scalars else array) for name, array in arrays.items()}
    return Example(torch.from_numpy(tokens), inputs)


def _read_ids(field: str, tensor: WireTensor, vocab_size: int) -> Array:
    ids = _densify(tensor)
    check_ids(field, int(ids.min()), int(ids.max()), vocab_size)
    return ids


def _read_numbers(field: str, tensor: WireTensor, wanted: LossInput) -> Array:
    numbers = _densify(tensor).astype(np.float32)  # integer torch tensors arrive as int64
    check_finite(field, int((~np.isfinite(numbers)).sum()))
    check_bounds(field, wanted, float(numbers.min()), float(numbers.max()))
    return numbers


def _trains(inputs: Mapping[str, Tensor]) -> bool:
    """Some row has an advantage and, where there are weights, a weight."""
    rows_N = inputs["advantages"] != 0
    return bool((rows_N & (inputs["weights"] != 0) if "weights" in inputs else rows_N).any())


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
