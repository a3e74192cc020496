"""The sample command and its result."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from tinsmith.protocol.inputs import ModelInput
from tinsmith.protocol.tensors import Tensor
from tinsmith.protocol.training import Kind, Message

MAX_NUM_SAMPLES = 1024
MAX_TOP_K = 1024  # of returned alternatives, not of the sampling filter
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256  # of one stop string


class SamplingParams(Message):
    """temperature 0 is greedy; top_k -1 and top_p 1 are off. The seed is always set: an unseeded request gets one at submit.

    `stop` None: the end-of-sequence token stops. Empty: nothing stops before max_tokens. Strings or token ids: those stop, and so
    does the end-of-sequence token. max_tokens None: up to the context limit.
    """

    seed: int
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: tuple[str, ...] | tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """`adapter` is the artifact of a sampler checkpoint, None for the base model.

    `topk_prompt_logprobs` > 0 asks for that many alternatives a prompt position.
    """

    kind: ClassVar[Kind] = Kind.SAMPLE
    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    adapter: str | None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


class StopReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`logprobs[i]` is that of `tokens[i]` under the distribution it was drawn from (raw for greedy)."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """`prompt_logprobs[t]` is raw, temperature 1; None at position 0. `topk_prompt_logprobs[t]`: (token, log-prob), best first."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: Tensor | None = None
