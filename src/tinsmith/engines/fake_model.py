"""The model behind the fake engines: its rule, what an adapter holds, how it lies in files, what a command must satisfy.

The rule. An adapter is two vectors of D = 8 doubles: `a`, drawn from (seed, index), and `b`, which starts at 0. With x a target token, p
the input token at its row and s(z) the logistic function, its log-prob is

    l(x | p) = log s(b[x mod D] + ((7 p + x) mod 11) / 10 - 1)        dl/db[i] = a[i] (1 - s(...)) for i = x mod D

The losses are computed from l as for any model. optim_step: m = beta1 m + g; b = b (1 - lr wd) - lr m; g = 0. A step without a gradient
changes nothing. So the order of steps, and a command that ran twice or never, show in b; `history`, a hash chained over every
effective command, shows them bit for bit. A next token is drawn from 16 candidates that follow from the last one, by their l.
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

from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL, Contents, Files
from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.losses import LOSSES, LossInput
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values
from tinsmith.protocol.training import AdamParams, Compute, LoraConfig, OptimOutput

DIMENSIONS = 8
NUM_CANDIDATES = 16
OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "progress.json"
GRADIENT_FILE = "gradient.safetensors"

Vector = list[float]


class Progress(BaseModel):
    """What an adapter went through: optimizer steps, commands in its unspent gradient, hash over all effective commands."""

    steps: int = 0
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


def step(adapter: Adapter, adam: AdamParams) -> OptimOutput:
    """One optimizer step by the module's rule."""
    if adapter.progress.accumulated == 0:
        return OptimOutput({})
    norm = math.sqrt(sum(value * value for value in adapter.g))
    clip = 1.0 if adam.grad_clip_norm == 0 or norm <= adam.grad_clip_norm else adam.grad_clip_norm / norm
    adapter.m = [adam.beta1 * m + clip * g for m, g in zip(adapter.m, adapter.g, strict=True)]
    decay = 1 - adam.learning_rate * adam.weight_decay
    adapter.b = [b * decay - adam.learning_rate * m for b, m in zip(adapter.b, adapter.m, strict=True)]
    adapter.g = [0.0] * DIMENSIONS
    adapter.progress.steps += 1
    adapter.progress.accumulated = 0
    adapter.chain(f"optim_step {[value.hex() for value in adapter.b]}")
    return OptimOutput({"unclipped_grad_l2:mean": norm})


