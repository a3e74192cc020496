"""What the fake training engine computes of a command, on the log-probs of `fake_model.py`, in float64: values, slopes, metrics and
refusals as the real engines have them.

The losses of single datums are in `fake_losses.py`. It computes no embeddings, so it does not offer `infonce`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.engines.fake_losses import POINTWISE, Rows, Term, dense
from tinsmith.engines.fake_model import DIMENSIONS, Adapter, Vector, logprob
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import (
    Limits,
    check_bounds,
    check_compute,
    check_finite,
    check_ids,
    check_ratio_mask,
    not_finite,
    read_config,
)
from tinsmith.protocol.losses import LOSSES, RATIO_MASK
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import Compute, ComputeOutput

FAKE_LOSSES = frozenset({*POINTWISE, "dpo"})


@dataclass(frozen=True, slots=True)
class Scored:
    """Targets of one datum, flattened: [N * K], with their log-probs."""

    shape: tuple[int, ...]
    targets: list[int]
    values: list[float]
    rows: Rows

    @classmethod
    def of(cls, datum: Datum, b: Vector) -> "Scored":
        wire = datum.loss_fn_inputs["target_tokens"]
        targets = [int(value) for value in dense(wire)]
        width = 1 if len(wire.shape) == 1 else wire.shape[1]
        tokens = datum.model_input.tokens
        values = [logprob(b, tokens[index // width], target) for index, target in enumerate(targets)]
        return cls(wire.shape, targets, values, Rows(values, datum.loss_fn_inputs))

    def add_gradient(self, slopes: Sequence[float], a: Vector, gradient: Vector) -> None:
        """Add dL/db to `gradient`, given dL/dl by target."""
        for target, value, slope in zip(self.targets, self.values, slopes, strict=True):
            gradient[target % DIMENSIONS] += slope * a[target % DIMENSIONS] * -math.expm1(value)

    def logprobs(self) -> Tensor:
        return Tensor(DType.FLOAT32, self.shape, np.array(self.values, dtype="<f4").tobytes())


def check(command: Compute, limits: Limits) -> None:
    """Raises ValidationFailed, InputTokensExceeded, PayloadTooLarge."""
    if command.custom_loss is not None:
        raise ValidationFailed(f"loss_fn: {command.loss_fn!r} is not implemented by this engine; run the loss in the client")
    check_compute(command, limits, FAKE_LOSSES)
    spec = LOSSES[command.loss_fn]
    for index, datum in enumerate(command.data):
        inputs = {name: dense(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        for name, values in inputs.items():
            field, wanted = f"data[{index}].loss_fn_inputs.{name}", spec.inputs[name]
            if wanted.dtype is DType.INT64:
                check_ids(field, int(min(values)), int(max(values)), limits.vocab_size)
            else:
                check_finite(field, sum(not math.isfinite(value) for value in values))
                check_bounds(field, wanted, min(values), max(values))
        if RATIO_MASK in inputs:
            weights = inputs.get("weights", [1.0] * len(datum.model_input))
            trains = any(weight != 0 and advantage != 0 for weight, advantage in zip(weights, inputs["advantages"], strict=True))
            check_ratio_mask(index, has_members=any(inputs[RATIO_MASK]), trains=trains)


def compute(adapter: Adapter, command: Compute) -> tuple[ComputeOutput, Vector]:
    """The answer to a checked command, and dL/db. Raises ValidationFailed for a loss that is not finite."""
    scored = [Scored.of(datum, adapter.b) for datum in command.data]
    config = read_config(command)
    if command.loss_fn == "dpo":
        terms, metrics = _dpo(scored, command.data, config)
    else:
        terms, metrics = [POINTWISE[command.loss_fn](one.rows, config) for one in scored], {}
    gradient = [0.0] * DIMENSIONS
    for index, (one, term) in enumerate(zip(scored, terms, strict=True)):
        if not term.is_finite:
            raise not_finite(index, command.loss_fn)
        one.add_gradient(term.slopes, adapter.a, gradient)
    metrics = {"loss:sum": sum((term.value for term in terms), 0.0)} | metrics
    if command.metrics_only:
        return ComputeOutput((), metrics | _measured(command, scored)), gradient
    return ComputeOutput(tuple(one.logprobs() for one in scored), metrics), gradient


def _dpo(scored: Sequence[Scored], data: Sequence[Datum], config: Mapping[str, float]) -> tuple[list[Term], dict[str, float]]:
    """Formula and metrics of `preference.py`; the reference is the adapter at b = 0."""
    terms: list[Term] = []
    margins: list[float] = []
    rewards = [_reward(one, Scored.of(datum, [0.0] * DIMENSIONS)) for one, datum in zip(scored, data, strict=True)]
    for first in range(0, len(scored), 2):
        margin = config["beta"] * (rewards[first] - rewards[first + 1])
        slope = config["beta"] * math.exp(-_softplus(margin))  # beta s(-h)
        margins.append(margin)
        terms.append(Term([_softplus(-margin)], [-slope * weight for weight in scored[first].rows.weights()]))
        terms.append(Term([0.0], [slope * weight for weight in scored[first + 1].rows.weights()]))
        if not math.isfinite(margin):
            raise not_finite(first, "dpo")
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    return terms, {"dpo/accuracy:mean": accuracy, "dpo/margin:mean": math.fsum(margins) / len(margins)}


def _reward(policy: Scored, reference: Scored) -> float:
    triples = zip(policy.rows.weights(), policy.values, reference.values, strict=True)
    return math.fsum(weight * (value - base) for weight, value, base in triples)


def _measured(command: Compute, scored: Sequence[Scored]) -> dict[str, float]:
    """What an evaluation adds (`passes.py`)."""
    pairs = {"pairs:sum": len(scored) / 2} if LOSSES[command.loss_fn].is_paired else {}
    weight = math.fsum(sum(one.rows.weights()) for one in scored)
    nll = math.fsum(POINTWISE["cross_entropy"](one.rows, {}).value for one in scored)
    return {"tokens:sum": float(command.num_tokens), **pairs, "weight:sum": weight, "nll:sum": nll}


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
