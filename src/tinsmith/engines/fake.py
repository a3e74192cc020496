"""Deterministic engines without a model, for tests of everything around an engine. They keep every promise of the seam.

The model that they stand on is described in `fake_model.py`.

Faults, for tests that speak HTTP only. A sequence that starts with the token 31337 asks for one with its second token:

    second  third  effect
    1       ms     sleep, then work as usual
    2              raise before anything is mutated
    3              raise when half of the effect is in the adapter
    4              hang for ever
    5              exit the process at once
    6              refuse the command (ValidationFailed)
    7       ms     hold the interpreter lock, then work as usual
    8       ms     put half of the effect in the adapter, sleep, then do the rest: what a late thread leaves behind

In a prompt to be sampled 3 acts as 2 and 8 as 1. Tests in the same process pass `before`, and wait or raise there.
"""

import ctypes
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from tinsmith.engines.base import Answer, Contents, Files, Job, Ticket
from tinsmith.engines.fake_model import (
    DIMENSIONS,
    Adapter,
    Progress,
    Rows,
    Vector,
    adapter_of,
    candidates,
    check_config,
    check_datum,
    check_tokens,
    draw,
    files_of,
    logprob,
    step,
)
from tinsmith.protocol.errors import InputTokensExceeded, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, StopReason
from tinsmith.protocol.training import MAX_LORA_RANK, Compute, ComputeOutput, LoraConfig

FAULT_TOKEN = 31337
EXIT_CODE = 70

Before = Callable[[str, str], None]  # operation and subject: a model id, "<model id>/<seq>" of a job, an adapter's key, a ticket


class Fault(IntEnum):
    SLEEP = 1
    RAISE = 2
    RAISE_HALFWAY = 3
    HANG = 4
    EXIT = 5
    REFUSE = 6
    HOLD_LOCK = 7
    LATE = 8


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
        self._vocab_size = vocab_size
        self._max_context = max_context
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
        if lora.rank > self._max_rank:
            raise ValidationFailed(f"lora_config.rank: {lora.rank} is over this base model's {self._max_rank}; choose a smaller one")
        self._place(model_id, Adapter.fresh(lora))

    def drop_adapter(self, model_id: str) -> None:
        self._enter("drop_adapter", model_id)
        self._adapters.pop(model_id, None)

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        self.calls["run"] += 1
        return [self._run_one(job) for job in jobs]

    def capture(self, model_id: str, contents: Contents) -> Files:
        self._enter("capture", model_id)
        return files_of(self._adapters[model_id], contents)

    def load(self, model_id: str, files: Files, *, optimizer: bool) -> None:
        self._enter("load", model_id)
        adapter, held = self._adapters[model_id], adapter_of(files, Contents.CHECKPOINT)
        if held.lora.rank != adapter.lora.rank:
            raise ValidationFailed(f"the checkpoint has rank {held.lora.rank}, the model {adapter.lora.rank}; load it into a new model")
        adapter.a, adapter.b = held.a, held.b
        adapter.m, adapter.g = held.m if optimizer else [0.0] * DIMENSIONS, [0.0] * DIMENSIONS
        adapter.progress = Progress(steps=held.progress.steps if optimizer else 0, history=adapter.progress.history)
        adapter.chain(f"load {held.progress.history} {optimizer}")

    def restore(self, model_id: str, lora: LoraConfig, files: Files) -> None:
        self._enter("restore", model_id)
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
            answer = self._compute(adapter, job.command) if isinstance(job.command, Compute) else step(adapter, job.command.adam)
        except TinsmithError as refusal:
            return refusal
        self.ran.append((job.model_id, job.seq))
        return answer

    def _compute(self, adapter: Adapter, command: Compute) -> ComputeOutput:
        check_config(command)
        for index, datum in enumerate(command.data):
            check_datum(f"data[{index}]", datum, command.loss_fn, self._vocab_size, self._max_context)
        fault, ms = _fault_in(command.data)
        _suffer(fault, ms)
        rows = [Rows.of(datum, adapter.b) for datum in command.data]
        gradient = [0.0] * DIMENSIONS
        loss = sum((row.accumulate(command.loss_fn, adapter.a, gradient) for row in rows), 0.0)
        if command.backward and command.data:
            _add(adapter, gradient, fault, ms)
            adapter.progress.accumulated += 1
            adapter.chain(f"forward_backward {[value.hex() for value in gradient]}")
        return ComputeOutput(tuple(row.logprobs() for row in rows), {"loss:sum": loss})


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


def _fault_in(data: Sequence[Datum]) -> tuple[Fault | None, int]:
    """The first fault that a datum asks for, and its third token."""
    for datum in data:
        fault, ms = _fault_of(datum.model_input.tokens)
        if fault is not None:
            return fault, ms
    return None, 0


def _fault_of(tokens: Sequence[int]) -> tuple[Fault | None, int]:
    if len(tokens) < 2 or tokens[0] != FAULT_TOKEN or tokens[1] not in list(Fault):
        return None, 0
    return Fault(tokens[1]), tokens[2] if len(tokens) > 2 else 0


def _suffer(fault: Fault | None, ms: int) -> None:
    """Faults that strike before anything is mutated."""
    match fault:
        case Fault.SLEEP:
            time.sleep(ms / 1000)
        case Fault.RAISE:
            raise RuntimeError("injected fault: nothing was mutated")
        case Fault.HANG:
            threading.Event().wait()
        case Fault.EXIT:
            os._exit(EXIT_CODE)
        case Fault.REFUSE:
            raise ValidationFailed("injected fault: refused")
        case Fault.HOLD_LOCK:
            ctypes.PyDLL(None).usleep(ms * 1000)  # PyDLL keeps the lock while it calls


@dataclass(slots=True)
class _Request:
    """A sample under way: one list of tokens and log-probs a row. `limit`: tokens a row may have."""

    sample: Sample
    b: Vector
    limit: int
    rows: list[SampledSequence]
    open_rows: list[int]
    has_suffered: bool = False


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
        self._adapters[key] = adapter_of(files, Contents.SAMPLER).b
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
        if _fault_of(tokens)[0] is Fault.REFUSE:
            raise ValidationFailed("injected fault: refused")
        room = max(1, self._max_context - len(tokens))  # a prompt that fills the context still gets one token
        limit = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
        b = [0.0] * DIMENSIONS if sample.adapter is None else self._adapters[sample.adapter]
        rows = [SampledSequence([], [], StopReason.LENGTH) for _ in range(sample.num_samples)]
        self._requests[ticket] = _Request(sample, b, limit, rows, list(range(sample.num_samples)))

    def cancel(self, ticket: Ticket) -> None:
        self._requests.pop(ticket, None)

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
        fault, ms = _fault_of(request.sample.prompt.tokens)
        _suffer({Fault.RAISE_HALFWAY: Fault.RAISE, Fault.LATE: Fault.SLEEP}.get(fault, fault) if fault is not None else None, ms)

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
