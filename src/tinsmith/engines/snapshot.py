"""An adapter as files and back: what a capture writes, and the checks before anything of it is used.

The folder is PEFT's (adapter_config.json, adapter_model.safetensors), so any tool that reads PEFT adapters can use a capture; the float32
weights in it are the masters. Optimizer state lies beside it. safetensors and JSON only: reading a file runs no code.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL, Contents, Files
from tinsmith.engines.lora import Adapter, Layout
from tinsmith.engines.optimizers import Moments
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.training import LORA_ALPHA

TRAIN_STATE = "train_state.json"
TRAIN_TENSORS = "train_state.safetensors"
SCHEMA = 2  # 2 adds SGD; AdamW's state is written as 1, which older servers read
_Parsed = TypeVar("_Parsed", bound=BaseModel)
_PREFIX = "base_model.model."  # of the names in a PEFT file


class _AdapterConfig(BaseModel):
    """The part of PEFT's adapter_config.json that decides whether an adapter fits."""

    model_config = ConfigDict(extra="ignore")

    r: int
    lora_alpha: float
    target_modules: set[str]


class _TrainState(BaseModel):
    model_config = ConfigDict(extra="ignore")

    """`has_momentum`: of SGD, whose buffer exists from its first step with momentum on."""

    schema_version: int
    step: int
    accumulated: bool
    optimizer: Literal["adamw", "sgd"] = "adamw"
    has_momentum: bool = False

    @classmethod
    def of(cls, moments: Moments | None, *, accumulated: bool) -> "_TrainState":
        if moments is None or moments.optimizer == "adamw":
            return cls(schema_version=1, step=moments.step if moments else 0, accumulated=accumulated)
        has_momentum = moments.exp_avg_P is not None
        return cls(schema_version=2, step=moments.step, accumulated=accumulated, optimizer="sgd", has_momentum=has_momentum)

    @property
    def tensors(self) -> set[str]:
        """The names that belong beside it."""
        averages = {"exp_avg", "exp_avg_sq"} if self.optimizer == "adamw" else {"exp_avg"} if self.has_momentum else set()
        return (averages if self.step else set()) | ({"grad"} if self.accumulated else set())


@dataclass(frozen=True, slots=True)
class State:
    """What the files of a capture hold, checked against a layout."""

    weights_P: Tensor
    moments: Moments | None
    grad_P: Tensor | None


def capture(adapter: Adapter, contents: Contents, base_model: str) -> dict[str, bytes]:
    """The files of `contents`, independent of what the adapter does next."""
    files = {ADAPTER_CONFIG: _adapter_config(adapter.layout, base_model), ADAPTER_MODEL: save(_factors(adapter.layout, adapter.weights_P))}
    if contents is Contents.SAMPLER:
        return files
    unspent = adapter.grad_P if contents is Contents.SNAPSHOT else None
    state = _TrainState.of(adapter.moments, accumulated=unspent is not None)
    held = {"grad": unspent}
    if adapter.moments:
        held |= {"exp_avg": adapter.moments.exp_avg_P, "exp_avg_sq": adapter.moments.exp_avg_sq_P}
    tensors = {name: values_P.cpu() for name, values_P in held.items() if values_P is not None}
    return files | {TRAIN_STATE: state.model_dump_json(exclude_defaults=True).encode(), TRAIN_TENSORS: save(tensors)}


