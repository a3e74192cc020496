"""Batched sampling with transformers models on CPU or GPU: many requests and many adapters in one batch that never drains.

Knows tokens, adapters' files and requests; nothing of queues, stores or callers. A step prefills waiting prompts up to a token budget
and then advances every running sequence by one token, so requests join and leave between any two tokens.

What repeats: a request's answer is a function of (base model, adapter, request). Prompts are prefilled alone in chunks at fixed places,
each row is drawn by itself from its own seed (`sampling_rules`), and rows are batched so that they do not touch each other's bits where
the matrix kernels allow it (`sampler_cache`; measured on x86 CPUs, fp32 and bf16). Elsewhere a row's logits may differ in last bits with
the company it keeps: log-probs then agree to rounding, and a token differs only where two candidates are closer than that.

Shapes: V vocabulary, Q tokens of a chunk.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tinsmith.engines.base import Drawn, Files, Ticket
from tinsmith.engines.sampler_cache import ATTENTION, PromptCache, RowCache
from tinsmith.engines.sampler_lora import Adapter, AdapterShelf, Routes, RowGroup, read_adapter, wrap
from tinsmith.engines.sampling_rules import Draw, LogprobMode, NonFiniteLogits, draw, uniform
from tinsmith.protocol.errors import InputTokensExceeded, InternalError, TinsmithError, ValidationFailed
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, StopReason
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.stops import StopMatcher
from tinsmith.text.tokenizer import Tokenizer

PREFILL_CHUNK = 256  # tokens; also the budget of a step, which bounds how long a long prompt holds up the running sequences
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FOREIGN_ATTENTION = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "attn_logit_softcap")

Answered = tuple[Ticket, SampleOutput | TinsmithError]


@dataclass(slots=True)
class _Request:
    """A request that has not finished. `finished` holds its sequences by sample index."""

    ticket: Ticket
    sample: Sample
    prompt: list[int]
    max_new: int
    adapter: Adapter | None
    cache: PromptCache
    first_logits: Tensor | None = None  # [V], after the last prompt token
    num_started: int = 0
    is_watched: bool = False
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])

    @property
    def wants_prompt_logits(self) -> bool:
        return self.sample.prompt_logprobs or self.sample.topk_prompt_logprobs > 0

    def output(self) -> SampleOutput:
        return SampleOutput(
            sequences=[self.finished[index] for index in range(self.sample.num_samples)],
            prompt_logprobs=self.prompt_logprobs if self.sample.prompt_logprobs else None,
            topk_prompt_logprobs=self.topk_prompt_logprobs if self.sample.topk_prompt_logprobs > 0 else None,
        )


@dataclass(slots=True)
class _Row:
    """One sequence that decodes, or has ended with `ended`."""

    request: _Request
    index: int
    stops: StopMatcher
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: StopReason | None = None
    num_reported: int = 0

    def take(self, drawn: Draw) -> StopReason | None:
        """Append a token; why the sequence ends with it, or None."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if self.stops.push(drawn.token):
            self.ended = StopReason.STOP
        elif len(self.tokens) >= self.request.max_new:
            self.ended = StopReason.LENGTH
        return self.ended

    def report(self) -> Drawn | None:
        """The tokens that are decided and were not reported yet."""
        offset, num_held = self.num_reported, 0 if self.ended is not None else self.stops.num_undecided()
        end = len(self.tokens) - num_held
        if end <= offset:
            return None
        self.num_reported = end
        return Drawn(self.request.ticket, self.index, offset, self.tokens[offset:end], self.logprobs[offset:end])


