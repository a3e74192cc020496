"""Sampling from one model as it was published: whole results, or tokens while they are drawn.

Knows nothing of training; its model never changes.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

from tinsmith.client.arrays import IntArrayLike, int_array
from tinsmith.client.errors import ClientValidationError, checked_arguments
from tinsmith.client.futures import AsyncFuture, Tasks, reader
from tinsmith.client.streams import AsyncStream
from tinsmith.protocol import native
from tinsmith.protocol.native import ChatMessage
from tinsmith.protocol.native_answers import SampleResult

_SEED_BITS = 31  # of a seed that is drawn here

Messages = Sequence[ChatMessage | Mapping[str, str]]


class AsyncSamplingClient:
    """Made by `AsyncClient.sampling` and `AsyncTrainingClient.publish_sampler_weights`."""

    def __init__(self, tasks: Tasks, sampler_id: str) -> None:
        self._tasks = tasks
        self._numbers = count()
        self.sampler_id = sampler_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sampler_id!r})"

    async def sample(
        self,
        *,
        prompt_ids: IntArrayLike | None = None,
        messages: Messages | None = None,
        text: str | None = None,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> AsyncFuture[SampleResult]:
        """Draw `num_samples` continuations of one prompt: token ids, a chat, or a text.

        temperature 0 is greedy; top_k -1 and top_p 1 are off; a seeded call answers the same each time. Without `stop` and `stop_token_ids`
        the end-of-sequence token stops. Raises ClientValidationError, HttpError, ConnectionFailed.
        """
        request = self._request(
            native.Sample,
            prompt_ids=prompt_ids,
            messages=messages,
            text=text,
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return await self._tasks.submit(request, reader(SampleResult))

    def stream(
        self,
        *,
        prompt_ids: IntArrayLike | None = None,
        messages: Messages | None = None,
        text: str | None = None,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> AsyncStream:
        """As `sample`, told while the tokens are drawn: `async for frame in stream`. The last frame (`done`) holds the whole result.

        A stream without a seed gets one, so that a sample that has to be drawn again has the same tokens. Nothing is sent before the first
        frame is asked for. Raises ClientValidationError.
        """
        request = self._request(
            native.SampleStream,
            prompt_ids=prompt_ids,
            messages=messages,
            text=text,
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return AsyncStream(self._tasks.transport, request, partial(next, self._numbers))

    def _request(
        self,
        kind: type[native.Sample],
        *,
        prompt_ids: IntArrayLike | None,
        messages: Messages | None,
        text: str | None,
        num_samples: int,
        max_tokens: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int | None,
        stop: Sequence[str] | None,
        stop_token_ids: Sequence[int] | None,
        prompt_logprobs: bool,
        topk_prompt_logprobs: int,
    ) -> native.Sample:
        with checked_arguments():
            options = native.SamplingOptions(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=None if stop is None else tuple(stop),
                stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
            )
            return kind(
                sampler_id=self.sampler_id,
                seq_id=next(self._numbers),
                prompt_ids=None if prompt_ids is None else int_array("prompt_ids", prompt_ids),
                messages=None if messages is None else chat("messages", messages),
                text=text,
                num_samples=num_samples,
                sampling=options,
                prompt_logprobs=prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
            )


def chat(field: str, messages: Messages) -> tuple[ChatMessage, ...]:
    """Raises ClientValidationError naming `field`."""
    return tuple(_message(f"{field}.{place}", message) for place, message in enumerate(messages))


def _message(field: str, given: ChatMessage | Mapping[str, str]) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    if not isinstance(given, Mapping):
        raise ClientValidationError(field, "must be a message with role and content")
    with checked_arguments(field):
        return ChatMessage.model_validate(dict(given))
