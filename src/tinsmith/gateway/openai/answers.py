"""The answers under /v1, as OpenAI's clients read them. A null is sent where that API sends one, and left out elsewhere.

`token_ids`, `prompt_token_ids` (on request), `root`, `parent` and `max_model_len` are no part of that API; they have vLLM's names.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

UNLIKELY = -9999.0  # stands in that API for a log-prob that no number tells

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class _Sparse(Answer):
    """A null that nobody set is left out."""

    @model_serializer(mode="wrap")
    def _without_unset_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in write(self).items() if value is not None or name in self.model_fields_set}


class Model(Answer):
    """`created`: seconds; 0 for a base model, which was never created here. `root`: what its weights are; `parent`: the base model of
    an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[Model]


class PromptTokensDetails(Answer):
    """`cached_tokens`: of the prompts, those that were not computed again."""

    cached_tokens: int


class Usage(_Sparse):
    """Each prompt counts once, however many choices it has; every token that was drawn counts, the end-of-sequence token too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(Answer):
    """`bytes` null: the token alone is no valid UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Answer):
    """Columns: entry t is of the choice's token t. `text_offset`: where its text begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Sparse):
    """Of an answer, and of a chunk, where `finish_reason` is null until the last one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(_Sparse):
    """An answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Function(Answer):
    name: str
    arguments: str


class ToolCall(_Sparse):
    """`index`: in the deltas of a stream alone."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(_Sparse):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Sparse):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class ChatCompletion(_Sparse):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class Delta(_Sparse):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(_Sparse):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(_Sparse):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


def told(logprob: float) -> float:
    """JSON has no infinity and no NaN."""
    return logprob if math.isfinite(logprob) else UNLIKELY
