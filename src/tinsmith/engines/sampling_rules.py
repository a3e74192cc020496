"""How one token is drawn from one row of logits. Pure functions: no model, no batch, no running random state.

A row is drawn by itself from (logits, parameters, seed, sample index, position), so the draw cannot depend on what else decodes. The
draw inverts the cumulative distribution in the order of token ids: a last-bit change of the logits moves each boundary by a last bit,
and changes the token only if the uniform number falls into that gap.

Shapes: V vocabulary (real ids; the padding of the embedding can never be drawn), C candidates left by the filters.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinsmith.protocol.sampling import SamplingParams

LogprobMode = Literal["tempered", "raw"]
_TOP_P_GUESS = 256  # nuclei are small: a full sort of the vocabulary is ten times dearer than this many largest


class NonFiniteLogits(ArithmeticError):
    """The model's output holds NaN or +inf: nothing can be drawn from it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token and its log-probability."""

    token: int
    logprob: float


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone. `position` counts sampled tokens from 0."""
    digest = hashlib.blake2b(f"{seed}:{sample_index}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: Tensor, vocab_size: int, params: SamplingParams, u: float, mode: LogprobMode) -> Draw:
    """Draw one token from `logits` [V or wider], with the uniform number `u`.

    The log-probability is that of the distribution really drawn from (temperature, then top-k, then top-p, renormalised); with mode
    "raw", and for greedy always, that of the model at temperature 1 over the full vocabulary. Raises NonFiniteLogits.
    """
    logits = logits.float()
    log_norm = float(torch.logsumexp(logits, 0))
    if not abs(log_norm) < float("inf"):
        raise NonFiniteLogits("the logits are not finite")
    real = logits[:vocab_size]
    if params.temperature == 0:
        token = int(real.argmax())
        return Draw(token, float(real[token]) - log_norm)
    token, logprob = _invert(*candidates(real, params), u)
    return Draw(token, logprob if mode == "tempered" else float(real[token]) - log_norm)


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The distribution drawn from: (token ids [C] in ascending order, None meaning all; log-probabilities [C], float64).

    temperature > 0. top-k keeps exactly k (of equal logits the lower ids); top-p then keeps the smallest set of most probable tokens
    whose renormalised mass reaches p, the one that crosses included.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature  # the maximum first: a tiny temperature must not overflow
    ids = None
    if 0 < params.top_k < len(scaled):
        ids = _largest(scaled, params.top_k)
        scaled = scaled[ids]
    logprobs = torch.log_softmax(scaled, 0)
    if params.top_p < 1:
        kept = _nucleus(logprobs, params.top_p)
        ids = kept if ids is None else ids[kept]
        logprobs = torch.log_softmax(logprobs[kept], 0)
    return ids, logprobs


def _largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest, ascending; of equal values the lower indices."""
    threshold = torch.topk(values, k).values[-1]
    above = values > threshold
    ties = (values == threshold).nonzero()[:, 0][: k - int(above.sum())]
    above[ties] = True
    return above.nonzero()[:, 0]


def _nucleus(logprobs: Tensor, p: float) -> Tensor:
    """Indices of the smallest most probable set with mass >= p, ascending; at least one."""
    size = min(_TOP_P_GUESS, len(logprobs))
    best = torch.topk(logprobs, size).values
    if float(best.exp().sum()) < p:
        best = torch.sort(logprobs, descending=True).values
    num_below = int((best.exp().cumsum(0) < p).sum())
    return _largest(logprobs, min(num_below + 1, len(logprobs)))


def _invert(ids: Tensor | None, logprobs: Tensor, u: float) -> tuple[int, float]:
    cumulative = logprobs.exp().cumsum(0)
    at = int(torch.searchsorted(cumulative, cumulative[-1:] * u, right=True)[0])
    if at >= len(cumulative):  # rounding at u close to 1: the last token that has any mass
        at = int((logprobs > float("-inf")).nonzero()[-1, 0])
    return at if ids is None else int(ids[at]), float(logprobs[at])
