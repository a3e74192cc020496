"""What a loss of single datums is, a pure function of log-probs, and the supervised one.

The losses of policies are in `policy_losses.py`, those of pairs in `preference.py` and `embedding.py`. Knows nothing of models, batches or
logits: the log-prob is the only differentiable quantity, so (value, g = dL/dlogprob) describes a loss completely. Values are plain sums,
never means. Every closed form selects before it multiplies: a row of weight 0 adds exactly 0 to value and gradient, also where its log-prob
overflows.

Shapes: N rows of one datum (one a token of its input), K targets a row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerm:
    """What one datum adds: `value` summed in float64, `grad` float32 with the shape of the log-probs."""

    value: float
    grad: Tensor

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value) and bool(torch.isfinite(self.grad).all())


Loss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], LossTerm]


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(w * l); g = -w.

    logprobs, weights: [N] or [N,K]. Weights are any real numbers (client-side custom losses send derivatives); absent means 1. Soft
    targets sum over K without renormalising. Source: the Tinker API's cross_entropy.
    """
    weights = inputs.get("weights", torch.ones_like(logprobs))
    terms = torch.where(weights != 0, weights * logprobs, 0.0)
    return LossTerm(-total(terms), 0.0 - weights)


def total(terms: Tensor) -> float:
    """The sum in float64: the order of many terms cannot show in float32."""
    return float(terms.sum(dtype=torch.float64))
