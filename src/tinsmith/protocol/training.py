"""Commands that change or read an adapter, and what an engine answers to them.

A command is data: it lies in the store as bytes (`wire.encode_command`) and may be run again by another process after a crash, so it
holds everything that its effect depends on, drawn randomness included.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tinsmith.protocol.custom_losses import CustomLoss
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
    EVALUATE = "evaluate"
    OPTIM_STEP = "optim_step"
    TRAIN_STEP = "train_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    SAMPLE = "sample"

    @property
    def is_barrier(self) -> bool:
        """False for the kinds whose calls a client may split into chunks that arrive out of order."""
        return self not in (Kind.FORWARD, Kind.FORWARD_BACKWARD)

    @property
    def is_save(self) -> bool:
        return self in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL)

    @property
    def is_replayed(self) -> bool:
        """True for the kinds that leave an effect in the adapter and so are run again after a restore."""
        return self in (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.TRAIN_STEP)


class Message(BaseModel):
    """Base of the JSON-borne messages: frozen, closed to unknown fields, and strict: no text or boolean passes for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class LoraConfig(Message):
    """`seed` fixes the initial A matrices per (seed, module name). At least one train flag is true."""

    rank: int = Field(default=32, ge=1, le=MAX_LORA_RANK)
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdamParams(Message):
    """AdamW as torch.optim.AdamW computes it; `grad_clip_norm` of 0 or less is off. The defaults are the Tinker wire's."""

    type: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class SgdParams(Message):
    """SGD as torch.optim.SGD computes it (dampening 0); `grad_clip_norm` of 0 or less is off."""

    type: Literal["sgd"] = "sgd"
    learning_rate: float = Field(default=1e-2, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


OptimizerParams = Annotated[AdamParams | SgdParams, Field(discriminator="type")]


class LrSchedule(Message):
    """What the learning rate of a step is multiplied with.

    The first `warmup_steps` steps rise linearly to 1. From there `linear` and `cosine` fall to `final_fraction` at step `total_steps`
    and stay there; `constant` stays at 1.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)
    final_fraction: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(f"total_steps: a {self.kind} schedule needs one above its {self.warmup_steps} warmup_steps")
        return self

    def factor(self, num_steps: int) -> float:
        """The factor of the next step after `num_steps` steps were taken."""
        if num_steps < self.warmup_steps:
            return (num_steps + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        progress = min(1.0, (num_steps - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * remaining


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
    """One optimizer step. `schedule` scales its learning rate by the number of steps that the adapter has taken."""

    kind: ClassVar[Kind] = Kind.OPTIM_STEP
    optimizer: OptimizerParams
    schedule: LrSchedule | None = None


class SaveWeights(Message):
    """A resumable checkpoint under `name`."""

    kind: ClassVar[Kind] = Kind.SAVE_WEIGHTS
    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Message):
    """An inference-only checkpoint: named (`name`), or ephemeral and bound to one sampling session (`sampling_session_id`), which with the
    mode `inflight` follows the model's later saves of that mode."""

    kind: ClassVar[Kind] = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    name: str | None = None
    sampling_session_id: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    mode: Literal["snapshot", "inflight"] = "snapshot"


class SaveWeightsExternal(Message):
    """A PEFT adapter under `name`, to be downloaded."""

    kind: ClassVar[Kind] = Kind.SAVE_WEIGHTS_EXTERNAL
    name: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """A pass over `data` with a loss of protocol/losses.py, or with `custom_loss`; losses are sums.

    `backward`: forward_backward, else forward. `metrics_only`: an evaluation, whose answer holds no value a token (never with
    `backward`). `micro_batch_tokens`: padded tokens of one pass, in place of the engine's own bound.
    """

    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    backward: bool
    metrics_only: bool = False
    micro_batch_tokens: int | None = None
    custom_loss: CustomLoss | None = None

    @property
    def kind(self) -> Kind:
        if self.metrics_only:
            return Kind.EVALUATE
        return Kind.FORWARD_BACKWARD if self.backward else Kind.FORWARD

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.model_input) for datum in self.data)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """forward_backward and optim_step in one command: both take effect, or neither does."""

    kind: ClassVar[Kind] = Kind.TRAIN_STEP
    compute: Compute
    step: OptimStep

    @property
    def num_tokens(self) -> int:
        return self.compute.num_tokens


EngineCommand = Compute | OptimStep | TrainStep
TrainingCommand = CreateModel | LoadWeights | Compute | OptimStep | TrainStep | SaveWeights | SaveWeightsForSampler | SaveWeightsExternal


@dataclass(frozen=True, slots=True)
class ComputeOutput:
    """`logprobs[i]` is float32 with the shape of datum i's target_tokens; `embeddings[i]` float32 [hidden size], of the losses that have
    them (`LossSpec.output`). An evaluation has neither. Metric keys carry exactly one ':' (name:reducer). The answer to a train_step
    holds the metrics of its optim_step too."""

    logprobs: tuple[Tensor, ...]
    metrics: dict[str, float]
    embeddings: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimOutput:
    """`metrics` holds `unclipped_grad_l2:mean`; empty where no gradient had been accumulated (the step is then a no-op)."""

    metrics: dict[str, float]
