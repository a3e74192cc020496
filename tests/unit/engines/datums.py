"""Datums and commands for the tests of the engines, from plain Python values."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.protocol.training import Compute


def tensor(values: npt.ArrayLike, dtype: DType = DType.FLOAT32) -> Tensor:
    array = np.asarray(values, dtype="<f4" if dtype is DType.FLOAT32 else "<i8")
    return Tensor(dtype, array.shape, array.tobytes())


def ints(values: npt.ArrayLike) -> Tensor:
    return tensor(values, DType.INT64)


def sparse(dense: npt.ArrayLike, dtype: DType = DType.FLOAT32) -> Tensor:
    """CSR without the zeros."""
    array = np.asarray(dense, dtype="<f4" if dtype is DType.FLOAT32 else "<i8")
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=array.shape[0]))]).astype("<i8")
    return Tensor(dtype, array.shape, array[rows, columns].tobytes(), Csr(crow.tobytes(), columns.astype("<i8").tobytes()))


def model_input(tokens: Sequence[int]) -> ModelInput:
    return ModelInput((TextChunk(np.asarray(tokens, dtype="<i4").tobytes()),))


def datum(tokens: Sequence[int], **inputs: Tensor) -> Datum:
    return Datum(model_input(tokens), inputs)


def supervised(rng: np.random.Generator, length: int, *, num_targets: int | None = None) -> Datum:
    """Random tokens for cross_entropy; weights of either sign, some 0."""
    shape = (length,) if num_targets is None else (length, num_targets)
    weights = rng.normal(size=shape) * (rng.random(shape) > 0.3)
    return datum(_tokens(rng, length), target_tokens=ints(rng.integers(0, 49000, shape)), weights=tensor(weights))


def rollout(rng: np.random.Generator, length: int) -> Datum:
    """Random tokens for importance_sampling, with log-probs near those of an untrained model."""
    return datum(
        _tokens(rng, length),
        target_tokens=ints(rng.integers(0, 49000, length)),
        logprobs=tensor(-10.8 + 0.1 * rng.normal(size=length)),
        advantages=tensor(rng.normal(size=length) * (rng.random(length) > 0.3)),
    )


def compute(
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    *,
    backward: bool = True,
    config: Mapping[str, float | str] | None = None,
) -> Compute:
    return Compute(tuple(data), loss_fn, dict(config or {}), backward)


def array(wire: Tensor) -> npt.NDArray[np.float32]:
    """A dense float32 tensor's values."""
    return np.frombuffer(wire.data, dtype="<f4").reshape(wire.shape)


def _tokens(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 49000, length)]
