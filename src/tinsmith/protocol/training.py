"""Commands that change or read an adapter, and what an engine answers to them.

A command is data: it lies in the store as bytes (`wire.encode_command`) and may be run again by another process after a crash, so it
holds everything that its effect depends on, drawn randomness included.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.tensors import Tensor

LORA_ALPHA = 32.0  # constant: scale = 32 / rank makes the best learning rate nearly independent of the rank
MAX_LORA_RANK = 512


class Kind(StrEnum):
    """Kinds of commands."""

    CREATE_MODEL = "create_model"
    LOAD_WEIGHTS = "load_weights"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAMPLE = "sample"

    @property
    def is_barrier(self) -> bool:
        """False for the kinds whose calls a client may split into chunks that arrive out of order."""
        return self not in (Kind.FORWARD, Kind.FORWARD_BACKWARD)

    @property
    def is_save(self) -> bool:
        return self in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER)

    @property
    def is_replayed(self) -> bool:
        """True for the kinds that leave an effect in the adapter and so are run again after a restore."""
        return self in (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)


class Message(BaseModel):
    """Base of the JSON-borne messages: frozen, closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraConfig(Message):
    """`seed` fixes the initial A matrices per (seed, module name). At least one train flag is true."""

    rank: int = Field(default=32, ge=1, le=MAX_LORA_RANK)
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdamParams(Message):
    """AdamW as torch.optim.AdamW computes it; `grad_clip_norm` 0 is off. The defaults are the wire's."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class CreateModel(Message):
    kind: ClassVar[Kind] = Kind.CREATE_MODEL
    lora: LoraConfig


class LoadWeights(Message):
    """Load the artifact into the model; `lora` is set where the command also creates the model (entry 0 of a lane)."""

    kind: ClassVar[Kind] = Kind.LOAD_WEIGHTS
    path: str
    artifact: str
    optimizer: bool
    lora: LoraConfig | None = None


class OptimStep(Message):
    kind: ClassVar[Kind] = Kind.OPTIM_STEP
    adam: AdamParams


class SaveWeights(Message):
    """A resumable checkpoint under `name`."""

    kind: ClassVar[Kind] = Kind.SAVE_WEIGHTS
    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Message):
    """An inference-only checkpoint: named (`name`), or ephemeral and bound to one sampling session (`sampling_session_id`)."""

    kind: ClassVar[Kind] = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    name: str | None = None
    sampling_session_id: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    mode: Literal["snapshot"] = "snapshot"


@dataclass(frozen=True, slots=True)
class Compute:
    """forward (`backward` False) or forward_backward over `data` with a loss of protocol/losses.py; losses are sums."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    backward: bool

    @property
    def kind(self) -> Kind:
        return Kind.FORWARD_BACKWARD if self.backward else Kind.FORWARD

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.model_input) for datum in self.data)


EngineCommand = Compute | OptimStep
TrainingCommand = CreateModel | LoadWeights | Compute | OptimStep | SaveWeights | SaveWeightsForSampler


@dataclass(frozen=True, slots=True)
class ComputeOutput:
    """`logprobs[i]` is float32 with the shape of datum i's target_tokens; metric keys carry exactly one ':' (name:reducer)."""

    logprobs: tuple[Tensor, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class OptimOutput:
    """`metrics` holds `unclipped_grad_l2:mean`; empty where no gradient had been accumulated (the step is then a no-op)."""

    metrics: dict[str, float]
