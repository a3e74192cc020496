"""Preference pairs: direct preference optimisation, whose reference is the base model with the adapter off.

Source: Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", equation 7, summed over
pairs. Knows nothing of optimizers or of how a gradient reaches the adapter. Datums 2i and 2i + 1 are the chosen and the rejected one of
pair i.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tinsmith.engines.lora import Adapter
from tinsmith.engines.losses import LossTerm
from tinsmith.engines.network import Network, Passed, Work
from tinsmith.protocol.loss_checks import not_finite


@dataclass(frozen=True, slots=True)
class Side:
    """One datum of a pair: log-probs [N] of its targets under policy and reference, and its loss inputs (`weights` [N], absent means 1)."""

    policy: Tensor
    reference: Tensor
    inputs: Mapping[str, Tensor]

    def reward(self, weights: Tensor) -> float:
        """sum(w * (policy - reference)), in float64; a row of weight 0 adds exactly 0."""
        terms = weights * (self.policy.double() - self.reference.double())
        return float(torch.where(weights != 0, terms, 0.0).sum())

    def weights(self) -> Tensor:
        return self.inputs.get("weights", torch.ones_like(self.policy))


@dataclass(frozen=True, slots=True)
class PairTerm:
    """What a pair adds: `margin` = h; `value` = -log s(h); float32 gradients with the shapes of the two sides' log-probs."""

    margin: float
    value: float
    grad_chosen: Tensor
    grad_rejected: Tensor


def dpo(chosen: Side, rejected: Side, config: Mapping[str, float]) -> PairTerm:
    """L = -log s(h), h = beta [sum(w (l - q)) of chosen - sum(w (l - q)) of rejected], s the logistic function, l and q the log-probs under
    policy and reference; g = -beta s(-h) w on the chosen rows, +beta s(-h) w on the rejected ones.

    Log-probs and weights: [N] a side, and N may differ. `margin` is the difference of the implicit rewards.
    """
    beta = config["beta"]
    weights_chosen, weights_rejected = chosen.weights(), rejected.weights()
    margin = beta * (chosen.reward(weights_chosen) - rejected.reward(weights_rejected))
    slope = beta * _logistic(-margin)
    return PairTerm(margin, _softplus(-margin), 0.0 - slope * weights_chosen, slope * weights_rejected)


def dpo_pass(network: Network, adapter: Adapter, work: Work) -> Passed:
    """Log-probs of all datums under reference and policy, then the loss, then the backward pass micro-batch by micro-batch with the stored
    gradient, so a pair's two datums need not share a micro-batch.

    Metrics: `dpo/accuracy:mean`, the share of pairs whose margin is above 0, and `dpo/margin:mean`, the mean margin over pairs. Raises
    ValidationFailed, with the adapter unchanged, for a pair whose loss is not finite.
    """
    reference = _logprobs(network, work)
    with network.using(adapter):
        policy = _logprobs(network, work)
    sides = [Side(ours, theirs, example.inputs) for ours, theirs, example in zip(policy, reference, work.examples, strict=True)]
    pairs = [dpo(chosen, rejected, work.config) for chosen, rejected in zip(sides[::2], sides[1::2], strict=True)]
    terms = [term for index, pair in enumerate(pairs) for term in _checked(2 * index, pair, work.loss_fn)]
    if work.grad_P is not None:
        with network.using(adapter, work.grad_P):
            for positions in work.batches:
                network.score(work.of(positions), partial(_stored, [terms[position] for position in positions]), backward=True)
    metrics = {
        "dpo/accuracy:mean": sum(pair.margin > 0 for pair in pairs) / len(pairs),
        "dpo/margin:mean": math.fsum(pair.margin for pair in pairs) / len(pairs),
    }
    return Passed(policy, math.fsum(pair.value for pair in pairs), metrics)


def _logprobs(network: Network, work: Work) -> list[Tensor]:
    """Of every datum, in order, with the adapter in use if any."""
    found: dict[int, Tensor] = {}
    for positions in work.batches:
        scores = network.score(work.of(positions), lambda _, logprobs: LossTerm(0.0, torch.zeros_like(logprobs)), backward=False)
        found |= zip(positions, scores.logprobs, strict=True)
    return [found[position] for position in range(len(work.examples))]


def _stored(terms: Sequence[LossTerm], position: int, _: Tensor) -> LossTerm:
    return terms[position]


def _checked(index: int, pair: PairTerm, loss_fn: str) -> Sequence[LossTerm]:
    terms = [LossTerm(pair.value, pair.grad_chosen), LossTerm(0.0, pair.grad_rejected)]
    if not (math.isfinite(pair.margin) and all(term.is_finite for term in terms)):
        raise not_finite(index, loss_fn)
    return terms


def _softplus(x: float) -> float:
    """log(1 + e^x) = -log s(-x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
