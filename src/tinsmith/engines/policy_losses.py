"""The losses of policies as pure functions of log-probs: what a token's advantage weighs, and how far the ratio to the policy that sampled
it may go.

They are closed forms, and no automatic differentiation passes through an exponential: where a ratio overflows and a clip bounds it, value
and gradient are finite; where nothing bounds it they are infinite, and the command is refused; no ratio is clamped in silence. Rows whose
advantage or weight is 0 add exactly 0, whatever their ratio is (`dro` says what an advantage of 0 means there).

Inputs, all [N]: `logprobs` (q, those of the policy that sampled), `advantages` (A), `weights` (w, a constant that multiplies a row's term;
absent means 1). r = exp(l - q). lo, hi: bounds of the ratio itself, from the config or, where a loss has inputs of the same
names, row by row. Sources: the Tinker API's losses of these names, and the papers that each one gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engines.losses import LossTerm, total
from tinsmith.protocol.losses import CLIP_HIGH, CLIP_LOW, RATIO_MASK


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(w r A), the ratio differentiated and not clipped; g = -w r A."""
    rows = _Rows.of(inputs)
    terms = rows.scaled(_ratios(logprobs, inputs))
    return LossTerm(-total(terms), 0.0 - terms)


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(w min(r A, clip(r, lo, hi) A)), a row at a time; g = -w r A where A >= 0 and r <= hi, or A < 0 and r >= lo, else 0.

    A tie with a bound keeps its whole gradient. No second clip, no term of value or entropy. Source: Schulman et al. 2017, "Proximal Policy
    Optimization Algorithms", equation 7.
    """
    return _pessimistic(_ratios(logprobs, inputs), _bounds_of_rows(inputs, config), inputs)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(w c l A) with c = clip(r, lo, hi) held constant; g = -w c A, so a clipped row still trains.

    The value holds l itself: it is not comparable to ppo's. Source: MiniMax 2025, "MiniMax-M1", equations 4 and 5.
    """
    low, high = _bounds_of_rows(inputs, config)
    clipped = torch.minimum(torch.maximum(_ratios(logprobs, inputs), low), high)
    rows = _Rows.of(inputs)
    return LossTerm(-total(rows.scaled(clipped * logprobs)), 0.0 - rows.scaled(clipped))


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """L = -sum(w (l A - beta d^2 / 2)) with d = l - q; g = w (beta d - A).

    The penalty is there where the advantage is 0 too: only a weight of 0 takes a row out. Source: Richemond et al. 2024, "Offline
    Regularised Reinforcement Learning for Large Language Models Alignment", with the soft advantage computed by the caller.
    """
    advantages, weights = inputs["advantages"], _weights(inputs)
    delta = logprobs - inputs["logprobs"]
    # At beta 0 the penalty is 0 however large the square is.
    pull = config["beta"] * delta if config["beta"] > 0 else torch.zeros_like(delta)
    penalty = 0.5 * pull * delta if config["beta"] > 0 else pull
    is_live = weights != 0
    terms = torch.where(is_live, weights * (torch.where(advantages != 0, logprobs * advantages, 0.0) - penalty), 0.0)
    return LossTerm(-total(terms), torch.where(is_live, weights * (pull - advantages), 0.0))


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
    """ppo with one ratio for the datum, s = exp(mean of l - q over the rows of its mask), whose gradient is that of the row's own l.

    L = -sum(w min(s A, clip(s, lo, hi) A)) over all rows, inside the mask or not; g = -w s A under the gate of ppo with s for r. Input
    `sequence_ratio_mask`: a row belongs to the mean where it is not 0. q outside of it is not read. Source: Zheng et al. 2025, "Group
    Sequence Policy Optimization", equations 14 and 15; the paper's mean over a sequence is the caller's to put into the advantages.
    """
    is_member = inputs[RATIO_MASK] != 0
    delta = logprobs.double()[is_member] - inputs["logprobs"].double()[is_member]
    ratio = torch.exp(delta.mean()).to(logprobs.dtype)  # NaN without members; no row has an advantage then (batch.py)
    return _pessimistic(ratio.expand_as(logprobs), _bounds(config, logprobs.dtype), inputs)


@dataclass(frozen=True, slots=True)
class _Rows:
    """`scale` = A w; `is_live`: where neither is 0."""

    is_live: Tensor
    scale: Tensor
    is_raised: Tensor  # A >= 0: the row's log-prob is to rise

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> "_Rows":
        advantages, weights = inputs["advantages"], _weights(inputs)
        return cls((advantages != 0) & (weights != 0), advantages * weights, advantages >= 0)

    def scaled(self, factors: Tensor) -> Tensor:
        """factors * A * w, and 0 where a row is not live, whatever its factor is."""
        return torch.where(self.is_live, factors * self.scale, 0.0)


def _pessimistic(ratios: Tensor, bounds: tuple[Tensor, Tensor], inputs: Mapping[str, Tensor]) -> LossTerm:
    """The lesser of r A and clip(r, lo, hi) A. The gate follows the advantage's sign: a negative weight turns the term, not the gate."""
    low, high = bounds
    rows = _Rows.of(inputs)
    terms = rows.scaled(torch.where(rows.is_raised, torch.minimum(ratios, high), torch.maximum(ratios, low)))
    is_kept = torch.where(rows.is_raised, ratios <= high, ratios >= low)
    return LossTerm(-total(terms), 0.0 - torch.where(is_kept, terms, 0.0))


def _ratios(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _weights(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs.get("weights", torch.ones_like(inputs["advantages"]))


def _bounds(config: Mapping[str, float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lo and hi, scalars. A value beyond float32 bounds nothing."""
    return torch.tensor(config[CLIP_LOW], dtype=dtype), torch.tensor(config[CLIP_HIGH], dtype=dtype)


def _bounds_of_rows(inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """lo and hi, [N] where the rows bring their own."""
    low, high = _bounds(config, inputs["advantages"].dtype)
    return inputs.get(CLIP_LOW, low), inputs.get(CLIP_HIGH, high)
