"""LoRA adapters of the sampler: read from the files of a PEFT folder, kept by key, applied row by row.

Each linear layer that an adapter may target is wrapped once. A step names, for each adapter in the batch, its rows; the wrapped layers add
scale * B A x to those rows and nothing to the others. Rows of one adapter are computed together; a group of fewer than `MIN_ROWS` rows
is filled up, for the same reason as in `sampler_cache`.

Shapes: N rows, Q tokens a row, I inputs and O outputs of a layer, R rank; A [R, I], B [O, R].
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn
from torch.nn import functional

from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL, Files
from tinsmith.engines.lora import add_delta
from tinsmith.engines.sampler_cache import MIN_ROWS
from tinsmith.protocol.errors import NotFound, StateContention, ValidationFailed
from tinsmith.protocol.training import MAX_LORA_RANK

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class _PeftConfig(BaseModel):
    """What of an adapter_config.json bears on the result. Everything that this sampler would not honour must be off."""

    model_config = ConfigDict(extra="ignore")

    peft_type: str
    r: int = Field(ge=1, le=MAX_LORA_RANK)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: list[str] = Field(min_length=1)
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None

    def fault(self) -> str | None:
        if self.peft_type != "LORA":
            return f"peft_type is {self.peft_type!r}, not LORA"
        if self.bias != "none" or self.lora_bias or self.use_rslora or self.use_dora:
            return "biases, rsLoRA and DoRA are not supported"
        if self.rank_pattern or self.alpha_pattern or self.modules_to_save or self.layers_to_transform is not None:
            return "rank_pattern, alpha_pattern, modules_to_save and layers_to_transform are not supported"
        unknown = sorted({name.rsplit(".", 1)[-1] for name in self.target_modules} - set(TARGETS))
        return f"target_modules {unknown} are not among {list(TARGETS)}" if unknown else None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights by the path of the layer, float32 whatever the base model's dtype; scale = lora_alpha / r."""

    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one adapter in a batch. `rows` [N'] is filled up to MIN_ROWS by repeats, `num_rows` counts the real ones; None: every row."""

    adapter: Adapter
    rows: Tensor | None = None
    num_rows: int = 0

    @classmethod
    def of(cls, adapter: Adapter, rows: Sequence[int], batch_rows: int, device: torch.device) -> "RowGroup":
        if len(rows) == batch_rows:
            return cls(adapter)
        filled = [*rows, *[rows[0]] * (MIN_ROWS - len(rows))]
        return cls(adapter, torch.tensor(filled, device=device), len(rows))


@dataclass(slots=True)
class Routes:
    """Which adapters the step that runs applies to which rows; shared by all wrapped layers."""

    groups: Sequence[RowGroup] = field(default=())


class AdapterLinear(nn.Module):
    """A frozen linear layer plus the deltas of the adapters in the batch."""

    def __init__(self, path: str, base: nn.Linear, routes: Routes) -> None:
        super().__init__()
        self.path = path
        self.base = base
        self._routes = routes

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [N, Q, I] -> [N, Q, O]."""
        out: Tensor = self.base(x)
        for group in self._routes.groups:
            pair = group.adapter.pairs.get(self.path)
            if pair is None:
                continue
            if group.rows is None:
                out = _with_delta(out, x, pair, group.adapter.scale)
            else:
                changed = _with_delta(out[group.rows], x[group.rows], pair, group.adapter.scale)
                out[group.rows[: group.num_rows]] = changed[: group.num_rows]
        return out


def _with_delta(out: Tensor, x: Tensor, pair: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """out + scale * (x A^T) B^T, in place, rounded as the trainer rounds it."""
    down, up = pair
    low_rank = functional.linear(x.flatten(0, -2).float(), down)
    return add_delta(out.flatten(0, -2), low_rank, up, scale).view_as(out)


def wrap(model: nn.Module, routes: Routes) -> dict[str, nn.Linear]:
    """Wrap every targetable layer of the model in place; answers the layers by path. A tied head is wrapped on the output side only."""
    layers = {path: layer for path, layer in model.named_modules() if path.rsplit(".", 1)[-1] in TARGETS and isinstance(layer, nn.Linear)}
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, AdapterLinear(path, layer, routes))
    return layers


def read_adapter(files: Files, layers: Mapping[str, nn.Linear], device: torch.device) -> Adapter:
    """Check a SAMPLER artifact against the base model and build the adapter. Raises ValidationFailed; nothing is kept then."""
    config = _read_config(files)
    tensors = _read_weights(files)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for path in _targeted(config, layers):
        layer = layers[path]
        down = _take(tensors, path, "A", (config.r, layer.in_features))
        up = _take(tensors, path, "B", (layer.out_features, config.r))
        pairs[path] = (down.to(device, torch.float32), up.to(device, torch.float32))
    if tensors:
        raise ValidationFailed(f"adapter: tensor {min(tensors)!r} belongs to no layer that target_modules and the base model name")
    return Adapter(config.lora_alpha / config.r, pairs)


def _read_config(files: Files) -> _PeftConfig:
    if ADAPTER_CONFIG not in files or ADAPTER_MODEL not in files:
        raise ValidationFailed(f"adapter: {ADAPTER_CONFIG} and {ADAPTER_MODEL} are both needed, got {sorted(files)}")
    try:
        config = _PeftConfig.model_validate(json.loads(files[ADAPTER_CONFIG]))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValidationFailed(f"adapter: {ADAPTER_CONFIG}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise ValidationFailed(f"adapter: {ADAPTER_CONFIG} is no JSON ({error})") from error
    fault = config.fault()
    if fault is not None:
        raise ValidationFailed(f"adapter: {fault}")
    return config


def _read_weights(files: Files) -> dict[str, Tensor]:
    try:
        return load_safetensors(bytes(files[ADAPTER_MODEL]))
    except SafetensorError as error:
        raise ValidationFailed(f"adapter: {ADAPTER_MODEL} cannot be read ({error})") from error


def _targeted(config: _PeftConfig, layers: Mapping[str, nn.Linear]) -> list[str]:
    """Paths of the layers that the config names, by the ends of their paths as PEFT matches them."""
    found = [path for path in layers if any(path == name or path.endswith(f".{name}") for name in config.target_modules)]
    for name in config.target_modules:
        if not any(path == name or path.endswith(f".{name}") for path in found):
            raise ValidationFailed(f"adapter: target module {name!r} is not in the base model")
    return found


def _take(tensors: dict[str, Tensor], path: str, half: str, shape: tuple[int, int]) -> Tensor:
    key = f"base_model.model.{path}.lora_{half}.weight"
    tensor = tensors.pop(key, None)
    if tensor is None:
        raise ValidationFailed(f"adapter: tensor {key!r} is missing")
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ValidationFailed(f"adapter: {key} is {tensor.dtype} {list(tensor.shape)}, the base model needs floats {list(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValidationFailed(f"adapter: {key} holds values that are not finite")
    return tensor


class AdapterShelf:
    """The adapters at hand, by key, at most `capacity`; the least recently used idle one makes room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._users: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        return key in self._adapters

    def put(self, key: str, adapter: Adapter) -> None:
        """Raises StateContention if every adapter is in use. A key that is there keeps its content: artifacts never change."""
        if key in self._adapters:
            self._adapters.move_to_end(key)
            return
        if len(self._adapters) >= self._capacity:
            self._evict()
        self._adapters[key] = adapter

    def use(self, key: str) -> Adapter:
        """Hold the adapter until `release`. Raises NotFound."""
        if key not in self._adapters:
            raise NotFound(f"adapter {key!r} is not loaded")
        self._adapters.move_to_end(key)
        self._users[key] += 1
        return self._adapters[key]

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]

    def _evict(self) -> None:
        idle = next((key for key in self._adapters if key not in self._users), None)
        if idle is None:
            raise StateContention(f"all {self._capacity} adapters of this sampler are in use; retry, or raise sampler.max_adapters")
        del self._adapters[idle]
