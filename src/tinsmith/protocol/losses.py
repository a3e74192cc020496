"""The losses as data: names, inputs, config keys. `engines/passes.py` implements exactly this set; a test compares the two."""

from dataclasses import dataclass
from typing import Literal

from tinsmith.protocol.tensors import DType


@dataclass(frozen=True, slots=True)
class LossInput:
    """`ranks`: allowed ranks; every input has one row a model-input token."""

    dtype: DType
    is_required: bool = True
    ranks: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`config`: key -> default. `is_paired`: datums come in pairs, and a command is never split. `is_native`: the native face alone
    offers it. `output`: the field of `ComputeOutput` that it fills. `positive`: the config keys whose values must be above 0."""

    inputs: dict[str, LossInput]
    config: dict[str, float]
    is_paired: bool = False
    is_native: bool = False
    output: Literal["logprobs", "embeddings"] = "logprobs"
    positive: frozenset[str] = frozenset()


_TARGETS = LossInput(DType.INT64)
_WEIGHTS = LossInput(DType.FLOAT32, is_required=False)
_ROWS = LossInput(DType.FLOAT32)

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        inputs={
            "target_tokens": LossInput(DType.INT64, ranks=(1, 2)),
            "weights": LossInput(DType.FLOAT32, is_required=False, ranks=(1, 2)),
        },
        config={},
    ),
    "importance_sampling": LossSpec(
        inputs={"target_tokens": _TARGETS, "logprobs": _ROWS, "advantages": _ROWS, "weights": _WEIGHTS},
        config={},
    ),
    "dpo": LossSpec(
        inputs={"target_tokens": _TARGETS, "weights": _WEIGHTS},
        config={"beta": 0.1},
        is_paired=True,
        is_native=True,
        positive=frozenset({"beta"}),
    ),
    "infonce": LossSpec(
        inputs={},
        config={"temperature": 0.05},
        is_paired=True,
        is_native=True,
        output="embeddings",
        positive=frozenset({"temperature"}),
    ),
}
