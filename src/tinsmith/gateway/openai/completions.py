"""POST /v1/completions: the older API, over texts or token ids."""

import time
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway.deps import ServicesDep, TenantDep
from tinsmith.gateway.openai.answers import Completion, CompletionChoice, CompletionLogprobs, FinishReason, told
from tinsmith.gateway.openai.bodies import CompletionBody, read
from tinsmith.gateway.openai.generation import Ended, Piece
from tinsmith.gateway.openai.prompts import Asked, asked_completions
from tinsmith.gateway.openai.served import find
from tinsmith.gateway.openai.streaming import respond
from tinsmith.gateway.openai.tokens import completion_tops, usage_of
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, StopReason, TopRow
from tinsmith.text.transcripts import Transcript

router = APIRouter()


@router.post("/completions")
async def completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = await read(request, CompletionBody)
    asked = await asked_completions(request, services, body, await find(services, tenant, body.model))
    return await respond(request, services, tenant, body, asked, lambda rid: CompletionForm(rid, body, asked))


class CompletionForm:
    """A `Form`. Choice i belongs to prompt i // n."""

    def __init__(self, rid: str, body: CompletionBody, asked: Asked) -> None:
        self._id = f"cmpl-{rid}"
        self._created = int(time.time())
        self._body = body
        self._asked = asked
        self._transcripts = [self._transcript(prompt) for prompt in asked.prompts for _ in range(body.n)]
        self._unopened = set(range(len(self._transcripts)))

    def whole(self, outputs: Sequence[SampleOutput]) -> Completion:
        choices = [
            self._whole_choice(prompt, at, sequence)
            for prompt, output in enumerate(outputs)
            for at, sequence in enumerate(output.sequences)
        ]
        return self._chunk(choices).model_copy(update={"usage": usage_of(self._asked.prompts, outputs)})

    def opening(self) -> Iterable[Completion]:
        return ()

    def piece(self, piece: Piece) -> Iterable[Completion]:
        choice = self._choice(piece.prompt, piece.sequence, piece.tokens, piece.logprobs, piece.tops)
        return [self._streamed(choice)] if choice.text or self._body.logprobs is not None or self._body.return_token_ids else ()

    def ended(self, ended: Ended) -> Iterable[Completion]:
        for at, sequence in enumerate(ended.output.sequences):
            transcript = self._transcripts[self._index(ended.prompt, at)]
            choice = self._choice(ended.prompt, at, (), (), None)
            finish = {"text": choice.text + transcript.end(), "finish_reason": finish_reason(transcript, sequence)}
            yield self._streamed(choice.model_copy(update=finish))

    def closing(self, outputs: Sequence[SampleOutput]) -> Iterable[Completion]:
        if self._body.includes_usage:
            yield self._chunk([]).model_copy(update={"usage": usage_of(self._asked.prompts, outputs)})

    def _whole_choice(self, prompt: int, at: int, sequence: SampledSequence) -> CompletionChoice:
        choice = self._choice(prompt, at, sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        transcript = self._transcripts[self._index(prompt, at)]
        return choice.model_copy(update={"text": choice.text + transcript.end(), "finish_reason": finish_reason(transcript, sequence)})

    def _choice(
        self, prompt: int, at: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopRow | None] | None
    ) -> CompletionChoice:
        """With what the tokens add. The prompt's ids come with the first choice of that number."""
        index = self._index(prompt, at)
        transcript, text, offsets = self._transcripts[index], "", []
        for token in tokens:
            offsets.append(transcript.size)
            text += transcript.push(token)
        choice = CompletionChoice(index=index, text=text, logprobs=self._logprobs(tokens, logprobs, tops, offsets), finish_reason=None)
        if not self._body.return_token_ids:
            return choice
        ids: dict[str, list[int]] = {"token_ids": list(tokens)}
        if index in self._unopened:
            self._unopened.discard(index)
            ids["prompt_token_ids"] = self._asked.prompts[prompt]
        return choice.model_copy(update=ids)

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopRow | None] | None, offsets: list[int]
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not tokens:
            return None
        tokenizer = self._asked.texts.tokenizer
        rows = [None] * len(tokens) if tops is None else tops
        return CompletionLogprobs(
            tokens=[tokenizer.token_text(token) for token in tokens],
            token_logprobs=[told(logprob) for logprob in logprobs],
            top_logprobs=[
                completion_tops(tokenizer, token, logprob, row) for token, logprob, row in zip(tokens, logprobs, rows, strict=True)
            ],
            text_offset=offsets,
        )

    def _streamed(self, choice: CompletionChoice) -> Completion:
        """With a null for the usage that a later chunk tells, where one does."""
        chunk = self._chunk([choice])
        return chunk.model_copy(update={"usage": None}) if self._body.includes_usage else chunk

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._body.model, choices=choices)

    def _index(self, prompt: int, at: int) -> int:
        return prompt * self._body.n + at

    def _transcript(self, prompt: list[int]) -> Transcript:
        return Transcript(self._asked.texts.tokenizer, self._body.stops, after=prompt)


def finish_reason(transcript: Transcript, sequence: SampledSequence) -> FinishReason:
    return "stop" if transcript.is_stopped or sequence.stop_reason is StopReason.STOP else "length"