def read(files: Files, layout: Layout, *, optimizer: bool) -> State:
    """Check the files against the layout and read them. Without `optimizer` only the weights are read.

    Raises ValidationFailed for a file that is missing, cut short or of a newer schema, and for a rank, modules, shape or dtype that
    differ; nothing of the adapter has been touched then.
    """
    _check_adapter_config(files, layout)
    weights_P = _read_factors(_tensors(files, ADAPTER_MODEL), layout)
    if not optimizer:
        return State(weights_P, None, None)
    state = _parse(_TrainState, files, TRAIN_STATE)
    if state.schema_version > SCHEMA:
        raise ValidationFailed(f"{TRAIN_STATE}: schema {state.schema_version} is newer than this server's {SCHEMA}; upgrade the server")
    tensors = _tensors(files, TRAIN_TENSORS)
    _check_names(TRAIN_TENSORS, tensors, state.tensors)
    for name, tensor in tensors.items():
        _check_tensor(f"{TRAIN_TENSORS}: {name}", tensor, (layout.size,))
    moments = Moments(state.optimizer, state.step, tensors.get("exp_avg"), tensors.get("exp_avg_sq")) if state.step else None
    return State(weights_P, moments, tensors.get("grad"))


def _adapter_config(layout: Layout, base_model: str) -> bytes:
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": layout.rank,
        "target_modules": sorted(_target_modules(layout)),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _target_modules(layout: Layout) -> set[str]:
    return {placement.site.name.rpartition(".")[2] for placement in layout.trained}


def _factors(layout: Layout, weights_P: Tensor) -> dict[str, Tensor]:
    weights_P = weights_P.cpu()
    tensors: dict[str, Tensor] = {}
    for placement in layout.trained:
        A_RI, B_OR = placement.views(weights_P)
        tensors |= dict(zip(_names(placement.site.name), (A_RI, B_OR), strict=True))
    return tensors


def _names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _check_adapter_config(files: Files, layout: Layout) -> None:
    config = _parse(_AdapterConfig, files, ADAPTER_CONFIG)
    if config.r != layout.rank:
        raise ValidationFailed(
            f"{ADAPTER_CONFIG}: the checkpoint has rank {config.r}, the model {layout.rank}; create a model of that rank"
        )
    if config.lora_alpha != LORA_ALPHA:
        raise ValidationFailed(
            f"{ADAPTER_CONFIG}: lora_alpha is {config.lora_alpha}, this server trains with {LORA_ALPHA}; load another checkpoint"
        )
    expected = _target_modules(layout)
    if config.target_modules != expected:
        raise ValidationFailed(
            f"{ADAPTER_CONFIG}: the checkpoint trains {sorted(config.target_modules)}, the model {sorted(expected)}; "
            "create a model with the same train_attn, train_mlp and train_unembed"
        )


def _read_factors(tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    _check_names(ADAPTER_MODEL, tensors, {name for placement in layout.trained for name in _names(placement.site.name)})
    weights_P = torch.empty(layout.size)
    for placement in layout.trained:
        for name, view in zip(_names(placement.site.name), placement.views(weights_P), strict=True):
            _check_tensor(f"{ADAPTER_MODEL}: {name}", tensors[name], tuple(view.shape))
            view.copy_(tensors[name])
    return weights_P


def _check_names(file: str, tensors: Mapping[str, Tensor], expected: set[str]) -> None:
    missing, surplus = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
    if missing or surplus:
        raise ValidationFailed(
            f"{file}: {len(missing)} tensors are missing {missing[:2]}, {len(surplus)} do not belong {surplus[:2]}; load another checkpoint"
        )


def _check_tensor(field: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape:
        raise ValidationFailed(f"{field}: expected float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}; load another checkpoint")


def _file(files: Files, name: str) -> bytes:
    if name not in files:
        raise ValidationFailed(f"{name}: missing; name a checkpoint that holds it")
    return files[name]


def _tensors(files: Files, name: str) -> dict[str, Tensor]:
    try:
        return load(_file(files, name))
    except SafetensorError as error:
        raise ValidationFailed(f"{name}: not a whole safetensors file ({error}); the checkpoint is damaged") from error


def _parse(kind: type[_Parsed], files: Files, name: str) -> _Parsed:
    try:
        return kind.model_validate_json(_file(files, name))
    except ValidationError as error:
        raise ValidationFailed(f"{name}: {error.error_count()} faults ({error.errors()[0]['msg']}); the checkpoint is damaged") from error
