"""How one token is drawn from one row of logits. Pure functions: no model, no batch, no running random state.

A row is drawn by itself from (logits, parameters, seed, sample index, position), so the draw cannot depend on what else decodes. The
draw inverts the cumulative distribution in the order of token ids: a last-bit change of the logits moves each boundary by a last bit,
and changes the token only if the uniform number falls into that gap.

Shapes: V vocabulary (real ids; the padding of the embedding can never be drawn), C candidates left by the filters.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from tinsmith.engines.penalties import adjustments
from tinsmith.protocol.sampling import SamplingParams, TopRow

LogprobMode = Literal["tempered", "raw"]
NOTHING_DRAWN: Mapping[int, int] = MappingProxyType({})
_TOP_P_GUESS = 256  # nuclei are small: a full sort of the vocabulary is ten times dearer than this many largest


class NonFiniteLogits(ArithmeticError):
    """The model's output holds NaN or +inf: nothing can be drawn from it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token and its log-probability. `best`: the largest of the same distribution, best first, fewer where it has fewer tokens."""

    token: int
    logprob: float
    best: TopRow | None = None


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone. `position` counts sampled tokens from 0."""
    return _uniform(f"{seed}:{sample_index}:{position}")


def alternative_uniform(seed: int, position: int, index: int) -> float:
    """As `uniform`, for the alternatives to a token of the prompt; never the number of a sampled token."""
    return _uniform(f"{seed}:prompt:{position}:{index}")


def _uniform(key: str) -> float:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(
    logits: Tensor,
    vocab_size: int,
    params: SamplingParams,
    u: float,
    mode: LogprobMode,
    *,
    counts: Mapping[int, int] = NOTHING_DRAWN,
    num_best: int = 0,
) -> Draw:
    """Draw one token from `logits` [V or wider], with the uniform number `u`. `counts`: of the tokens that the sequence holds.

    The log-probability is that of the distribution really drawn from (penalties and biases, temperature, then top-k, then top-p,
    renormalised); with mode "raw", and for greedy always, that of the model at temperature 1 over the full vocabulary. So are those of
    `best`, which is None for `num_best` 0. Raises NonFiniteLogits.
    """
    logits = logits.float()
    log_norm = _log_norm(logits)
    real = logits[:vocab_size]
    weighed = _adjusted(real, params, counts)
    if params.temperature > 0:
        ids, logprobs = candidates(weighed, params)
        [(token, logprob)] = _invert(ids, logprobs, [u])
        if mode == "tempered":
            return Draw(token, logprob, best_of(ids, logprobs, num_best) if num_best > 0 else None)
    else:
        token = int(weighed.argmax())
    return Draw(token, float(real[token]) - log_norm, best_of(None, real.double() - log_norm, num_best) if num_best > 0 else None)


def draw_alternatives(logits: Tensor, vocab_size: int, params: SamplingParams, us: Sequence[float], mode: LogprobMode) -> list[Draw]:
    """One draw for each of the uniform numbers, with replacement, from the model's distribution at the request's temperature alone: its
    filters, penalties and biases shape what is sampled and not these. Log-probabilities as in `draw`. Raises NonFiniteLogits."""
    plain = SamplingParams(seed=params.seed, temperature=params.temperature)
    if params.temperature == 0:
        return [draw(logits, vocab_size, plain, 0.0, mode)] * len(us)
    logits = logits.float()
    log_norm = _log_norm(logits)
    drawn = _invert(*candidates(logits[:vocab_size], plain), us)
    return [Draw(token, logprob if mode == "tempered" else float(logits[token]) - log_norm) for token, logprob in drawn]


def best_of(ids: Tensor | None, logprobs: Tensor, k: int) -> TopRow:
    """The k largest, best first, of equal ones the lower ids first; tokens without mass are left out."""
    places = _largest(logprobs, min(k, len(logprobs)))
    values, order = torch.sort(logprobs[places], descending=True, stable=True)
    places = places[order]
    tokens = places if ids is None else ids[places]
    return [(token, value) for token, value in zip(tokens.tolist(), values.tolist(), strict=True) if value > float("-inf")]


def _log_norm(logits: Tensor) -> float:
    log_norm = float(torch.logsumexp(logits, 0))
    if not abs(log_norm) < float("inf"):
        raise NonFiniteLogits("the logits are not finite")
    return log_norm


def _adjusted(real: Tensor, params: SamplingParams, counts: Mapping[int, int]) -> Tensor:
    """Logits [V] with the request's biases and penalties; the tensor itself where there are none."""
    added = adjustments(params, counts)
    if not added:
        return real
    changed = real.clone()
    changed[list(added)] += real.new_tensor(list(added.values()))
    return changed


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


def _invert(ids: Tensor | None, logprobs: Tensor, us: Sequence[float]) -> list[tuple[int, float]]:
    cumulative = logprobs.exp().cumsum(0)
    places = torch.searchsorted(cumulative, cumulative[-1:] * cumulative.new_tensor(us), right=True)
    if int(places.max()) >= len(cumulative):  # rounding at u close to 1: the last token that has any mass
        places = places.clamp(max=int((logprobs > float("-inf")).nonzero()[-1, 0]))
    tokens = places if ids is None else ids[places]
    return list(zip(tokens.tolist(), logprobs[places].tolist(), strict=True))
