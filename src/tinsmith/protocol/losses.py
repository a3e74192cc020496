"""The losses as data: names, inputs, config keys, bounds. `engines/passes.py` implements exactly this set; a test compares the two."""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from tinsmith.protocol.tensors import DType


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be: `lowest` <= x <= `highest`, or `lowest` < x where `excludes_lowest`. `hint` ends the message of a refusal."""

    lowest: float = -inf
    highest: float = inf
    excludes_lowest: bool = False
    hint: str = ""

    def __contains__(self, value: float) -> bool:
        return (value > self.lowest if self.excludes_lowest else value >= self.lowest) and value <= self.highest

    def __str__(self) -> str:
        if self.highest < inf:
            return f"in [{self.lowest:g}, {self.highest:g}]"
        return f"{'above' if self.excludes_lowest else 'at least'} {self.lowest:g}"


@dataclass(frozen=True, slots=True)
class LossInput:
    """`ranks`: allowed ranks; every input has one row a model-input token. `bounds`: of every element; None: any finite number."""

    dtype: DType
    is_required: bool = True
    ranks: tuple[int, ...] = (1,)
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`config`: key -> default. `is_paired`: datums come in pairs, and a command is never split. `is_native`: the native face alone
    offers it. `output`: the field of `ComputeOutput` that it fills. `bounds`: of config values, where any finite number will not do."""

    inputs: dict[str, LossInput]
    config: dict[str, float]
    is_paired: bool = False
    is_native: bool = False
    output: Literal["logprobs", "embeddings"] = "logprobs"
    bounds: dict[str, Bounds] = field(default_factory=dict)


CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
RATIO_MASK = "sequence_ratio_mask"

_POSITIVE = Bounds(0.0, excludes_lowest=True)
_ABSOLUTE = "it bounds the ratio itself, not the ratio's distance from 1"
_CLIP_BOUNDS = {CLIP_LOW: Bounds(0.0, 1.0, hint=_ABSOLUTE), CLIP_HIGH: Bounds(1.0, hint=_ABSOLUTE)}

_TARGETS = LossInput(DType.INT64)
_WEIGHTS = LossInput(DType.FLOAT32, is_required=False)
_ROWS = LossInput(DType.FLOAT32)
_POLICY = {"target_tokens": _TARGETS, "logprobs": _ROWS, "advantages": _ROWS, "weights": _WEIGHTS}
_CLIPS = {name: LossInput(DType.FLOAT32, is_required=False, bounds=bounds) for name, bounds in _CLIP_BOUNDS.items()}

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        inputs={
            "target_tokens": LossInput(DType.INT64, ranks=(1, 2)),
            "weights": LossInput(DType.FLOAT32, is_required=False, ranks=(1, 2)),
        },
        config={},
    ),
    "importance_sampling": LossSpec(inputs=_POLICY, config={}),
    "ppo": LossSpec(inputs=_POLICY | _CLIPS, config={CLIP_LOW: 0.8, CLIP_HIGH: 1.2}, bounds=_CLIP_BOUNDS),
    "cispo": LossSpec(inputs=_POLICY | _CLIPS, config={CLIP_LOW: 0.0, CLIP_HIGH: 4.0}, bounds=_CLIP_BOUNDS),
    "dro": LossSpec(inputs=_POLICY, config={"beta": 0.05}, bounds={"beta": Bounds(0.0)}),
    "gspo": LossSpec(inputs=_POLICY | {RATIO_MASK: _ROWS}, config={CLIP_LOW: 0.8, CLIP_HIGH: 1.2}, bounds=_CLIP_BOUNDS),
    "dpo": LossSpec(
        inputs={"target_tokens": _TARGETS, "weights": _WEIGHTS},
        config={"beta": 0.1},
        is_paired=True,
        is_native=True,
        bounds={"beta": _POSITIVE},
    ),
    "infonce": LossSpec(
        inputs={},
        config={"temperature": 0.05},
        is_paired=True,
        is_native=True,
        output="embeddings",
        bounds={"temperature": _POSITIVE},
    ),
}

# Losses that callers know by name and that cannot be offered: why, and what to use. They are refused, never replaced in silence.
REFUSED_LOSSES: dict[str, str] = {
    "stable_reinforce": "is not offered, its objective is unpublished; use cispo or ppo, which need nothing recorded at sampling",
}
