"""The losses in float64 NumPy, from their published formulas and from nothing of the server: what its own are compared with.

`objective` is the value as written, products and all: it has no selects and is for ordinary numbers. Whatever a formula holds constant is
computed at `held`, so that its slope in `logprobs` is the gradient; `gradient` is that slope worked out on paper.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CONFIG: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}


def objective(name: str, logprobs: Array, held: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> float:
    """L, a sum over rows, for log-probs [N] ([N, K] for cross_entropy)."""
    w = inputs.get("weights", np.ones_like(logprobs))
    if name == "cross_entropy":
        return -float(np.sum(w * logprobs))
    q, a = inputs["logprobs"], inputs["advantages"]
    low, high = (inputs.get(key, np.full_like(a, config.get(key, 1.0))) for key in ("clip_low_threshold", "clip_high_threshold"))
    match name:
        case "importance_sampling":
            rows = np.exp(logprobs - q) * a
        case "ppo":
            ratio = np.exp(logprobs - q)
            rows = np.minimum(ratio * a, np.clip(ratio, low, high) * a)
        case "cispo":
            rows = np.clip(np.exp(held - q), low, high) * logprobs * a
        case "dro":
            rows = logprobs * a - config["beta"] / 2 * (logprobs - q) ** 2
        case "gspo":
            ratio = _sequence_ratio(held, inputs) * np.exp(logprobs - held)
            rows = np.minimum(ratio * a, np.clip(ratio, low, high) * a)
        case _:
            raise KeyError(name)
    return -float(np.sum(w * rows))


def gradient(name: str, logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Array:
    """dL/dlogprobs."""
    w = inputs.get("weights", np.ones_like(logprobs))
    if name == "cross_entropy":
        return -w
    q, a = inputs["logprobs"], inputs["advantages"]
    low, high = (inputs.get(key, np.full_like(a, config.get(key, 1.0))) for key in ("clip_low_threshold", "clip_high_threshold"))
    ratio = np.exp(logprobs - q)
    match name:
        case "importance_sampling":
            slope = -ratio * a
        case "ppo":
            slope = np.array([-r * x if _passes(r, x, lo, hi) else 0.0 for r, x, lo, hi in zip(ratio, a, low, high, strict=True)])
        case "cispo":
            slope = -np.clip(ratio, low, high) * a
        case "dro":
            slope = -a + config["beta"] * (logprobs - q)
        case "gspo":
            s = _sequence_ratio(logprobs, inputs)
            slope = np.array([-s * x if _passes(s, x, lo, hi) else 0.0 for x, lo, hi in zip(a, low, high, strict=True)])
        case _:
            raise KeyError(name)
    return w * slope


def value(name: str, logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> float:
    return objective(name, logprobs, logprobs, inputs, config)


def _sequence_ratio(logprobs: Array, inputs: Mapping[str, Array]) -> float:
    member = inputs["sequence_ratio_mask"] != 0
    return float(np.exp(np.mean(logprobs[member] - inputs["logprobs"][member])))


def _passes(ratio: float, advantage: float, low: float, high: float) -> bool:
    """The bound that the sign of the advantage makes the binding one is not crossed; a tie counts as not crossed."""
    return ratio <= high if advantage >= 0 else ratio >= low
