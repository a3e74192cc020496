"""The losses of single datums as pure functions of log-probs: a value and the gradient that a backward pass is seeded with.

The losses of pairs are in `preference.py` and `embedding.py`. Knows nothing of models, batches or logits: the log-prob is the only
differentiable quantity, so (value, g = dL/dlogprob) describes a loss completely. Values are plain sums, never means. Every closed form
selects before it multiplies: a row with weight or advantage 0 adds exactly 0 to value and gradient, also where a ratio or a log-prob
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
    return LossTerm(-_total(terms), 0.0 - weights)


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(r * A * w) with r = exp(l - q), differentiated, not clipped; g = -r * A * w.

    logprobs, inputs logprobs (q), advantages (A), weights (w, absent means 1): [N]. Source: the Tinker API's importance_sampling.
    """
    advantages = _weighted(inputs)
    delta = torch.where(advantages != 0, logprobs - inputs["logprobs"], 0.0)
    terms = torch.where(advantages != 0, torch.exp(delta) * advantages, 0.0)
    return LossTerm(-_total(terms), 0.0 - terms)


def _weighted(inputs: Mapping[str, Tensor]) -> Tensor:
    """Advantages times the optional weights: both are constants that multiply a row's term, so they act as one."""
    weights = inputs.get("weights")
    return inputs["advantages"] if weights is None else inputs["advantages"] * weights


def _total(terms: Tensor) -> float:
    return float(terms.sum(dtype=torch.float64))