class HfSampler:
    """A `SamplingEngine`. Calls come from one thread at a time, `ping` excepted."""

    def __init__(
        self,
        info: BaseModelInfo,
        dtype: Literal["fp32", "bf16"],
        max_rows: int,
        max_adapters: int,
        threads: int = 1,
        device: str = "cpu",
        *,
        logprobs: LogprobMode = "tempered",
    ) -> None:
        """`threads`: intra-op threads of this process; 1 keeps fp32 results bit-equal. `logprobs`: which log-probs of sampled tokens
        are returned where temperature is neither 0 nor 1. Raises ValueError for a model whose attention is not plain causal."""
        torch.set_num_threads(threads)
        disable_progress_bar()  # "Loading weights" would be drawn over the server's log
        self._info = info
        self._max_rows = max_rows
        self._mode = logprobs
        self._device = torch.device(device)
        self._dtype = _DTYPES[dtype]
        self._model = AutoModelForCausalLM.from_pretrained(
            info.path, dtype=self._dtype, attn_implementation=ATTENTION, local_files_only=True
        )
        self._model.eval().requires_grad_(False).to(self._device)
        _check_attention(self._model.config.get_text_config())
        self._routes = Routes()
        self._layers = wrap(self._model, self._routes)
        self._tokenizer = Tokenizer.from_dir(info.path) if (Path(info.path) / "tokenizer.json").is_file() else None
        self._shelf = AdapterShelf(max_adapters)
        self._requests: dict[Ticket, _Request] = {}
        self._waiting: deque[_Request] = deque()  # those with samples that have not started, in the order of their turns
        self._rows: list[_Row] = []  # row i decodes in row i of the cache
        self._cache = RowCache(max_rows, self._device)
        self._watched: list[_Row] = []  # of requests that run; those that have ended stay for one more report

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def has_adapter(self, key: str) -> bool:
        return key in self._shelf

    def load_adapter(self, key: str, files: Files) -> None:
        """Raises ValidationFailed for files that do not fit the base model, StateContention if all adapters are in use."""
        self._shelf.put(key, read_adapter(files, self._layers, self._device))

    def add(self, ticket: Ticket, sample: Sample) -> None:
        """Raises InputTokensExceeded, ValidationFailed, NotFound (adapter)."""
        prompt = sample.prompt.tokens
        self._check(ticket, sample, prompt)
        request = _Request(
            ticket=ticket,
            sample=sample,
            prompt=prompt,
            max_new=_max_new(sample.params.max_tokens, self._info.max_context - len(prompt)),
            adapter=None if sample.adapter is None else self._shelf.use(sample.adapter),
            cache=PromptCache(len(prompt)),
        )
        self._requests[ticket] = request
        self._waiting.append(request)

    def cancel(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket)
        if request is not None:
            with torch.inference_mode():  # freeing a row may move another one
                self._forget(request)

    def watch(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket)
        if request is not None and not request.is_watched:
            request.is_watched = True
            self._watched += [row for row in self._rows if row.request is request]

    def drawn(self) -> list[Drawn]:
        news = [row.report() for row in self._watched]
        self._watched = [row for row in self._watched if row.ended is None]
        return [drawn for drawn in news if drawn is not None]

    def step(self) -> list[Answered]:
        with torch.inference_mode():
            return [*self._start_waiting(), *self._decode()]

    def ping(self) -> None:
        torch.ones(1, device=self._device).add_(1).item()

    def _check(self, ticket: Ticket, sample: Sample, prompt: list[int]) -> None:
        if ticket in self._requests:
            raise ValidationFailed(f"ticket {ticket!r} is already running")
        if not prompt:
            raise ValidationFailed("prompt: empty; send at least one token")
        if len(prompt) > self._info.max_context:
            raise InputTokensExceeded(
                f"prompt: {len(prompt)} tokens, the context of {self._info.name} is {self._info.max_context}; shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= self._info.vocab_size:
            raise ValidationFailed(f"prompt: token ids must lie in [0, {self._info.vocab_size}); use the base model's tokenizer")
        try:
            self._matcher(sample)
        except ValueError as error:
            raise ValidationFailed(f"sampling_params.stop: {error}") from error

    def _matcher(self, sample: Sample) -> StopMatcher:
        return StopMatcher(sample.params.stop, self._info.eos_token_ids, self._tokenizer)

    def _start_waiting(self) -> list[Answered]:
        """Prefill up to the budget and start samples while rows are free. Requests take turns sample by sample, so one with many
        samples does not keep the others out."""
        answered: list[Answered] = []
        budget = PREFILL_CHUNK
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting[0]
            if request.first_logits is None:
                if budget <= 0:
                    break
                budget -= self._prefill_chunk(request)
                continue
            self._waiting.popleft()
            answered += self._start_sample(request, request.first_logits)
            if request.ticket in self._requests and request.num_started < request.sample.num_samples:
                self._waiting.append(request)
        return answered

    def _prefill_chunk(self, request: _Request) -> int:
        """Feed the next chunk of the prompt; its places depend on the prompt alone. Answers the number of tokens."""
        cache = request.cache
        chunk = request.prompt[cache.filled : cache.filled + PREFILL_CHUNK]
        groups = [] if request.adapter is None else [RowGroup(request.adapter)]
        positions = torch.arange(cache.filled, cache.filled + len(chunk), device=self._device)[None]
        keep = len(chunk) if request.wants_prompt_logits else 1
        mask = cache.mask(len(chunk), self._device)
        logits_QV = self._forward(torch.tensor([chunk], device=self._device), positions, mask, cache, groups, keep)[0]
        if request.wants_prompt_logits:
            self._score_prompt(request, logits_QV, request.prompt[cache.filled + 1 : cache.filled + len(chunk) + 1])
        cache.filled += len(chunk)
        if cache.filled == len(request.prompt):
            request.first_logits = logits_QV[-1].clone()
        return len(chunk)

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: PromptCache | RowCache, groups: Sequence[RowGroup], keep: int
    ) -> Tensor:
        """Logits of the last `keep` tokens of each row."""
        self._routes.groups = groups
        logits: Tensor = self._model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep
        ).logits
        return logits

    def _score_prompt(self, request: _Request, logits_QV: Tensor, targets: list[int]) -> None:
        """Raw log-probs of `targets`, the tokens after the first len(targets) of the chunk."""
        if not targets:
            return
        logprobs_QV = torch.log_softmax(logits_QV[: len(targets)].float(), dim=-1)
        chosen = logprobs_QV.gather(1, torch.tensor(targets, device=self._device)[:, None])[:, 0]
        request.prompt_logprobs += chosen.tolist()
        if request.sample.topk_prompt_logprobs > 0:
            best = torch.topk(logprobs_QV, min(request.sample.topk_prompt_logprobs, self._info.vocab_size))
            request.topk_prompt_logprobs += [
                list(zip(ids, values, strict=True)) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]

    def _start_sample(self, request: _Request, first_logits: Tensor) -> list[Answered]:
        """Draw the first token of the request's next sample, and give the sample a row unless it ends there."""
        row = _Row(request, request.num_started, self._matcher(request.sample))
        request.num_started += 1
        if request.is_watched:
            self._watched.append(row)
        try:
            ended = row.take(self._draw(row, first_logits))
        except NonFiniteLogits:
            return [self._refuse(request)]
        if ended is not None:
            return self._finish(row, ended)
        self._cache.place(request.cache)
        self._rows.append(row)
        return []

    def _decode(self) -> list[Answered]:
        """One token for every row."""
        if not self._rows:
            return []
        positions, mask = self._cache.begin_step()
        dummies = self._cache.batch_rows - len(self._rows)
        tokens = [row.tokens[-1] for row in self._rows] + [0] * dummies
        logits = self._forward(torch.tensor(tokens, device=self._device)[:, None], positions, mask, self._cache, self._groups(), 1)[:, 0]
        self._cache.end_step()
        answered: list[Answered] = []
        for row, logits_V in list(zip(self._rows, logits, strict=False)):
            if row.request.ticket not in self._requests:
                continue  # a sibling of this step's non-finite row
            try:
                ended = row.take(self._draw(row, logits_V))
            except NonFiniteLogits:
                answered.append(self._refuse(row.request))
                continue
            if ended is not None:
                self._drop_row(row)
                answered += self._finish(row, ended)
        return answered

    def _groups(self) -> list[RowGroup]:
        """The rows of each adapter; adapters are compared by identity, since their tensors cannot be hashed."""
        places: dict[int, tuple[Adapter, list[int]]] = {}
        for place, row in enumerate(self._rows):
            adapter = row.request.adapter
            if adapter is not None:
                places.setdefault(id(adapter), (adapter, []))[1].append(place)
        return [RowGroup.of(adapter, rows, self._cache.batch_rows, self._device) for adapter, rows in places.values()]

    def _draw(self, row: _Row, logits_V: Tensor) -> Draw:
        params = row.request.sample.params
        u = uniform(params.seed, row.index, len(row.tokens))
        return draw(logits_V, self._info.vocab_size, params, u, self._mode)

    def _finish(self, row: _Row, reason: StopReason) -> list[Answered]:
        request = row.request
        request.finished[row.index] = SampledSequence(row.tokens, row.logprobs, reason)
        if len(request.finished) < request.sample.num_samples:
            return []
        self._forget(request)
        return [(request.ticket, request.output())]

    def _refuse(self, request: _Request) -> Answered:
        self._forget(request, wipe=True)
        if request.adapter is None:
            return request.ticket, InternalError(
                f"{self._info.name} gives logits that are not finite; sample an earlier checkpoint if the adapter has diverged"
            )
        return request.ticket, ValidationFailed(
            "the adapter gives logits that are not finite: its training has diverged; use an earlier one"
        )

    def _forget(self, request: _Request, *, wipe: bool = False) -> None:
        """Free everything that a request holds."""
        del self._requests[request.ticket]
        if request in self._waiting:
            self._waiting.remove(request)
        for row in [row for row in self._rows if row.request is request]:
            self._drop_row(row, wipe=wipe)
        if request.is_watched:
            self._watched = [row for row in self._watched if row.request is not request]
        if request.sample.adapter is not None:
            self._shelf.release(request.sample.adapter)

    def _drop_row(self, row: _Row, *, wipe: bool = False) -> None:
        place = next(place for place, held in enumerate(self._rows) if held is row)
        self._cache.remove(place, wipe=wipe)
        last = self._rows.pop()
        if last is not row:
            self._rows[place] = last


def _max_new(wanted: int | None, room: int) -> int:
    """A prompt that fills the context still gets one token: drawing it needs no further position."""
    room = max(1, room)
    return room if wanted is None else min(wanted, room)


def _check_attention(config: object) -> None:
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = [name for name in _FOREIGN_ATTENTION if getattr(config, name, None)]
    if getattr(config, "use_sliding_window", True) is False:
        foreign = [name for name in foreign if name != "sliding_window"]
    if types != {"full_attention"} or foreign:
        raise ValueError(
            f"the sampler runs plain causal attention only, this model has {sorted(types)} {foreign}; choose another base model"
        )
