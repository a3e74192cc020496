"""The deterministic training engine, for tests of everything around an engine. It keeps every promise of the seam, without a model.

The rule that it stands on is described in `fake_model.py`; its twin for sampling is in `fake_sampler.py`.

Callers ask for faults as `fake_faults.py` says. Tests in the same process pass `before`, and wait or raise there.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tinsmith.engines import fake_passes
from tinsmith.engines.base import Answer, Contents, Files, Job, check_optimizer
from tinsmith.engines.fake_faults import Fault, fault_in, suffer, suffer_seeded
from tinsmith.engines.fake_model import (
    DIMENSIONS,
    Adapter,
    Progress,
    Vector,
    adapter_of,
    files_of,
    step,
)
from tinsmith.protocol.errors import NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.training import (
    MAX_LORA_RANK,
    Compute,
    ComputeOutput,
    EngineCommand,
    LoraConfig,
    OptimOutput,
    OptimStep,
    TrainStep,
)

Before = Callable[[str, str], None]  # operation and subject: a model id, "<model id>/<seq>" of a job, an adapter's key, a ticket


class FakeTrainingEngine:
    """`TrainingEngine`. `calls` counts by operation; `ran` lists (model id, seq) of the jobs that took effect or answered."""

    def __init__(
        self,
        *,
        capacity: int = 16,
        vocab_size: int = 49152,
        max_context: int = 8192,
        max_rank: int = MAX_LORA_RANK,
        before: Before | None = None,
    ) -> None:
        self._capacity = capacity
        self._max_rank = max_rank
        self._limits = Limits(vocab_size, max_context)
        self._before = before
        self._adapters: dict[str, Adapter] = {}
        self.calls: Counter[str] = Counter()
        self.ran: list[tuple[str, int]] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def residents(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def weights(self, model_id: str) -> tuple[float, ...]:
        """b, for comparisons bit for bit."""
        return tuple(self._adapters[model_id].b)

    def history(self, model_id: str) -> str:
        return self._adapters[model_id].progress.history

    def create_adapter(self, model_id: str, lora: LoraConfig) -> None:
        self._enter("create_adapter", model_id)
        suffer_seeded("create_adapter", lora.seed)
        if lora.rank > self._max_rank:
            raise ValidationFailed(f"lora_config.rank: {lora.rank} is over this base model's {self._max_rank}; choose a smaller one")
        self._place(model_id, Adapter.fresh(lora))

    def drop_adapter(self, model_id: str) -> None:
        self._enter("drop_adapter", model_id)
        if model_id in self._adapters:
            suffer_seeded("drop_adapter", self._adapters[model_id].lora.seed)
            del self._adapters[model_id]

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        self.calls["run"] += 1
        return [self._run_one(job) for job in jobs]

    def capture(self, model_id: str, contents: Contents) -> Files:
        self._enter("capture", model_id)
        suffer_seeded("capture", self._adapters[model_id].lora.seed)
        return files_of(self._adapters[model_id], contents)

    def load(self, model_id: str, files: Files, *, optimizer: bool) -> None:
        self._enter("load", model_id)
        suffer_seeded("load", self._adapters[model_id].lora.seed)
        adapter, held = self._adapters[model_id], adapter_of(files, Contents.CHECKPOINT)
        if held.lora.rank != adapter.lora.rank:
            raise ValidationFailed(f"the checkpoint has rank {held.lora.rank}, the model {adapter.lora.rank}; load it into a new model")
        adapter.a, adapter.b = held.a, held.b
        adapter.m, adapter.g = held.m if optimizer else [0.0] * DIMENSIONS, [0.0] * DIMENSIONS
        kept = held.progress if optimizer else Progress()
        adapter.progress = Progress(steps=kept.steps, optimizer=kept.optimizer, history=adapter.progress.history)
        adapter.chain(f"load {held.progress.history} {optimizer}")

    def restore(self, model_id: str, lora: LoraConfig, files: Files) -> None:
        self._enter("restore", model_id)
        suffer_seeded("restore", lora.seed)
        self._adapters.pop(model_id, None)
        self._place(model_id, replace(adapter_of(files, Contents.SNAPSHOT), lora=lora))

    def ping(self) -> None:
        self._enter("ping", "")

    def _enter(self, operation: str, model_id: str) -> None:
        self.calls[operation] += 1
        if self._before is not None:
            self._before(operation, model_id)

    def _place(self, model_id: str, adapter: Adapter) -> None:
        if model_id in self._adapters:
            raise RuntimeError(f"adapter {model_id} is resident already")
        if len(self._adapters) >= self._capacity:
            raise RuntimeError(f"all {self._capacity} adapter slots are taken")
        self._adapters[model_id] = adapter

    def _run_one(self, job: Job) -> Answer:
        adapter = self._adapters.get(job.model_id)
        if adapter is None:
            return NotFound(f"model {job.model_id!r} is not there; its creation failed")
        self._enter(job.command.kind.value, f"{job.model_id}/{job.seq}")
        try:
            answer = self._answer(adapter, job.command)
        except TinsmithError as refusal:
            return refusal
        self.ran.append((job.model_id, job.seq))
        return answer

    def _answer(self, adapter: Adapter, command: EngineCommand) -> ComputeOutput | OptimOutput:
        """Raises a TinsmithError with nothing changed."""
        match command:
            case OptimStep():
                suffer_seeded("optim_step", adapter.lora.seed)
                return step(adapter, command)
            case Compute():
                return self._compute(adapter, command)
            case TrainStep():
                if not command.compute.backward:
                    raise ValidationFailed("train_step: its pass has no backward; send a forward_backward in it")
                check_optimizer(adapter.progress.optimizer, adapter.progress.steps, command.step.optimizer.type)
                return self._train(adapter, command)

    def _train(self, adapter: Adapter, command: TrainStep) -> ComputeOutput:
        """Pass and step, both or neither."""
        gradient, progress = list(adapter.g), adapter.progress.model_copy()
        output = self._compute(adapter, command.compute)
        try:
            return replace(output, metrics=output.metrics | step(adapter, command.step).metrics)
        except TinsmithError:
            adapter.g, adapter.progress = gradient, progress
            raise

    def _compute(self, adapter: Adapter, command: Compute) -> ComputeOutput:
        fake_passes.check(command, self._limits)
        fault, ms = fault_in(command.data)
        suffer(fault, ms)
        output, gradient = fake_passes.compute(adapter, command)
        if command.backward:
            _add(adapter, gradient, fault, ms)
            adapter.progress.accumulated += 1
            adapter.chain(f"forward_backward {[value.hex() for value in gradient]}")
        return output


def _add(adapter: Adapter, gradient: Vector, fault: Fault | None, ms: int) -> None:
    """Add to the adapter's gradient, in two halves so that a fault can fall between them."""
    half = DIMENSIONS // 2
    for index, value in enumerate(gradient[:half]):
        adapter.g[index] += value
    if fault is Fault.RAISE_HALFWAY:
        raise RuntimeError("injected fault: half of the effect is in the adapter")
    if fault is Fault.LATE:
        time.sleep(ms / 1000)
    for index, value in enumerate(gradient[half:], half):
        adapter.g[index] += value
