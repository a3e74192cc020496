"""The deterministic sampling engine, without a model: the twin of `fake.py`, on the rule of `fake_model.py`.

It scores a prompt by that rule, draws alternatives from the same 16 candidates, and counts the tokens of prompts that begin alike as an
engine with a cache of computed chunks does. Its distributions have no temperature.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinsmith.engines.base import Contents, Drawn, Files, Ticket
from tinsmith.engines.fake import Before
from tinsmith.engines.fake_faults import Fault, before_any_effect, fault_of, suffer, suffer_seeded
from tinsmith.engines.fake_model import DIMENSIONS, Vector, adapter_of, candidates, check_tokens, draw
from tinsmith.engines.fake_scores import prompt_scores
from tinsmith.engines.penalties import adjustments
from tinsmith.engines.prefixes import PREFILL_CHUNK, PrefixCache, chunk_keys, digest_of, root
from tinsmith.protocol.errors import InputTokensExceeded, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.sample_checks import check_asked, scored_from
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, SamplingParams, StopReason, TopRow

NUM_KEPT = 4096  # chunks of prompts that count as seen before


@dataclass(slots=True)
class _Request:
    """A sample under way: one list of tokens and log-probs a row. `limit`: tokens a row may have. `num_shared`: tokens of its prompt that
    were seen before. `reported`: tokens a row, of a watched request."""

    sample: Sample
    b: Vector
    limit: int
    rows: list[SampledSequence]
    open_rows: list[int]
    num_shared: int
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
        self._digests: dict[str, bytes] = {}
        self._prefixes: PrefixCache[bool] = PrefixCache(NUM_KEPT)
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
        self._digests[key] = digest_of(files)
        self._adapters.move_to_end(key)
        in_use = {request.sample.adapter for request in self._requests.values()} | {key}
        idle = [held for held in self._adapters if held not in in_use]
        for held in idle[: max(len(self._adapters) - self._max_adapters, 0)]:
            del self._adapters[held]

    def add(self, ticket: Ticket, sample: Sample, scope: str = "") -> None:
        self._enter("add", ticket)
        tokens = sample.prompt.tokens
        if not 1 <= len(tokens) <= self._max_context:
            raise InputTokensExceeded(f"prompt: {len(tokens)} tokens; send 1 to {self._max_context}")
        check_tokens("prompt", tokens, self._vocab_size)
        check_asked(sample, Limits(self._vocab_size, self._max_context))
        if sample.adapter is not None and sample.adapter not in self._adapters:
            raise NotFound(f"adapter {sample.adapter!r} is not loaded")
        if fault_of(tokens)[0] is Fault.REFUSE:
            raise ValidationFailed("injected fault: refused")
        room = max(1, self._max_context - len(tokens))  # a prompt that fills the context still gets one token
        limit = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
        b = [0.0] * DIMENSIONS if sample.adapter is None else self._adapters[sample.adapter]
        has_best = sample.topk_sample_logprobs > 0
        rows = [SampledSequence([], [], StopReason.LENGTH, [] if has_best else None) for _ in range(sample.num_samples)]
        self._requests[ticket] = _Request(sample, b, limit, rows, list(range(sample.num_samples)), self._shared(sample, scope))

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
        return [(ticket, self._output(self._requests.pop(ticket))) for ticket in finished]

    def ping(self) -> None:
        self._enter("ping", "")

    def _output(self, request: _Request) -> SampleOutput:
        scores = prompt_scores(request.sample, request.b, self._vocab_size)
        return replace(scores, sequences=request.rows, prompt_cache_hit_tokens=request.num_shared)

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
        ranked = _weighed(candidates(request.b, previous, self._vocab_size), params, Counter(held.tokens))
        token, value = ranked[0] if _is_certain(ranked, params) else draw(ranked, f"{params.seed}/{row}/{len(held.tokens)}")
        held.tokens.append(token)
        held.logprobs.append(value)
        if held.topk_logprobs is not None:
            held.topk_logprobs.append(ranked[: request.sample.topk_sample_logprobs])
        if self._stops(params.stop, token):
            request.rows[row] = replace(held, stop_reason=StopReason.STOP)
            request.open_rows.remove(row)
        elif len(held.tokens) >= request.limit:
            request.open_rows.remove(row)

    def _shared(self, sample: Sample, scope: str) -> int:
        """Tokens of whole chunks of the prompt that an earlier one of the scope and adapter began with, the last token apart; the prompt
        counts as an earlier one from now on."""
        digest = b"" if sample.adapter is None else self._digests[sample.adapter]
        keys = list(chunk_keys(root(scope, digest), sample.prompt.token_bytes))
        is_held = [self._prefixes.get(key) is not None for key in keys]
        for key in keys:
            self._prefixes.put(key, True, 1)
        num_chunks = min((len(sample.prompt) - 1) // PREFILL_CHUNK, scored_from(sample) // PREFILL_CHUNK)
        return PREFILL_CHUNK * sum(is_held[:num_chunks])

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


def _is_certain(ranked: TopRow, params: SamplingParams) -> bool:
    """Whether only the best candidate may be drawn. Wider bounds of top_k and top_p have no effect here."""
    return params.temperature == 0 or params.top_k == 1 or math.exp(ranked[0][1]) >= params.top_p


def _weighed(ranked: TopRow, params: SamplingParams, counts: Mapping[int, int]) -> TopRow:
    """The candidates with the request's biases and penalties, best first."""
    added = adjustments(params, counts)
    if not added:
        return ranked
    weighed = [(token, value + added.get(token, 0.0)) for token, value in ranked]
    return sorted(weighed, key=lambda pair: (-pair[1], pair[0]))
