"""Log-probs and inputs for the tests of losses of single datums: random ones, and datums on which a model computes."""

from collections.abc import Mapping

import numpy as np
import torch

from tests.fakes.loss_reference import Array
from tests.unit.engines.datums import datum, ints, rollout, supervised, tensor
from tinsmith.engines.losses import Loss, LossTerm, cross_entropy
from tinsmith.engines.policy_losses import cispo, dro, gspo, importance_sampling, ppo
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import read_config
from tinsmith.protocol.training import Compute

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
POLICIES = sorted(set(LOSSES) - {"cross_entropy"})
CLIPPED = ["cispo", "gspo", "ppo"]


def config_of(name: str, changed: Mapping[str, float] | None = None) -> dict[str, float]:
    """With the server's own defaults."""
    return read_config(Compute((), name, dict(changed or {}), backward=True))


def loss_of(name: str, logprobs: object, config: Mapping[str, float] | None = None, /, **inputs: object) -> LossTerm:
    """In float32."""
    tensors = {key: torch.tensor(values, dtype=torch.float32) for key, values in inputs.items()}
    return LOSSES[name](torch.tensor(logprobs, dtype=torch.float32), tensors, config_of(name, config))


def random_case(name: str, seed: int, *, weighted: bool, bounded: bool = False) -> tuple[Array, dict[str, Array]]:
    """Log-probs and inputs, representable in float32; some advantages and weights are 0. `bounded`: with thresholds by row."""
    rng = np.random.default_rng(seed)
    shape = (7, 3) if name == "cross_entropy" else (23,)
    inputs: dict[str, Array] = {}
    if weighted:
        inputs["weights"] = rng.normal(size=shape) * (rng.random(shape) > 0.2)
    if name != "cross_entropy":
        inputs |= {"logprobs": -2 + rng.normal(size=shape), "advantages": rng.normal(size=shape) * (rng.random(shape) > 0.2)}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(shape) > 0.4).astype(float)
    if bounded:
        inputs |= {"clip_low_threshold": rng.uniform(0, 1, shape), "clip_high_threshold": rng.uniform(1, 3, shape)}
    return _float32(-2 + rng.normal(size=shape)), {key: _float32(values) for key, values in inputs.items()}


def data_of(name: str, lengths: tuple[int, ...], seed: int = 0) -> list[Datum]:
    """With every input that the loss may have, and log-probs near those of an untrained model."""
    rng = np.random.default_rng(seed)
    if name == "cross_entropy":
        return [supervised(rng, length) for length in lengths]
    data = []
    for length in lengths:
        one = rollout(rng, length)
        extra = {"weights": tensor(rng.normal(size=length))}
        if name in ("ppo", "cispo"):
            extra |= {"clip_low_threshold": tensor(rng.uniform(0, 1, length)), "clip_high_threshold": tensor(rng.uniform(1, 2, length))}
        if name == "gspo":
            extra["sequence_ratio_mask"] = tensor([1, *(rng.random(length - 1) > 0.5)])
        data.append(Datum(one.model_input, one.loss_fn_inputs | extra))
    return data


def policy_datum(name: str, **changed: object) -> Datum:
    """Three sound rows of a policy's loss, with every required input."""
    inputs: dict[str, object] = {"logprobs": [-10.8] * 3, "advantages": [1, -1, 1]}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [1, 1, 0]
    return datum([1, 2, 3], target_tokens=ints([2, 3, 4]), **{key: tensor(values) for key, values in (inputs | changed).items()})  # type: ignore[arg-type]


def _float32(values: Array) -> Array:
    return values.astype(np.float32).astype(np.float64)
