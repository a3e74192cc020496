"""A request of the sampler under way, and each of its sequences."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tinsmith.engines.base import Drawn, Ticket
from tinsmith.engines.prompt_scores import PromptScores
from tinsmith.engines.sampler_cache import PromptCache
from tinsmith.engines.sampler_lora import Adapter
from tinsmith.engines.sampling_rules import Draw
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, StopReason, TopRow
from tinsmith.text.stops import StopMatcher


@dataclass(slots=True)
class Request:
    """A request that has not finished. `chunk_keys` name the beginnings of its prompt; `num_shared` of its tokens were found computed.
    `finished` holds its sequences by sample index."""

    ticket: Ticket
    sample: Sample
    prompt: list[int]
    max_new: int
    adapter: Adapter | None
    scores: PromptScores
    chunk_keys: Sequence[bytes]
    cache: PromptCache = field(default_factory=PromptCache)
    num_shared: int = 0
    first_logits: Tensor | None = None  # [V], after the last prompt token
    num_started: int = 0
    is_watched: bool = False
    finished: dict[int, SampledSequence] = field(default_factory=dict)

    def output(self) -> SampleOutput:
        return SampleOutput(
            sequences=[self.finished[index] for index in range(self.sample.num_samples)],
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.best,
            target_prompt_logprobs=self.scores.target_logprobs,
            prompt_alt_tokens=self.scores.alt_tokens,
            prompt_cache_hit_tokens=self.num_shared,
        )


@dataclass(slots=True)
class Row:
    """One sequence that decodes, or has ended with `ended`. `counts`: how often it holds each token."""

    request: Request
    index: int
    stops: StopMatcher
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[TopRow | None] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    ended: StopReason | None = None
    num_reported: int = 0

    def take(self, drawn: Draw) -> StopReason | None:
        """Append a token; why the sequence ends with it, or None."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        self.best.append(drawn.best)
        self.counts[drawn.token] += 1
        if self.stops.push(drawn.token):
            self.ended = StopReason.STOP
        elif len(self.tokens) >= self.request.max_new:
            self.ended = StopReason.LENGTH
        return self.ended

    def sequence(self, reason: StopReason) -> SampledSequence:
        return SampledSequence(self.tokens, self.logprobs, reason, self.best if self.request.sample.topk_sample_logprobs > 0 else None)

    def report(self) -> Drawn | None:
        """The tokens that are decided and were not reported yet."""
        offset, num_held = self.num_reported, 0 if self.ended is not None else self.stops.num_undecided()
        end = len(self.tokens) - num_held
        if end <= offset:
            return None
        self.num_reported = end
        return Drawn(self.request.ticket, self.index, offset, self.tokens[offset:end], self.logprobs[offset:end])
