"""The losses as data: names, inputs, config keys. `engines/losses.py` implements exactly this set; a test compares the two."""

from dataclasses import dataclass

from tinsmith.protocol.tensors import DType


@dataclass(frozen=True, slots=True)
class LossInput:
    """`ranks`: allowed ranks; every input has one row a model-input token."""

    dtype: DType
    required: bool = True
    ranks: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class LossSpec:
    inputs: dict[str, LossInput]
    config: dict[str, float]  # key -> default


_TARGETS = LossInput(DType.INT64)
_WEIGHTS = LossInput(DType.FLOAT32, required=False)
_ROWS = LossInput(DType.FLOAT32)

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        inputs={
            "target_tokens": LossInput(DType.INT64, ranks=(1, 2)),
            "weights": LossInput(DType.FLOAT32, required=False, ranks=(1, 2)),
        },
        config={},
    ),
    "importance_sampling": LossSpec(
        inputs={"target_tokens": _TARGETS, "logprobs": _ROWS, "advantages": _ROWS, "weights": _WEIGHTS},
        config={},
    ),
}
