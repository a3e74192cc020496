"""Facts about the base models of a configuration, from processes that resolve them. Imports no engine and no PyTorch."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tinsmith.config import ConfigError, ModelConfig
from tinsmith.protocol.sessions import BaseModelInfo

_log = logging.getLogger(__name__)

_RESOLVING = "tinsmith.deployments.resolving"
WARNING = "warning: "  # begins a line of the resolving process's stderr that is passed on
EXIT_NO_SOURCE = 2  # of the resolving process: its last line says why, and the remedy
_FAKE_VOCAB = 49_152
_FAKE_CONTEXT = 2_048
_FAKE_EOS = 2


class ServedModel(BaseModel):
    """`dtype` is decided once, so that trainers and samplers compute alike."""

    model_config = ConfigDict(frozen=True)

    info: BaseModelInfo
    dtype: Literal["fp32", "bf16"]


def resolve_models(models: Sequence[ModelConfig]) -> dict[str, ServedModel]:
    """Facts by name. Downloads and converts what is not in the cache. Raises ConfigError with a line for each model that fails."""
    found: dict[str, ServedModel] = {}
    faults: list[str] = []
    with ThreadPoolExecutor(max_workers=len(models)) as threads:
        for index, (model, task) in enumerate([(model, threads.submit(_resolve_model, model)) for model in models]):
            try:
                found[model.name] = _limited(model, task.result())
            except ConfigError as error:
                faults.extend(f"models.{index}.{line}" for line in error.faults)
    if faults:
        raise ConfigError(faults)
    return found


def fetch(name: str, source: str) -> BaseModelInfo:
    """Resolve into the cache. Raises ConfigError."""
    return _run_resolving(name, "--source", source).info


def weightless(name: str) -> ServedModel:
    """A model for fake engines: SmolLM2's sizes, no files."""
    info = BaseModelInfo(name=name, path="", max_context=_FAKE_CONTEXT, vocab_size=_FAKE_VOCAB, eos_token_ids=(_FAKE_EOS,))
    return ServedModel(info=info, dtype="fp32")


def device_of(num_gpus: float) -> str:
    return "cuda" if num_gpus > 0 else "cpu"


def _resolve_model(model: ModelConfig) -> ServedModel:
    if model.is_fake:
        return weightless(model.name)
    source = [] if model.source is None else ["--source", model.source]
    device = device_of(min(model.trainer.num_gpus, model.sampler.num_gpus))  # the slower of the two decides
    return _run_resolving(model.name, *source, "--dtype", model.dtype, "--device", device)


def _run_resolving(name: str, *options: str) -> ServedModel:
    command = [sys.executable, "-m", _RESOLVING, *options, "--", name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if process.returncode == 0:
        for line in process.stderr.splitlines():
            if line.startswith(WARNING):
                _log.warning("%s", line.removeprefix(WARNING))
        return ServedModel.model_validate_json(process.stdout.splitlines()[-1])
    said = (process.stderr.strip().splitlines() or ["no message"])[-1][:300]
    raise ConfigError(
        [f"source: {said}" if process.returncode == EXIT_NO_SOURCE else f"source: reading {name} failed ({said}); mend the model"]
    )


def _limited(model: ModelConfig, served: ServedModel) -> ServedModel:
    limit = served.info.max_context
    if model.max_context is None:
        return served
    if model.max_context > limit:
        raise ConfigError([f"max_context: {model.max_context} is above the model's own limit; use {limit} or less"])
    return served.model_copy(update={"info": served.info.model_copy(update={"max_context": model.max_context})})
