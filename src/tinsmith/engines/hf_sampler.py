"""Batched sampling with transformers models on CPU or GPU: many requests and many adapters in one batch that never drains.

Knows tokens, adapters' files and requests; nothing of queues, stores or callers. A step prefills waiting prompts up to a token budget
and then advances every running sequence by one token, so requests join and leave between any two tokens.

What repeats: a request's answer is a function of (base model, adapter, request). Prompts are prefilled alone in chunks at fixed places,
each row is drawn by itself from its own seed (`sampling_rules`), and rows are batched so that they do not touch each other's bits where
the matrix kernels allow it (`sampler_cache`; measured on x86 CPUs, fp32 and bf16). Elsewhere a row's logits may differ in last bits with
the company it keeps: log-probs then agree to rounding, and a token differs only where two candidates are closer than that. A chunk that
was computed for an earlier prompt of the same scope and adapter is used again as it lies; the answer has the same bits without it.

Shapes: V vocabulary, Q tokens of a chunk.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tinsmith.engines.base import Drawn, Files, Ticket
from tinsmith.engines.prefixes import PREFILL_CHUNK, PrefixCache, chunk_keys, digest_of, root
from tinsmith.engines.prompt_scores import PromptScores
from tinsmith.engines.sampler_cache import ATTENTION, PromptCache, PromptChunk, RowCache
from tinsmith.engines.sampler_lora import Adapter, AdapterShelf, Routes, RowGroup, read_adapter, wrap
from tinsmith.engines.sampler_requests import Request, Row
from tinsmith.engines.sampling_rules import Draw, LogprobMode, NonFiniteLogits, draw, uniform
from tinsmith.protocol.errors import InputTokensExceeded, InternalError, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.sample_checks import check_asked
from tinsmith.protocol.sampling import Sample, SampleOutput, StopReason
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.stops import StopMatcher
from tinsmith.text.tokenizer import Tokenizer

PROMPT_CACHE_BYTES = 256 * 1024 * 1024
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FOREIGN_ATTENTION = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "attn_logit_softcap")

Answered = tuple[Ticket, SampleOutput | TinsmithError]


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
        prompt_cache_bytes: int = PROMPT_CACHE_BYTES,
    ) -> None:
        """`threads`: intra-op threads of this process; 1 keeps fp32 results bit-equal. `logprobs`: which log-probs of sampled tokens
        are returned where temperature is neither 0 nor 1. `prompt_cache_bytes`: of computed chunks that are kept for later prompts.
        Raises ValueError for a model whose attention is not plain causal."""
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
        self._digests: dict[str, bytes] = {}  # of the weights of each adapter on the shelf
        self._prefixes: PrefixCache[PromptChunk] = PrefixCache(prompt_cache_bytes)
        self._requests: dict[Ticket, Request] = {}
        self._waiting: deque[Request] = deque()  # those with samples that have not started, in the order of their turns
        self._rows: list[Row] = []  # row i decodes in row i of the cache
        self._cache = RowCache(max_rows, self._device)
        self._watched: list[Row] = []  # of requests that run; those that have ended stay for one more report

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
        is_new = key not in self._shelf
        self._shelf.put(key, read_adapter(files, self._layers, self._device))
        if is_new:
            self._digests = {held: digest for held, digest in self._digests.items() if held in self._shelf} | {key: digest_of(files)}

    def add(self, ticket: Ticket, sample: Sample, scope: str = "") -> None:
        """Raises InputTokensExceeded, ValidationFailed, NotFound (adapter)."""
        prompt = sample.prompt.tokens
        self._check(ticket, sample, prompt)
        request = Request(
            ticket=ticket,
            sample=sample,
            prompt=prompt,
            max_new=_max_new(sample.params.max_tokens, self._info.max_context - len(prompt)),
            adapter=None if sample.adapter is None else self._shelf.use(sample.adapter),
            scores=PromptScores(sample, prompt, self._info.vocab_size, self._mode),
            chunk_keys=list(chunk_keys(root(scope, self._digest(sample.adapter)), sample.prompt.token_bytes)),
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
        check_asked(sample, Limits(self._info.vocab_size, self._info.max_context))
        try:
            self._matcher(sample)
        except ValueError as error:
            raise ValidationFailed(f"sampling_params.stop: {error}") from error

    def _digest(self, adapter: str | None) -> bytes:
        return b"" if adapter is None else self._digests[adapter]

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
                try:
                    budget -= self._next_chunk(request)
                except NonFiniteLogits:
                    answered.append(self._refuse(request))
                continue
            self._waiting.popleft()
            answered += self._start_sample(request, request.first_logits)
            if request.ticket in self._requests and request.num_started < request.sample.num_samples:
                self._waiting.append(request)
        return answered

    def _next_chunk(self, request: Request) -> int:
        """Bring the prompt one chunk further; its places depend on the prompt alone. Answers how many tokens were computed."""
        start, place = request.cache.filled, len(request.cache.chunks)
        end = min(start + PREFILL_CHUNK, len(request.prompt))
        is_scored = request.scores.wants(start, end)
        # The last chunk is always computed: its last logits are drawn from.
        if end < len(request.prompt) and not is_scored:
            shared = self._prefixes.get(request.chunk_keys[place])
            if shared is not None:
                request.cache.append(shared)
                request.num_shared += shared.num_tokens
                return 0
        logits_QV = self._prefill(request, start, end, keep=end - start if is_scored else 1)
        chunk = request.cache.end_chunk(end - start)
        if place < len(request.chunk_keys):
            self._prefixes.put(request.chunk_keys[place], chunk, chunk.num_bytes)
        if is_scored:
            request.scores.take(start, logits_QV)
        if end == len(request.prompt):
            request.first_logits = logits_QV[-1].clone()
        return end - start

    def _prefill(self, request: Request, start: int, end: int, keep: int) -> Tensor:
        """Logits of the last `keep` tokens of the prompt's tokens from `start` to `end`."""
        groups = [] if request.adapter is None else [RowGroup(request.adapter)]
        tokens = torch.tensor([request.prompt[start:end]], device=self._device)
        positions = torch.arange(start, end, device=self._device)[None]
        mask = request.cache.mask(end - start, self._device)
        return self._forward(tokens, positions, mask, request.cache, groups, keep)[0]

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: PromptCache | RowCache, groups: Sequence[RowGroup], keep: int
    ) -> Tensor:
        """Logits of the last `keep` tokens of each row."""
        self._routes.groups = groups
        logits: Tensor = self._model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep
        ).logits
        return logits

    def _start_sample(self, request: Request, first_logits: Tensor) -> list[Answered]:
        """Draw the first token of the request's next sample, and give the sample a row unless it ends there."""
        row = Row(request, request.num_started, self._matcher(request.sample))
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

    def _draw(self, row: Row, logits_V: Tensor) -> Draw:
        params = row.request.sample.params
        u = uniform(params.seed, row.index, len(row.tokens))
        num_best = row.request.sample.topk_sample_logprobs
        return draw(logits_V, self._info.vocab_size, params, u, self._mode, counts=row.counts, num_best=num_best)

    def _finish(self, row: Row, reason: StopReason) -> list[Answered]:
        request = row.request
        request.finished[row.index] = row.sequence(reason)
        if len(request.finished) < request.sample.num_samples:
            return []
        self._forget(request)
        return [(request.ticket, request.output())]

    def _refuse(self, request: Request) -> Answered:
        self._forget(request, wipe=True)
        if request.adapter is None:
            return request.ticket, InternalError(
                f"{self._info.name} gives logits that are not finite; sample an earlier checkpoint if the adapter has diverged"
            )
        return request.ticket, ValidationFailed(
            "the adapter gives logits that are not finite: its training has diverged; use an earlier one"
        )

    def _forget(self, request: Request, *, wipe: bool = False) -> None:
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

    def _drop_row(self, row: Row, *, wipe: bool = False) -> None:
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
