"""The training engine: PyTorch, one frozen base model in memory, many LoRA adapters on it, on a CPU or one GPU.

`run` is the main path: compute a command's pass (`passes.py`), and only then add its gradient to the adapter or step it. A command's result
depends on the command and the adapter alone: not on what else runs, and in float32 with one thread it repeats bit for bit.

Dimensions: T tokens, V vocabulary, P parameters of an adapter.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tinsmith.engines import passes, snapshot
from tinsmith.engines.base import Answer, Contents, Files, Job
from tinsmith.engines.lora import ActiveAdapter, Adapter, Layout, LoraLinear, Step, install
from tinsmith.engines.network import Network
from tinsmith.protocol.errors import InternalError, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import Compute, ComputeOutput, EngineCommand, LoraConfig, OptimOutput, OptimStep, TrainStep

_TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PROBE_GAIN = 1.3  # bf16 must win by this much; hardware with bf16 units wins by 2 and more, hardware without loses
_PROBE_REPEATS = 5


class UnsupportedBaseModel(Exception):
    """The base model computes something that this engine does not; the message names it."""


class PeftEngine:
    """Implements engines.base.TrainingEngine.

    `max_adapters` bounds the resident adapters; `micro_batch_tokens` the padded tokens of one pass; `threads` is torch's intra-op number
    (process-wide). dtype "auto" picks bf16 where a short probe finds it faster. Raises UnsupportedBaseModel.
    """

    def __init__(
        self,
        info: BaseModelInfo,
        dtype: Literal["auto", "fp32", "bf16"],
        max_adapters: int,
        micro_batch_tokens: int,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # "Loading weights" would be drawn over the server's log
        self._info = info
        self._device = torch.device(device)
        self._dtype = _probe_dtype(self._device) if dtype == "auto" else _TORCH_DTYPE[dtype]
        self._capacity = max_adapters
        self._micro_batch_tokens = micro_batch_tokens
        self._limits = Limits(info.vocab_size, info.max_context)
        self._adapters: dict[str, Adapter] = {}
        self._active = ActiveAdapter(self._device)
        model = AutoModelForCausalLM.from_pretrained(info.path, dtype=self._dtype, attn_implementation="sdpa").to(self._device)
        model.requires_grad_(False).eval()
        self._decoder: nn.Module = model.get_decoder()
        reference = _reference_logits(model, self._device)
        self._sites = install(model, model.get_output_embeddings(), self._active)
        self._unembed: LoraLinear = model.get_output_embeddings()
        self._network = Network(self._decoder, self._unembed, self._active, self._device)
        self._check_head(model.config.get_text_config(), reference)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """What the base model computes in."""
        return "fp32" if self._dtype is torch.float32 else "bf16"

    def create_adapter(self, model_id: str, lora: LoraConfig) -> None:
        """A fresh adapter, in place of any of that id. Raises ValidationFailed for a config that the base model cannot honour."""
        self._claim_slot(model_id)
        self._adapters[model_id] = Adapter.fresh(lora, Layout.of(self._sites, lora), self._device)

    def drop_adapter(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        return [self._answer(job) for job in jobs]

    def capture(self, model_id: str, contents: Contents) -> Files:
        """Raises NotFound for a model that is not resident."""
        return snapshot.capture(self._adapter(model_id), contents, self._info.name)

    def load(self, model_id: str, files: Files, *, optimizer: bool) -> None:
        """Replace weights and, with `optimizer`, moments; a gradient that has been accumulated belongs to the old weights and goes."""
        adapter = self._adapter(model_id)
        state = snapshot.read(files, adapter.layout, optimizer=optimizer)
        self._adapters[model_id] = self._restored(adapter.lora, adapter.layout, state, unspent=False)

    def restore(self, model_id: str, lora: LoraConfig, files: Files) -> None:
        self._claim_slot(model_id)
        layout = Layout.of(self._sites, lora)
        self._adapters[model_id] = self._restored(lora, layout, snapshot.read(files, layout, optimizer=True), unspent=True)

    def ping(self) -> None:
        """A small computation on the device; on a GPU on a stream of its own, so that it does not queue behind a running command."""
        if self._device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                total = float(torch.ones(8, device=self._device).sum())
        else:
            total = float(torch.ones(8).sum())
        if total != 8.0:
            raise InternalError(f"the device computes 8 x 1 = {total}")

    def _answer(self, job: Job) -> Answer:
        try:
            return self._run_one(self._adapter(job.model_id), job.command)
        except TinsmithError as refusal:
            return refusal

    def _run_one(self, adapter: Adapter, command: EngineCommand) -> ComputeOutput | OptimOutput:
        """Raises a TinsmithError with nothing of the adapter changed, but for the gradient that `Adapter.step` clears."""
        match command:
            case Compute():
                output, grad_P = self._compute(adapter, command)
                if grad_P is not None:
                    adapter.accumulate(grad_P)
                return output
            case TrainStep():
                return self._train(adapter, command)
            case OptimStep():
                return OptimOutput(_metrics(adapter.step(command.optimizer, command.schedule), command))

    def _train(self, adapter: Adapter, command: TrainStep) -> ComputeOutput:
        adapter.check_optimizer(command.step.optimizer)  # a refusal should not cost a pass
        output, grad_P = self._compute(adapter, command.compute)
        if grad_P is None:
            raise ValidationFailed("train_step: its pass has no backward; send a forward_backward in it")
        step = adapter.train(grad_P, command.step.optimizer, command.step.schedule)
        return replace(output, metrics=output.metrics | _metrics(step, command.step))

    def _compute(self, adapter: Adapter, command: Compute) -> tuple[ComputeOutput, Tensor | None]:
        return passes.compute(self._network, adapter, command, self._limits, self._micro_batch_tokens)

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise NotFound(f"model {model_id} is not resident in this engine")
        return self._adapters[model_id]

    def _claim_slot(self, model_id: str) -> None:
        if model_id not in self._adapters and len(self._adapters) >= self._capacity:
            raise InternalError(f"all {self._capacity} adapter slots are taken; drop one first")

    def _restored(self, lora: LoraConfig, layout: Layout, state: snapshot.State, *, unspent: bool) -> Adapter:
        moments = None if state.moments is None else state.moments.to(self._device)
        grad_P = state.grad_P.to(self._device) if unspent and state.grad_P is not None else None
        return Adapter(lora, layout, state.weights_P.to(self._device), moments, grad_P)

    def _check_head(self, config: object, reference_TV: Tensor) -> None:
        """Refuse models whose logits are more than a linear layer's output (soft caps, scaling): they would train on other numbers."""
        with torch.no_grad():
            hidden = self._decoder(input_ids=_probe_tokens(self._device), use_cache=False).last_hidden_state
            logits_TV = self._unembed(hidden)[0]
        if not torch.allclose(logits_TV.float(), reference_TV.float(), rtol=1e-2, atol=1e-2):
            raise UnsupportedBaseModel(f"{self._info.name}: the model changes its logits after the output layer, which is not supported")
        for attribute in ("num_experts", "num_local_experts", "n_routed_experts"):
            if getattr(config, attribute, None):
                raise UnsupportedBaseModel(f"{self._info.name}: mixtures of experts are not supported")


