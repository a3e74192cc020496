"""From queued samples to the answer of a request under /v1: whole, or as server-sent events, `[DONE]` the last of them.

Both tell the same: a `Form` writes them, chat or completions. An error after the first event is an event of its own, and no `[DONE]`
follows it. A caller that leaves ends its samples.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.gateway.bodies import off_loop
from tinsmith.gateway.deps import Services
from tinsmith.gateway.ndjson import LinesAnswer
from tinsmith.gateway.openai.bodies import SamplingBody
from tinsmith.gateway.openai.errors import answer_of
from tinsmith.gateway.openai.generation import Ended, Generation, Piece, begin, unless_left
from tinsmith.gateway.openai.prompts import Asked
from tinsmith.gateway.openai.writing import encoded, written
from tinsmith.protocol.errors import TinsmithError
from tinsmith.protocol.sampling import SampleOutput

DONE = b"data: [DONE]\n"
_READ_S = 10.0  # a caller has this time to read the last events after the bound of its samples
_INLINE_TOKENS = 4096  # told at once, their alternatives included: writing more leaves the event loop


class Form(Protocol):
    """Writes the answer to one request; `opening`, `piece`, `ended` and `closing` are chunks of a stream, in that order."""

    def whole(self, outputs: Sequence[SampleOutput]) -> BaseModel: ...

    def opening(self) -> Iterable[BaseModel]: ...

    def piece(self, piece: Piece) -> Iterable[BaseModel]: ...

    def ended(self, ended: Ended) -> Iterable[BaseModel]: ...

    def closing(self, outputs: Sequence[SampleOutput]) -> Iterable[BaseModel]: ...


class FormOf(Protocol):
    """`rid`: by which the answer goes."""

    def __call__(self, rid: str) -> Form: ...


class EventsAnswer(LinesAnswer):
    """A line and an empty one make an event."""

    media_type = "text/event-stream"


async def respond(request: Request, services: Services, tenant: str, body: SamplingBody, asked: Asked, form_of: FormOf) -> Response:
    """Raises what a queue refuses for; without a stream also what the samples failed with, and ClientDisconnect."""
    # Alternatives come with the result alone, so a stream that tells them tells all of it then.
    is_told = body.stream and not any(sample.topk_sample_logprobs for sample in asked.samples)
    generation = await begin(services, tenant, asked.served, asked.samples, seed=body.seed, is_told=is_told)
    form = form_of(generation.rid)
    if body.stream:
        return EventsAnswer(_events(generation, form), generation.release, bound_s=services.config.execution.timeout_s + _READ_S)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(generation.release)
        outputs = await unless_left(request, generation.outputs())
    is_large = _num_cells(outputs) > _INLINE_TOKENS
    return await written(await off_loop(lambda: form.whole(outputs), is_large=is_large), is_large=is_large)


async def _events(generation: Generation, form: Form) -> AsyncGenerator[bytes]:
    try:
        async with contextlib.aclosing(_chunks(generation, form)) as chunks:
            async for chunk in chunks:
                yield chunk
    except TinsmithError as error:
        yield _event(answer_of(error))
        return
    yield DONE


async def _chunks(generation: Generation, form: Form) -> AsyncGenerator[bytes]:
    for chunk in form.opening():
        yield _event(chunk)
    outputs: dict[int, SampleOutput] = {}
    async with contextlib.aclosing(generation.told()) as told:
        async for item in told:
            for event in await _written(form, item):
                yield event
            if isinstance(item, Ended):
                outputs[item.prompt] = item.output
    for chunk in form.closing([outputs[prompt] for prompt in sorted(outputs)]):
        yield _event(chunk)


async def _written(form: Form, item: Piece | Ended) -> list[bytes]:
    if isinstance(item, Ended):
        return [_event(chunk) for chunk in form.ended(item)]
    size = len(item.tokens) + sum(len(row) for row in item.tops or () if row is not None)
    return await off_loop(lambda: [_event(chunk) for chunk in form.piece(item)], is_large=size > _INLINE_TOKENS)


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + encoded(chunk) + b"\n"


def _num_cells(outputs: Sequence[SampleOutput]) -> int:
    sequences = [sequence for output in outputs for sequence in output.sequences]
    num_tops = sum(len(row) for sequence in sequences for row in sequence.topk_logprobs or () if row is not None)
    return sum(len(sequence.tokens) for sequence in sequences) + num_tops
