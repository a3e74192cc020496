"""A base model and a LoRA adapter as one model: the folder that transformers and inference engines read, without PEFT.

    W' = W + (alpha / r) B A      per trained matrix, in float32, then in the dtype of W

Works on safetensors files, one shard in memory at a time; builds no model, so it needs neither the model's code nor a GPU. A head that
shares its matrix with the input embedding gets a matrix of its own: what was trained acts on the output alone.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL, Files
from tinsmith.protocol.errors import ValidationFailed

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
_PREFIX = "base_model.model."
_COPIED = {".jinja", ".json", ".model", ".txt"}


class _AdapterConfig(BaseModel):
    """What decides how the factors are added. Forms that this server does not write are refused."""

    model_config = ConfigDict(extra="ignore")

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.use_rslora or self.use_dora or self.fan_in_fan_out)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors by the name of the matrix's module: A [R, I] and B [O, R]. `scale`: alpha / r."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    def merged(self, module: str, W_OI: Tensor) -> Tensor:
        """Raises ValidationFailed where the factors are those of another matrix."""
        A_RI, B_OR = self.factors[module]
        if (B_OR.shape[0], A_RI.shape[1]) != tuple(W_OI.shape) or A_RI.shape[0] != B_OR.shape[1]:
            raise ValidationFailed(f"{module}: the adapter does not fit the base's {list(W_OI.shape)}; name the model it was trained on")
        return (W_OI.float() + self.scale * (B_OR.float() @ A_RI.float())).to(W_OI.dtype)


def read_adapter(files: Files) -> Adapter:
    """Raises ValidationFailed for files that are missing, damaged, or of another form than this server's."""
    try:
        config = _AdapterConfig.model_validate_json(files[ADAPTER_CONFIG])
        tensors = load(files[ADAPTER_MODEL])
    except KeyError as error:
        raise ValidationFailed(f"{error}: missing; name a folder with {ADAPTER_CONFIG} and {ADAPTER_MODEL}") from error
    except (ValidationError, SafetensorError) as error:
        raise ValidationFailed(f"the adapter cannot be read ({type(error).__name__}); export it again") from error
    if not config.is_plain or config.r < 1:
        raise ValidationFailed(f"{ADAPTER_CONFIG}: only plain LoRA can be merged; merge it with PEFT")
    factors = {}
    for name in sorted(tensors):
        module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        if part == "A.weight":
            factors[module] = (tensors[name], tensors.get(f"{_PREFIX}{module}.lora_B.weight"))
    pairs = {module: (A_RI, B_OR) for module, (A_RI, B_OR) in factors.items() if B_OR is not None}
    if 2 * len(pairs) != len(tensors):
        raise ValidationFailed(f"{ADAPTER_MODEL}: holds more than pairs of lora_A and lora_B; merge it with PEFT")
    return Adapter(pairs, config.lora_alpha / config.r)


def merge(base: Path, files: Files, target: Path) -> list[str]:
    """Write the merged model into the new folder `target`; answers what its user should know of it.

    Raises ValidationFailed for an adapter that does not fit, FileExistsError, OSError; `target` is then not there, or not touched.
    """
    adapter = read_adapter(files)
    target.mkdir(parents=True)
    try:
        return _merge(base, adapter, target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _merge(base: Path, adapter: Adapter, target: Path) -> list[str]:
    places = {name: shard for shard in _shards(base) for name in _names(base / shard)}
    is_untied = HEAD in adapter.factors and _weight(HEAD) not in places and _weight(EMBEDDING) in places
    if is_untied:
        places[_weight(HEAD)] = places[_weight(EMBEDDING)]
    missing = sorted(module for module in adapter.factors if _weight(module) not in places)
    if missing:
        raise ValidationFailed(f"{missing[0]}: the base model has no such matrix; name the model that the adapter was trained on")
    for path in sorted(base.iterdir()):
        if path.suffix in _COPIED and path.name != INDEX:
            shutil.copyfile(path, target / path.name)
    for shard in sorted(set(places.values())):
        save_file(dict(_merged_shard(base / shard, adapter, is_untied=is_untied)), target / shard, metadata={"format": "pt"})
    if len(set(places.values())) > 1:
        _write_index(target, places)
    if not is_untied:
        return []
    _untie(target / "config.json")
    return [_UNTIED]


def _merged_shard(path: Path, adapter: Adapter, *, is_untied: bool) -> Iterator[tuple[str, Tensor]]:
    """A head that was tied lies beside the embedding that it was tied to."""
    with safe_open(path, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - no mapping
            module, tensor = name.removesuffix(".weight"), shard.get_tensor(name)
            yield name, adapter.merged(module, tensor) if module in adapter.factors else tensor
            if is_untied and module == EMBEDDING:
                yield _weight(HEAD), adapter.merged(HEAD, tensor)


def _untie(config: Path) -> None:
    settings = json.loads(config.read_bytes())
    config.write_text(json.dumps(settings | {"tie_word_embeddings": False}, indent=2) + "\n")


def _weight(module: str) -> str:
    return f"{module}.weight"


def _write_index(target: Path, places: Mapping[str, str]) -> None:
    size = sum(_num_bytes(target / shard) for shard in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(base: Path) -> list[str]:
    """File names. Raises ValidationFailed for a folder without safetensors."""
    if (base / INDEX).is_file():
        return sorted(set(json.loads((base / INDEX).read_bytes())["weight_map"].values()))
    if (base / WHOLE).is_file():
        return [WHOLE]
    raise ValidationFailed(f"{base} holds no {WHOLE} and no {INDEX}; name a folder of safetensors")


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as shard:
        return list(shard.keys())


def _num_bytes(path: Path) -> int:
    """Of the tensors in a file, without its header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


_UNTIED = (
    "the adapter trains lm_head, which this model shares with its input embedding: the merged model has a head of its own "
    "(tie_word_embeddings: false), and is larger by that matrix; folding it into the embedding would change inputs too"
)
