"""The losses of the fake training engine, on the log-probs of `fake_model.py`, in float64: values, slopes, metrics and refusals as the real
engines have them.

It computes no embeddings, so it does not offer `infonce`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.engines.fake_model import DIMENSIONS, Adapter, Vector, logprob
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import Limits, check_compute, check_finite, check_ids, not_finite, read_config
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values
from tinsmith.protocol.training import Compute, ComputeOutput


@dataclass(frozen=True, slots=True)
class Rows:
    """Targets of one datum, flattened: [N * K], with their log-probs."""

    shape: tuple[int, ...]
    targets: list[int]
    values: list[float]
    inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, datum: Datum, b: Vector) -> "Rows":
        wire = datum.loss_fn_inputs["target_tokens"]
        targets = [int(value) for value in _dense(wire)]
        width = 1 if len(wire.shape) == 1 else wire.shape[1]
        tokens = datum.model_input.tokens
        values = [logprob(b, tokens[index // width], target) for index, target in enumerate(targets)]
        return cls(wire.shape, targets, values, datum.loss_fn_inputs)

    def weights(self) -> list[float]:
        tensor = self.inputs.get("weights")
        return [1.0] * len(self.targets) if tensor is None else _dense(tensor)

    def input(self, name: str) -> list[float]:
        return _dense(self.inputs[name])

    def add_gradient(self, slopes: Sequence[float], a: Vector, gradient: Vector) -> None:
        """Add dL/db to `gradient`, given dL/dl by target."""
        for target, value, slope in zip(self.targets, self.values, slopes, strict=True):
            gradient[target % DIMENSIONS] += slope * a[target % DIMENSIONS] * -math.expm1(value)

    def logprobs(self) -> Tensor:
        return Tensor(DType.FLOAT32, self.shape, np.array(self.values, dtype="<f4").tobytes())


@dataclass(frozen=True, slots=True)
class _Term:
    """What one datum adds: L, a plain sum, and dL/dl by target."""

    value: float
    slopes: list[float]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value) and all(map(math.isfinite, self.slopes))


def check(command: Compute, limits: Limits) -> None:
    """Raises ValidationFailed, InputTokensExceeded, PayloadTooLarge."""
    check_compute(command, limits, FAKE_LOSSES)
    spec = LOSSES[command.loss_fn]
    for index, datum in enumerate(command.data):
        for name, tensor in datum.loss_fn_inputs.items():
            field, values = f"data[{index}].loss_fn_inputs.{name}", _dense(tensor)
            if spec.inputs[name].dtype is DType.INT64:
                check_ids(field, int(min(values)), int(max(values)), limits.vocab_size)
            else:
                check_finite(field, sum(not math.isfinite(value) for value in values))


def compute(adapter: Adapter, command: Compute) -> tuple[ComputeOutput, Vector]:
    """The answer to a checked command, and dL/db. Raises ValidationFailed for a loss that is not finite."""
    rows = [Rows.of(datum, adapter.b) for datum in command.data]
    config = read_config(command)
    if command.loss_fn == "dpo":
        terms, metrics = _dpo(rows, command.data, config)
    else:
        terms, metrics = [_POINTWISE[command.loss_fn](row) for row in rows], {}
    gradient = [0.0] * DIMENSIONS
    for index, (row, term) in enumerate(zip(rows, terms, strict=True)):
        if not term.is_finite:
            raise not_finite(index, command.loss_fn)
        row.add_gradient(term.slopes, adapter.a, gradient)
    metrics = {"loss:sum": sum((term.value for term in terms), 0.0)} | metrics
    if command.metrics_only:
        return ComputeOutput((), metrics | _measured(command, rows)), gradient
    return ComputeOutput(tuple(row.logprobs() for row in rows), metrics), gradient


def _cross_entropy(rows: Rows) -> _Term:
    weights = rows.weights()
    return _Term(sum((-weight * value for weight, value in zip(weights, rows.values, strict=True)), 0.0), [-weight for weight in weights])


def _importance_sampling(rows: Rows) -> _Term:
    advantages = [weight * advantage for weight, advantage in zip(rows.weights(), rows.input("advantages"), strict=True)]
    terms = [
        0.0 if advantage == 0 else -advantage * _ratio(value, sampled)
        for advantage, value, sampled in zip(advantages, rows.values, rows.input("logprobs"), strict=True)
    ]
    return _Term(sum(terms, 0.0), terms)


def _dpo(rows: Sequence[Rows], data: Sequence[Datum], config: Mapping[str, float]) -> tuple[list[_Term], dict[str, float]]:
    """Formula and metrics of `preference.py`; the reference is the adapter at b = 0."""
    terms: list[_Term] = []
    margins: list[float] = []
    rewards = [_reward(row, Rows.of(datum, [0.0] * DIMENSIONS)) for row, datum in zip(rows, data, strict=True)]
    for first in range(0, len(rows), 2):
        margin = config["beta"] * (rewards[first] - rewards[first + 1])
        slope = config["beta"] * math.exp(-_softplus(margin))  # beta s(-h)
        margins.append(margin)
        terms.append(_Term(_softplus(-margin), [-slope * weight for weight in rows[first].weights()]))
        terms.append(_Term(0.0, [slope * weight for weight in rows[first + 1].weights()]))
        if not math.isfinite(margin):
            raise not_finite(first, "dpo")
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    return terms, {"dpo/accuracy:mean": accuracy, "dpo/margin:mean": math.fsum(margins) / len(margins)}


def _reward(policy: Rows, reference: Rows) -> float:
    triples = zip(policy.weights(), policy.values, reference.values, strict=True)
    return math.fsum(weight * (value - base) for weight, value, base in triples)


def _measured(command: Compute, rows: Sequence[Rows]) -> dict[str, float]:
    """What an evaluation adds (`passes.py`)."""
    pairs = {"pairs:sum": len(rows) / 2} if LOSSES[command.loss_fn].is_paired else {}
    weight, nll = math.fsum(sum(row.weights()) for row in rows), math.fsum(_cross_entropy(row).value for row in rows)
    return {"tokens:sum": float(command.num_tokens), **pairs, "weight:sum": weight, "nll:sum": nll}


def _ratio(value: float, sampled: float) -> float:
    try:
        return math.exp(value - sampled)
    except OverflowError:
        return math.inf


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _dense(tensor: Tensor) -> list[float]:
    """All elements, row by row; ints stay exact."""
    values = list(float32_values(tensor.data) if tensor.dtype is DType.FLOAT32 else int64_values(tensor.data))
    if tensor.csr is None:
        return values
    rows, columns = tensor.shape
    crow, col = int64_values(tensor.csr.crow), int64_values(tensor.csr.col)
    dense: list[float] = [0] * (rows * columns)
    for row in range(rows):
        for index in range(crow[row], crow[row + 1]):
            dense[row * columns + col[index]] += values[index]
    return dense


_POINTWISE: Mapping[str, Callable[[Rows], _Term]] = {"cross_entropy": _cross_entropy, "importance_sampling": _importance_sampling}
FAKE_LOSSES = frozenset({*_POINTWISE, "dpo"})
