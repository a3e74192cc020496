"""POST /v1/chat/completions: conversations, rendered by the base model's own chat template, tools included."""

import time
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FinishReason,
    ToolCall,
)
from tinsmith.gateway.openai.bodies import ChatBody, read
from tinsmith.gateway.openai.completions import finish_reason
from tinsmith.gateway.openai.generation import Ended, Piece
from tinsmith.gateway.openai.prompts import Asked, asked_chat
from tinsmith.gateway.openai.served import find
from tinsmith.gateway.openai.streaming import respond
from tinsmith.gateway.openai.tokens import chat_logprob, usage_of
from tinsmith.gateway.openai.tools import CallReader
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, TopRow
from tinsmith.text.transcripts import Transcript

router = APIRouter()


@router.post("/chat/completions")
async def chat_completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = await read(request, ChatBody)
    asked = await asked_chat(request, services, body, await find(services, tenant, body.model))
    return await respond(request, services, tenant, body, asked, lambda rid: ChatForm(rid, body, asked))


class _Reading:
    """The text of one choice, divided into content and calls."""

    def __init__(self, body: ChatBody, asked: Asked) -> None:
        form = asked.texts.tool_format() if body.offered else None
        (prompt,) = asked.prompts
        kept = () if form is None else form.marks
        self.transcript = Transcript(asked.texts.tokenizer, body.stops, after=prompt, kept=kept)
        self._calls = CallReader(form)

    def push(self, tokens: Iterable[int]) -> str:
        return self._calls.push("".join(map(self.transcript.push, tokens)))

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls."""
        content = self._calls.push(self.transcript.end())
        rest, calls = self._calls.end()
        return content + rest, calls

    def finish(self, sequence: SampledSequence, calls: list[ToolCall]) -> FinishReason:
        reason = finish_reason(self.transcript, sequence)
        return "tool_calls" if calls and reason == "stop" else reason


class ChatForm:
    """A `Form`. There is one prompt, so a choice is a sequence."""

    def __init__(self, rid: str, body: ChatBody, asked: Asked) -> None:
        self._id = f"chatcmpl-{rid}"
        self._created = int(time.time())
        self._body = body
        self._asked = asked
        self._readings = [_Reading(body, asked) for _ in range(body.n)]

    def whole(self, outputs: Sequence[SampleOutput]) -> ChatCompletion:
        (output,) = outputs
        answer = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._body.model,
            choices=[self._choice(index, sequence) for index, sequence in enumerate(output.sequences)],
            usage=usage_of(self._asked.prompts, outputs),
        )
        return answer.model_copy(update={"prompt_token_ids": self._asked.prompts[0]}) if self._body.return_token_ids else answer

    def opening(self) -> Iterable[ChatChunk]:
        for index in range(self._body.n):
            chunk = self._chunk([ChunkChoice(index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None)])
            if index == 0 and self._body.return_token_ids:
                chunk = chunk.model_copy(update={"prompt_token_ids": self._asked.prompts[0]})
            yield chunk

    def piece(self, piece: Piece) -> Iterable[ChatChunk]:
        content = self._readings[piece.sequence].push(piece.tokens)
        if not (content or self._body.logprobs or self._body.return_token_ids):
            return
        choice = ChunkChoice(
            index=piece.sequence,
            delta=Delta(content=content),
            logprobs=self._logprobs(piece.tokens, piece.logprobs, piece.tops),
            finish_reason=None,
        )
        yield self._chunk([choice.model_copy(update={"token_ids": list(piece.tokens)}) if self._body.return_token_ids else choice])

    def ended(self, ended: Ended) -> Iterable[ChatChunk]:
        for index, sequence in enumerate(ended.output.sequences):
            reading = self._readings[index]
            rest, calls = reading.end()
            if rest:
                yield self._last(index, Delta(content=rest), None)
            if calls:
                numbered = [call.model_copy(update={"index": at}) for at, call in enumerate(calls)]
                yield self._last(index, Delta(tool_calls=numbered), None)
            yield self._last(index, Delta(), reading.finish(sequence, calls))

    def closing(self, outputs: Sequence[SampleOutput]) -> Iterable[ChatChunk]:
        if self._body.includes_usage:
            yield self._chunk([]).model_copy(update={"usage": usage_of(self._asked.prompts, outputs)})

    def _choice(self, index: int, sequence: SampledSequence) -> ChatChoice:
        reading = self._readings[index]
        content = reading.push(sequence.tokens)
        rest, calls = reading.end()
        content += rest
        message = ChatMessage(content=None if calls and not content.strip() else content, refusal=None)
        choice = ChatChoice(
            index=index,
            message=message.model_copy(update={"tool_calls": calls}) if calls else message,
            logprobs=self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs),
            finish_reason=reading.finish(sequence, calls),
        )
        return choice.model_copy(update={"token_ids": sequence.tokens}) if self._body.return_token_ids else choice

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopRow | None] | None) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        tokenizer = self._asked.texts.tokenizer
        rows = [None] * len(tokens) if tops is None else tops
        return ChatLogprobs(
            content=[chat_logprob(tokenizer, token, logprob, row) for token, logprob, row in zip(tokens, logprobs, rows, strict=True)],
            refusal=None,
        )

    def _last(self, index: int, delta: Delta, reason: FinishReason | None) -> ChatChunk:
        return self._chunk([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=reason)])

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        """With a null for the usage that a later chunk tells, where one does."""
        chunk = ChatChunk(id=self._id, created=self._created, model=self._body.model, choices=choices)
        return chunk.model_copy(update={"usage": None}) if self._body.includes_usage else chunk
