"""The training engine: PyTorch, one frozen base model in memory, many LoRA adapters on it, on a CPU or one GPU.

`run` is the main path: read and check a command, run its micro-batches, and only then add its gradient to the adapter. A command's result
depends on the command and the adapter alone: not on what else runs, and in float32 with one thread it repeats bit for bit.

Dimensions: B sequences of a micro-batch, T padded length, M its real tokens, D hidden size, P parameters of an adapter.
"""

import math
import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tinsmith.engines import batch, snapshot, unembed
from tinsmith.engines.base import Answer, Contents, Files, Job
from tinsmith.engines.batch import Example
from tinsmith.engines.lora import ActiveAdapter, Adapter, Layout, LoraLinear, install
from tinsmith.engines.losses import LOSSES, LossTerm
from tinsmith.protocol.errors import InternalError, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.tensors import Tensor as WireTensor
from tinsmith.protocol.training import Compute, ComputeOutput, LoraConfig, OptimOutput, OptimStep

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
        self._limits = batch.Limits(info.vocab_size, info.max_context)
        self._adapters: dict[str, Adapter] = {}
        self._active = ActiveAdapter(self._device)
        model = AutoModelForCausalLM.from_pretrained(info.path, dtype=self._dtype, attn_implementation="sdpa").to(self._device)
        model.requires_grad_(False).eval()
        self._decoder: nn.Module = model.get_decoder()
        reference = _reference_logits(model, self._device)
        self._sites = install(model, model.get_output_embeddings(), self._active)
        self._unembed: LoraLinear = model.get_output_embeddings()
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
            adapter = self._adapter(job.model_id)
            if isinstance(job.command, OptimStep):
                norm = adapter.step(job.command.adam)
                return OptimOutput({} if norm is None else {"unclipped_grad_l2:mean": norm})
            return self._compute(adapter, job.command)
        except TinsmithError as refusal:
            return refusal

    def _compute(self, adapter: Adapter, command: Compute) -> ComputeOutput:
        """forward or forward_backward. Raises ValidationFailed or InputTokensExceeded with the adapter unchanged."""
        config = batch.read_config(command)
        examples = batch.read_examples(command, self._limits)
        loss = LOSSES[command.loss_fn]

        def checked_loss(example: Example, logprobs: Tensor) -> LossTerm:
            term = loss(logprobs, example.inputs, config)
            if not (math.isfinite(term.value) and bool(torch.isfinite(term.grad).all())):
                raise ValidationFailed(f"datum {examples.index(example)}: {command.loss_fn}: the loss or its gradient is not finite")
            return term

        grad_P = torch.zeros(adapter.layout.size, device=self._device) if command.backward else None
        logprobs: dict[int, Tensor] = {}
        values: dict[int, float] = {}
        with self._active.use(adapter, grad_P):
            for positions in batch.plan([len(example) for example in examples], self._micro_batch_tokens):
                scores = self._pass([examples[position] for position in positions], checked_loss, backward=command.backward)
                logprobs |= zip(positions, scores.logprobs, strict=True)
                values |= zip(positions, (term.value for term in scores.terms), strict=True)
        if grad_P is not None:
            adapter.accumulate(grad_P)
        total = math.fsum(values.values())  # exact, so the order of micro-batches cannot show
        return ComputeOutput(tuple(_to_wire(logprobs[position]) for position in range(len(examples))), {"loss:sum": total})

    def _pass(self, examples: Sequence[Example], loss: unembed.LossOf, *, backward: bool) -> unembed.Scores:
        """One micro-batch: hidden states, log-probs and loss, and with `backward` the gradients into the active buffers."""
        tokens_BT, mask_BT = (tensor.to(self._device) for tensor in batch.pad(examples))
        with torch.set_grad_enabled(backward):
            hidden_BTD: Tensor = self._decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
        scores = unembed.score(self._unembed, hidden_BTD.detach()[mask_BT], examples, loss, backward=backward)
        if scores.d_hidden_MD is not None and hidden_BTD.requires_grad:
            d_hidden_BTD = torch.zeros_like(hidden_BTD)
            d_hidden_BTD[mask_BT] = scores.d_hidden_MD
            hidden_BTD.backward(d_hidden_BTD)  # type: ignore[no-untyped-call]
        return scores

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise NotFound(f"model {model_id} is not resident in this engine")
        return self._adapters[model_id]

    def _claim_slot(self, model_id: str) -> None:
        if model_id not in self._adapters and len(self._adapters) >= self._capacity:
            raise InternalError(f"all {self._capacity} adapter slots are taken; drop one first")

    def _restored(self, lora: LoraConfig, layout: Layout, state: snapshot.State, *, unspent: bool) -> Adapter:
        moments = state.moments
        if moments:
            moments.exp_avg_P, moments.exp_avg_sq_P = moments.exp_avg_P.to(self._device), moments.exp_avg_sq_P.to(self._device)
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


def _to_wire(logprobs: Tensor) -> WireTensor:
    return WireTensor(DType.FLOAT32, tuple(logprobs.shape), logprobs.contiguous().numpy().tobytes())


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
