"""Datums and prompts of small, fixed token ids, in the SDK's types."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from tinker import types

Floats = Sequence[float]


def tokens(num: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids, the same for the same arguments; none is 0 or 1, which may end a sequence."""
    return [2 + (31 * seed + 7 * index * index + 13 * index) % (vocab_size - 2) for index in range(num)]


def prompt(ids: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(ids))


def datum(ids: Sequence[int], **inputs: Floats) -> types.Datum:
    """A sequence that is to predict its own next tokens. `inputs`: float32 loss inputs, one number a target."""
    return datum_of(ids[:-1], {"target_tokens": ids[1:]}, inputs)


def datum_of(ids: Sequence[int], integers: Mapping[str, Sequence[int]], floats: Mapping[str, Floats]) -> types.Datum:
    held = {name: types.TensorData(data=list(values), dtype="int64", shape=[len(values)]) for name, values in integers.items()}
    held |= {name: types.TensorData(data=list(values), dtype="float32", shape=[len(values)]) for name, values in floats.items()}
    return types.Datum(model_input=prompt(ids), loss_fn_inputs=held)


def weighted(ids: Sequence[int]) -> types.Datum:
    """For cross_entropy, all targets with weight 1."""
    return datum(ids, weights=[1.0] * (len(ids) - 1))


def logprobs(output: types.ForwardBackwardOutput, index: int = 0) -> list[float]:
    """Of the targets of one datum."""
    return [float(value) for value in output.loss_fn_outputs[index]["logprobs"].data]


def loss(output: types.ForwardBackwardOutput) -> float:
    return float(output.metrics["loss:sum"])


def are_close(left: Floats, right: Floats, tolerance: float = 1e-4) -> bool:
    return len(left) == len(right) and bool(np.allclose(left, right, rtol=tolerance, atol=tolerance))


def is_close(left: float, right: float, tolerance: float = 1e-4) -> bool:
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