@dataclass(frozen=True, slots=True)
class Rows:
    """Targets of one datum, flattened: [N * K], with the position of each in N."""

    shape: tuple[int, ...]
    targets: list[int]
    values: list[float]  # log-probs
    inputs: dict[str, list[float]]  # broadcast to the targets

    @classmethod
    def of(cls, datum: Datum, b: Vector) -> "Rows":
        wire = datum.loss_fn_inputs["target_tokens"]
        targets = [int(value) for value in _dense(wire)]
        width = 1 if len(wire.shape) == 1 else wire.shape[1]
        tokens = datum.model_input.tokens
        values = [logprob(b, tokens[index // width], target) for index, target in enumerate(targets)]
        inputs = {name: _dense(tensor) for name, tensor in datum.loss_fn_inputs.items() if name != "target_tokens"}
        return cls(wire.shape, targets, values, inputs)

    def accumulate(self, loss_fn: str, a: Vector, gradient: Vector) -> float:
        """Add dL/db to `gradient`; answers L, a plain sum."""
        total = 0.0
        weights = self.inputs.get("weights", [1.0] * len(self.targets))
        for index, (target, value, weight) in enumerate(zip(self.targets, self.values, weights, strict=True)):
            if loss_fn == "cross_entropy":
                loss = -weight * value
                slope = -weight
            else:
                factor = weight * self.inputs["advantages"][index]
                loss = slope = 0.0 if factor == 0 else -factor * _ratio(value, self.inputs["logprobs"][index])
            total += loss
            gradient[target % DIMENSIONS] += slope * a[target % DIMENSIONS] * -math.expm1(value)
        return total

    def logprobs(self) -> Tensor:
        return Tensor(DType.FLOAT32, self.shape, np.array(self.values, dtype="<f4").tobytes())


def logprob(b: Vector, previous: int, target: int) -> float:
    """l(target | previous)."""
    z = b[target % DIMENSIONS] + ((7 * previous + target) % 11) / 10 - 1
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def _ratio(value: float, sampled: float) -> float:
    try:
        return math.exp(value - sampled)
    except OverflowError as error:
        raise ValidationFailed("logprobs: the loss is not finite; send the log-probs that the tokens were sampled with") from error


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _dense(tensor: Tensor) -> list[float]:
    """All elements, row by row; ints stay exact."""
    values = list(float32_values(tensor.data) if tensor.dtype is DType.FLOAT32 else int64_values(tensor.data))
    if tensor.csr is None:
        return values
    rows, columns = tensor.shape
    crow, col = int64_values(tensor.csr.crow), int64_values(tensor.csr.col)
    dense: list[float] = [0] * (rows * columns)
    for row in range(rows):
        for index in range(crow[row], crow[row + 1]):
            dense[row * columns + col[index]] += values[index]
    return dense


def check_datum(where: str, datum: Datum, loss_fn: str, vocab_size: int, max_context: int) -> None:
    """Raises ValidationFailed, InputTokensExceeded. `where` names the datum; `loss_fn` is known (`check_config`)."""
    spec = LOSSES[loss_fn]
    if not 1 <= len(datum.model_input) <= max_context:
        raise InputTokensExceeded(f"{where}: {len(datum.model_input)} tokens; send 1 to {max_context}")
    check_tokens(f"{where}.model_input", datum.model_input.tokens, vocab_size)
    inputs = datum.loss_fn_inputs
    missing = sorted(name for name, wanted in spec.inputs.items() if wanted.required and name not in inputs)
    unknown = sorted(set(inputs) - set(spec.inputs))
    if missing or unknown:
        raise ValidationFailed(f"{where}.loss_fn_inputs: missing {missing}, unknown {unknown}; {loss_fn} takes {sorted(spec.inputs)}")
    for name, tensor in inputs.items():
        _check_input(f"{where}.{name}", tensor, spec.inputs[name], len(datum.model_input))
    targets = inputs["target_tokens"]
    check_tokens(f"{where}.target_tokens", [int(value) for value in _dense(targets)], vocab_size)
    if any(tensor.shape != targets.shape for tensor in inputs.values()):
        raise ValidationFailed(f"{where}: every input must have the shape of target_tokens, {list(targets.shape)}")


def _check_input(name: str, tensor: Tensor, wanted: LossInput, num_tokens: int) -> None:
    tensor.check(name)
    if wanted.dtype is DType.INT64 and tensor.dtype is not DType.INT64:
        raise ValidationFailed(f"{name}: float32 where int64 is needed")
    if len(tensor.shape) not in wanted.ranks or tensor.shape[0] != num_tokens or 0 in tensor.shape:
        raise ValidationFailed(f"{name}: shape {list(tensor.shape)}; send {num_tokens} rows, one a token, and a rank of {wanted.ranks}")
    if not all(map(math.isfinite, _dense(tensor))):
        raise ValidationFailed(f"{name}: every value must be finite")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValidationFailed."""
    if any(not 0 <= token < vocab_size for token in tokens):
        raise ValidationFailed(f"{name}: token ids must lie in [0, {vocab_size})")


def check_config(command: Compute) -> None:
    """Raises ValidationFailed for an unknown loss or an unknown key of its config."""
    if command.loss_fn not in LOSSES:
        raise ValidationFailed(f"loss_fn: {command.loss_fn[:40]!r} is unknown; use one of {', '.join(sorted(LOSSES))}")
    known = LOSSES[command.loss_fn].config
    unknown = sorted(set(command.loss_fn_config) - set(known))
    if unknown:
        raise ValidationFailed(f"loss_fn_config: unknown {unknown}; {command.loss_fn} takes {sorted(known)}")


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
