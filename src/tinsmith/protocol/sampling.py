"""The sample command and its result."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tinsmith.protocol.inputs import ModelInput
from tinsmith.protocol.tensors import Tensor
from tinsmith.protocol.training import Kind, Message
from tinsmith.protocol.wire_bounds import MAX_SEQ

MAX_NUM_SAMPLES = 1024
MAX_TOP_K = 1024  # of returned alternatives, not of the sampling filter
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256  # of one stop string
MAX_PENALTY = 2.0  # of either sign, as OpenAI's API has it; so are the two bounds of logit_bias
MAX_BIAS = 100.0
MAX_BIASED = 300  # tokens

TopRow = list[tuple[int, float]]  # (token, log-prob), best first


class SamplingParams(Message):
    """temperature 0 is greedy; top_k -1 and top_p 1 are off. The seed is always set: an unseeded request gets one at submit.

    `stop` None: the end-of-sequence token stops. Empty: nothing stops before max_tokens. Strings or token ids: those stop, and so
    does the end-of-sequence token. max_tokens None: up to the context limit.

    Before the temperature, the logit of a token that the sequence holds `count` times is lowered by count * frequency_penalty, and by
    presence_penalty if count > 0 (the prompt does not count); `logit_bias` is added.
    """

    seed: int
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_SEQ)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Mapping[int, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = Field(default={}, max_length=MAX_BIASED)


@dataclass(frozen=True, slots=True)
class Sample:
    """`adapter` is the artifact of a sampler checkpoint, None for the base model. With n the length of the prompt:

    `topk_prompt_logprobs` > 0 asks for that many alternatives a prompt position, `topk_sample_logprobs` for as many a sampled token.
    `target_prompt_logprobs`: int64 [n - 1, K], dense or sparse; the tokens in row t are scored at position t + 1, -1 asks nothing.
    `prompt_alt_tokens_k` > 0 asks for that many independent draws at each position from 1.
    `prompt_logprobs_last_n`: prompt log-probs (and their alternatives) of the last N positions alone.
    """

    kind: ClassVar[Kind] = Kind.SAMPLE
    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    adapter: str | None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


class StopReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`logprobs[i]` is that of `tokens[i]` under the distribution it was drawn from (raw for greedy); `topk_logprobs[i]` are the largest of
    that distribution, None where nobody asked."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    topk_logprobs: list[TopRow | None] | None = None


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Draws with replacement: row t holds k alternatives to the prompt's token t + 1. `tokens` int64, `logprobs` float32, [n - 1, k]."""

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """`prompt_logprobs[t]` is raw, temperature 1; None at position 0 and wherever nobody asked. `topk_prompt_logprobs[t]` likewise.

    `target_prompt_logprobs`: float32 of the shape and layout of the request's, raw; 0 in its cells of -1. `prompt_cache_hit_tokens`: tokens
    of the prompt that were not computed again; alone in this answer it depends on what ran before.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[TopRow | None] | None = None
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
