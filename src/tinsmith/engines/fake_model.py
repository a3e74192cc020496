"""The model behind the fake engines: its rule, what an adapter holds, how it lies in files.

The rule. An adapter is two vectors of D = 8 doubles: `a`, drawn from (seed, index), and `b`, which starts at 0. With x a target token, p
the input token at its row and s(z) the logistic function, its log-prob is

    l(x | p) = log s(b[x mod D] + ((7 p + x) mod 11) / 10 - 1)        dl/db[i] = a[i] (1 - s(...)) for i = x mod D

The losses are computed from l as for any model (`fake_passes.py`). optim_step: adamw m = beta1 m + g, b = b (1 - lr wd) - lr m; sgd
m = momentum m + g + wd b, b = b - lr m; then g = 0. A step without a gradient changes nothing. So the order of steps, and a command that
ran twice or never, show in b; `history`, a hash chained over every effective command, shows them bit for bit. A next token is drawn from
16 candidates that follow from the last one, by their l.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL, Contents, Files, check_optimizer
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.loss_checks import check_ids
from tinsmith.protocol.training import LoraConfig, OptimizerParams, OptimOutput, OptimStep, SgdParams

DIMENSIONS = 8
NUM_CANDIDATES = 16
OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "progress.json"
GRADIENT_FILE = "gradient.safetensors"

Vector = list[float]


class Progress(BaseModel):
    """What an adapter went through: optimizer steps and whose, commands in its unspent gradient, hash over all effective commands."""

    steps: int = 0
    optimizer: str = "adamw"
    accumulated: int = 0
    history: str = ""


@dataclass(slots=True)
class Adapter:
    """Weights a and b, momentum m, unspent gradient g."""

    lora: LoraConfig
    a: Vector
    b: Vector
    m: Vector = field(default_factory=lambda: [0.0] * DIMENSIONS)
    g: Vector = field(default_factory=lambda: [0.0] * DIMENSIONS)
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def fresh(cls, lora: LoraConfig) -> "Adapter":
        return cls(lora, [0.5 + fraction(f"{lora.seed}/{index}") for index in range(DIMENSIONS)], [0.0] * DIMENSIONS)

    def chain(self, what: str) -> None:
        self.progress.history = hashlib.sha256(f"{self.progress.history}|{what}".encode()).hexdigest()


def step(adapter: Adapter, command: OptimStep) -> OptimOutput:
    """One optimizer step by the module's rule. Raises ValidationFailed, with nothing changed, after steps of another optimizer and where
    the result would not be finite."""
    params, progress = command.optimizer, adapter.progress
    check_optimizer(progress.optimizer, progress.steps, params.type)
    if progress.accumulated == 0:
        return OptimOutput({})
    norm = math.sqrt(sum(value * value for value in adapter.g))
    clip = 1.0 if params.grad_clip_norm <= 0 or norm <= params.grad_clip_norm else params.grad_clip_norm / norm
    rate = params.learning_rate * (command.schedule.factor(progress.steps) if command.schedule else 1.0)
    m, b = _descended(adapter, params, [clip * g for g in adapter.g], rate)
    if not all(map(math.isfinite, (*m, *b))):
        raise ValidationFailed(f"learning_rate: a step of {rate:g} leaves weights that are not finite, the model is as it was; lower it")
    adapter.m, adapter.b = m, b
    adapter.g = [0.0] * DIMENSIONS
    progress.steps += 1
    progress.accumulated = 0
    progress.optimizer = params.type
    adapter.chain(f"optim_step {[value.hex() for value in adapter.b]}")
    scheduled = {"learning_rate:mean": rate} if command.schedule else {}
    return OptimOutput({"unclipped_grad_l2:mean": norm} | scheduled)


def _descended(adapter: Adapter, params: OptimizerParams, gradient: Vector, rate: float) -> tuple[Vector, Vector]:
    """m and b after the step."""
    if isinstance(params, SgdParams):
        decayed = [g + params.weight_decay * b for g, b in zip(gradient, adapter.b, strict=True)]
        new_m = [params.momentum * m + g for m, g in zip(adapter.m, decayed, strict=True)]
        return new_m, [b - rate * m for b, m in zip(adapter.b, new_m, strict=True)]
    new_m = [params.beta1 * m + g for m, g in zip(adapter.m, gradient, strict=True)]
    decay = 1 - rate * params.weight_decay
    return new_m, [b * decay - rate * m for b, m in zip(adapter.b, new_m, strict=True)]


def logprob(b: Vector, previous: int, target: int) -> float:
    """l(target | previous)."""
    z = b[target % DIMENSIONS] + ((7 * previous + target) % 11) / 10 - 1
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValidationFailed."""
    check_ids(name, min(tokens), max(tokens), vocab_size)


def files_of(adapter: Adapter, contents: Contents) -> dict[str, bytes]:
    """A capture; it shares nothing with the adapter."""
    config = {"peft_type": "LORA", "r": adapter.lora.rank, "lora": adapter.lora.model_dump()}
    files = {ADAPTER_CONFIG: json.dumps(config).encode(), ADAPTER_MODEL: _vectors(a=adapter.a, b=adapter.b)}
    if contents is Contents.SAMPLER:
        return files
    files[OPTIMIZER_FILE] = _vectors(m=adapter.m)
    kept = adapter.progress if contents is Contents.SNAPSHOT else adapter.progress.model_copy(update={"accumulated": 0})
    files[PROGRESS_FILE] = kept.model_dump_json().encode()
    if contents is Contents.SNAPSHOT:
        files[GRADIENT_FILE] = _vectors(g=adapter.g)
    return files


def adapter_of(files: Files, contents: Contents) -> Adapter:
    """The adapter that a capture holds. Raises ValidationFailed if anything is missing or malformed."""
    try:
        lora = LoraConfig.model_validate(json.loads(files[ADAPTER_CONFIG])["lora"])
        weights = load_tensors(files[ADAPTER_MODEL])
        adapter = Adapter(lora, _list(weights["a"]), _list(weights["b"]))
        if contents is not Contents.SAMPLER:
            adapter.m = _list(load_tensors(files[OPTIMIZER_FILE])["m"])
            adapter.progress = Progress.model_validate_json(files[PROGRESS_FILE])
        if contents is Contents.SNAPSHOT:
            adapter.g = _list(load_tensors(files[GRADIENT_FILE])["g"])
    except (KeyError, ValueError, ValidationError, SafetensorError) as error:
        raise ValidationFailed(f"the files are not a {contents.value} of this engine; load another checkpoint") from error
    return adapter


def _vectors(**vectors: Vector) -> bytes:
    return bytes(save_tensors({name: np.array(values, dtype="<f8") for name, values in vectors.items()}))


def _list(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Vector:
    if values.shape != (DIMENSIONS,):
        raise ValueError(f"shape {values.shape}")
    return [float(value) for value in values]


def candidates(b: Vector, previous: int, vocab_size: int) -> list[tuple[int, float]]:
    """(token, log-prob), best first; equal ones by token."""
    tokens = {(31 * previous + 17 * index + 5) % vocab_size for index in range(NUM_CANDIDATES)}
    return sorted(((token, logprob(b, previous, token)) for token in tokens), key=lambda pair: (-pair[1], pair[0]))


def draw(ranked: list[tuple[int, float]], seed: str) -> tuple[int, float]:
    """One of the candidates by its probability; the same for the same seed."""
    rest = fraction(seed) * sum(math.exp(value) for _, value in ranked)
    for pair in ranked:
        rest -= math.exp(pair[1])
        if rest < 0:
            return pair
    return ranked[-1]