def _metrics(step: Step | None, command: OptimStep) -> dict[str, float]:
    """Of a step: the norm before clipping and, where a schedule sets it, the learning rate. Empty where there was nothing to step on."""
    if step is None:
        return {}
    scheduled = {} if command.schedule is None else {"learning_rate:mean": step.learning_rate}
    return {"unclipped_grad_l2:mean": step.grad_norm} | scheduled


def _probe_tokens(device: torch.device) -> Tensor:
    return torch.arange(8, device=device)[None]


def _reference_logits(model: nn.Module, device: torch.device) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=_probe_tokens(device), use_cache=False).logits[0]
        return logits


def fastest_dtype(device: str) -> Literal["fp32", "bf16"]:
    """What dtype "auto" picks on a device ("cpu" or "cuda"), for callers that must tell several processes the same."""
    return "bf16" if _probe_dtype(torch.device(device)) is torch.bfloat16 else "fp32"


def _probe_dtype(device: torch.device) -> torch.dtype:
    """bf16 where it multiplies matrices clearly faster than float32; replicas on the same hardware agree."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    is_faster = _best_time_s(torch.float32) > _PROBE_GAIN * _best_time_s(torch.bfloat16)
    return torch.bfloat16 if is_faster else torch.float32


def _best_time_s(dtype: torch.dtype) -> float:
    """The shortest of several runs: load from elsewhere only ever lengthens one."""
    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    times_s = []
    for _ in range(_PROBE_REPEATS):
        start_s = time.perf_counter()
        torch.mm(left, right)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
