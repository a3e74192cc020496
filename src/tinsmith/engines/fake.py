"""Deterministic engines without a model, for tests of everything around an engine. They keep every promise of the seam.

The model that they stand on is described in `fake_model.py`.

Callers ask for faults as `fake_faults.py` says. Tests in the same process pass `before`, and wait or raise there.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tinsmith.engines import fake_passes
from tinsmith.engines.base import Answer, Contents, Drawn, Files, Job, Ticket, check_optimizer
from tinsmith.engines.fake_faults import Fault, before_any_effect, fault_in, fault_of, suffer, suffer_seeded
from tinsmith.engines.fake_model import (
    DIMENSIONS,
    Adapter,
    Progress,
    Vector,
    adapter_of,
    candidates,
    check_tokens,
    draw,
    files_of,
    logprob,
    step,
)
from tinsmith.protocol.errors import InputTokensExceeded, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, StopReason
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


@dataclass(slots=True)
class _Request:
    """A sample under way: one list of tokens and log-probs a row. `limit`: tokens a row may have. `reported`: tokens a row, of a watched
    request."""

    sample: Sample
    b: Vector
    limit: int
    rows: list[SampledSequence]
    open_rows: list[int]
    has_suffered: bool = False
    reported: list[int] | None = None


class FakeSamplingEngine:
    """`SamplingEngine`. Strings in `stop` never match, since there is no tokenizer; a stop token is part of its sequence."""

    def __init__(
        self,
        *,
        max_rows: int = 32,
        max_adapters: int = 32,
        vocab_size: int = 49152,
        max_context: int = 8192,
        eos_token_ids: tuple[int, ...] = (),
        before: Before | None = None,
    ) -> None:
        self._max_rows = max_rows
        self._max_adapters = max_adapters
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._eos = frozenset(eos_token_ids)
        self._before = before
        self._adapters: OrderedDict[str, Vector] = OrderedDict()
        self._requests: dict[Ticket, _Request] = {}
        self.calls: Counter[str] = Counter()

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def has_adapter(self, key: str) -> bool:
        return key in self._adapters

    def load_adapter(self, key: str, files: Files) -> None:
        self._enter("load_adapter", key)
        adapter = adapter_of(files, Contents.SAMPLER)
        suffer_seeded("load_adapter", adapter.lora.seed)
        self._adapters[key] = adapter.b
        self._adapters.move_to_end(key)
        in_use = {request.sample.adapter for request in self._requests.values()} | {key}
        idle = [held for held in self._adapters if held not in in_use]
        for held in idle[: max(len(self._adapters) - self._max_adapters, 0)]:
            del self._adapters[held]

    def add(self, ticket: Ticket, sample: Sample) -> None:
        self._enter("add", ticket)
        tokens = sample.prompt.tokens
        if not 1 <= len(tokens) <= self._max_context:
            raise InputTokensExceeded(f"prompt: {len(tokens)} tokens; send 1 to {self._max_context}")
        check_tokens("prompt", tokens, self._vocab_size)
        if sample.adapter is not None and sample.adapter not in self._adapters:
            raise NotFound(f"adapter {sample.adapter!r} is not loaded")
        if fault_of(tokens)[0] is Fault.REFUSE:
            raise ValidationFailed("injected fault: refused")
        room = max(1, self._max_context - len(tokens))  # a prompt that fills the context still gets one token
        limit = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
        b = [0.0] * DIMENSIONS if sample.adapter is None else self._adapters[sample.adapter]
        rows = [SampledSequence([], [], StopReason.LENGTH) for _ in range(sample.num_samples)]
        self._requests[ticket] = _Request(sample, b, limit, rows, list(range(sample.num_samples)))

    def cancel(self, ticket: Ticket) -> None:
        self._requests.pop(ticket, None)

    def watch(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket)
        if request is not None and request.reported is None:
            request.reported = [0] * len(request.rows)

    def drawn(self) -> list[Drawn]:
        watched = [(ticket, request, request.reported) for ticket, request in self._requests.items() if request.reported is not None]
        return [drawn for ticket, request, reported in watched for drawn in _report(ticket, request.rows, reported)]

    def step(self) -> list[tuple[Ticket, SampleOutput | TinsmithError]]:
        self._enter("step", "")
        free_rows = self._max_rows
        for request in self._requests.values():
            if free_rows == 0:
                break
            self._suffer_once(request)
            running = request.open_rows[:free_rows]
            free_rows -= len(running)
            for row in running:
                self._advance(request, row)
        finished = [ticket for ticket, request in self._requests.items() if not request.open_rows]
        return [(ticket, _sample_output(self._requests.pop(ticket), self._vocab_size)) for ticket in finished]

    def ping(self) -> None:
        self._enter("ping", "")

    def _enter(self, operation: str, subject: str) -> None:
        self.calls[operation] += 1
        if self._before is not None:
            self._before(operation, subject)

    @staticmethod
    def _suffer_once(request: _Request) -> None:
        if request.has_suffered:
            return
        request.has_suffered = True
        fault, ms = fault_of(request.sample.prompt.tokens)
        suffer(before_any_effect(fault), ms)

    def _advance(self, request: _Request, row: int) -> None:
        """One token more for one row."""
        held, params = request.rows[row], request.sample.params
        previous = held.tokens[-1] if held.tokens else request.sample.prompt.tokens[-1]
        ranked = candidates(request.b, previous, self._vocab_size)
        token, value = ranked[0] if params.temperature == 0 else draw(ranked, f"{params.seed}/{row}/{len(held.tokens)}")
        held.tokens.append(token)
        held.logprobs.append(value)
        if self._stops(params.stop, token):
            request.rows[row] = replace(held, stop_reason=StopReason.STOP)
            request.open_rows.remove(row)
        elif len(held.tokens) >= request.limit:
            request.open_rows.remove(row)

    def _stops(self, stop: tuple[str, ...] | tuple[int, ...] | None, token: int) -> bool:
        if stop == ():
            return False
        return token in self._eos or (stop is not None and token in stop)


def _report(ticket: Ticket, rows: Sequence[SampledSequence], reported: list[int]) -> list[Drawn]:
    """The tokens above `reported`, which counts them from then on."""
    news: list[Drawn] = []
    for index, row in enumerate(rows):
        offset = reported[index]
        if len(row.tokens) > offset:
            news.append(Drawn(ticket, index, offset, row.tokens[offset:], row.logprobs[offset:]))
            reported[index] = len(row.tokens)
    return news


def _sample_output(request: _Request, vocab_size: int) -> SampleOutput:
    sample, tokens = request.sample, request.sample.prompt.tokens
    pairs = list(pairwise(tokens))
    prompt: list[float | None] | None = None
    alternatives: list[list[tuple[int, float]] | None] | None = None
    if sample.prompt_logprobs:
        prompt = [None, *(logprob(request.b, previous, token) for previous, token in pairs)]
    if sample.topk_prompt_logprobs > 0:
        k = sample.topk_prompt_logprobs
        alternatives = [None, *(candidates(request.b, previous, vocab_size)[:k] for previous, _ in pairs)]
    return SampleOutput(request.rows, prompt, alternatives)
