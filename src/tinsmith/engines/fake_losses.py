"""The losses of single datums on plain lists, in float64, for the fake training engine: the formulas, gates and refusals of `losses.py` and
`policy_losses.py`, written a row at a time.

Knows nothing of adapters or commands. What would overflow float32 is refused as it is there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinsmith.protocol.losses import CLIP_HIGH, CLIP_LOW, RATIO_MASK
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values

FLOAT32_MAX = 3.4028235e38
MAX_EXPONENT = 88.72  # of e, in float32


class Pull(NamedTuple):
    """What a target adds before its weight: to L, and to dL/dl."""

    value: float
    slope: float


@dataclass(frozen=True, slots=True)
class Rows:
    """What a loss reads of one datum: its log-probs [N * K] and its inputs."""

    logprobs: Sequence[float]
    inputs: Mapping[str, Tensor]

    def weights(self) -> list[float]:
        return self._given("weights", 1.0)

    def input(self, name: str) -> list[float]:
        return dense(self.inputs[name])

    def bounds(self, config: Mapping[str, float]) -> list[tuple[float, float]]:
        """lo and hi by row: the rows' own go before the config's."""
        return list(zip(self._given(CLIP_LOW, config[CLIP_LOW]), self._given(CLIP_HIGH, config[CLIP_HIGH]), strict=True))

    def ratios(self) -> list[float]:
        return [_exp(value - sampled) for value, sampled in zip(self.logprobs, self.input("logprobs"), strict=True)]

    def weighed(self, pulls: Sequence[Pull]) -> "Term":
        """A target of weight 0 adds 0, whatever it would add."""
        pairs = [
            (0.0, 0.0) if weight == 0 else (weight * one.value, weight * one.slope)
            for weight, one in zip(self.weights(), pulls, strict=True)
        ]
        return Term([value for value, _ in pairs], [slope for _, slope in pairs])

    def _given(self, name: str, absent: float) -> list[float]:
        tensor = self.inputs.get(name)
        return [absent] * len(self.logprobs) if tensor is None else dense(tensor)


@dataclass(frozen=True, slots=True)
class Term:
    """What one datum adds, by target: to L, a plain sum, and dL/dl."""

    values: list[float]
    slopes: list[float]

    @property
    def value(self) -> float:
        return sum(self.values, 0.0)

    @property
    def is_finite(self) -> bool:
        return all(abs(number) <= FLOAT32_MAX for number in (*self.values, *self.slopes))


Loss = Callable[[Rows, Mapping[str, float]], Term]


def cross_entropy(rows: Rows, config: Mapping[str, float]) -> Term:
    return rows.weighed([Pull(-value, -1.0) for value in rows.logprobs])


def importance_sampling(rows: Rows, config: Mapping[str, float]) -> Term:
    return rows.weighed([_pull(advantage, ratio, ratio) for advantage, ratio in zip(rows.input("advantages"), rows.ratios(), strict=True)])


def ppo(rows: Rows, config: Mapping[str, float]) -> Term:
    return _gated(rows, rows.ratios(), rows.bounds(config))


def cispo(rows: Rows, config: Mapping[str, float]) -> Term:
    clipped = [min(max(ratio, low), high) for ratio, (low, high) in zip(rows.ratios(), rows.bounds(config), strict=True)]
    triples = zip(rows.input("advantages"), clipped, rows.logprobs, strict=True)
    return rows.weighed([_pull(advantage, factor * value, factor) for advantage, factor, value in triples])


def dro(rows: Rows, config: Mapping[str, float]) -> Term:
    beta, pulls = config["beta"], []
    for value, sampled, advantage in zip(rows.logprobs, rows.input("logprobs"), rows.input("advantages"), strict=True):
        delta = value - sampled
        pulls.append(Pull(0.5 * beta * delta * delta - value * advantage, beta * delta - advantage))
    return rows.weighed(pulls)


def gspo(rows: Rows, config: Mapping[str, float]) -> Term:
    triples = zip(rows.logprobs, rows.input("logprobs"), rows.input(RATIO_MASK), strict=True)
    deltas = [value - sampled for value, sampled, member in triples if member != 0]
    ratio = _exp(math.fsum(deltas) / len(deltas)) if deltas else 1.0  # without members no row has an advantage
    return _gated(rows, [ratio] * len(rows.logprobs), [(config[CLIP_LOW], config[CLIP_HIGH])] * len(rows.logprobs))


POINTWISE: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def dense(tensor: Tensor) -> list[float]:
    """All elements, row by row; ints stay exact."""
    values = list(float32_values(tensor.data) if tensor.dtype is DType.FLOAT32 else int64_values(tensor.data))
    if tensor.csr is None:
        return values
    rows, columns = tensor.shape
    crow, col = int64_values(tensor.csr.crow), int64_values(tensor.csr.col)
    found: list[float] = [0] * (rows * columns)
    for row in range(rows):
        for index in range(crow[row], crow[row + 1]):
            found[row * columns + col[index]] += values[index]
    return found


def _gated(rows: Rows, ratios: Sequence[float], bounds: Sequence[tuple[float, float]]) -> Term:
    """The lesser of r A and clip(r, lo, hi) A."""
    pulls = []
    for advantage, ratio, (low, high) in zip(rows.input("advantages"), ratios, bounds, strict=True):
        bounded = min(ratio, high) if advantage >= 0 else max(ratio, low)
        pulls.append(_pull(advantage, bounded, ratio if bounded == ratio else 0.0))
    return rows.weighed(pulls)


def _pull(advantage: float, factor: float, slope: float) -> Pull:
    """An advantage of 0 pulls at nothing, whatever the ratio is."""
    return Pull(0.0, 0.0) if advantage == 0 else Pull(-factor * advantage, -slope * advantage)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent <= MAX_EXPONENT else math.inf
