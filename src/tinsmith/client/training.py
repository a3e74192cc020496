"""One model under training: its commands, in order.

Knows nothing of what a loss computes; the names and inputs of losses are the server's (`client.capabilities()`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload
from urllib.parse import quote

from tinsmith.client.arrays import IntArrayLike, NumberArrayLike, PassResult, int_array, number_arrays
from tinsmith.client.errors import ClientValidationError, HttpError, checked_arguments
from tinsmith.client.futures import AsyncFuture, Read, Tasks, reader
from tinsmith.client.sampling import AsyncSamplingClient, Messages, chat
from tinsmith.client.session import Session
from tinsmith.protocol import native
from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.errors import ReasonCode
from tinsmith.protocol.native import AdamWConfig, Conversation, ModelRequest, PassRequest, SgdConfig, TokenBatch
from tinsmith.protocol.native_answers import ModelInfo, StepResult, WeightsLoaded, WeightsPublished, WeightsSaved

Conversations = Sequence[Conversation | Messages]

T = TypeVar("T")
P = TypeVar("P", bound=PassRequest)


class AsyncTrainingClient:
    """Made by `AsyncClient.training`. Each command is awaited twice: the call submits it, the future that it gives waits for its result.

    Commands take effect in the order of the calls, whatever the order in which their results are waited for; submit as far ahead as
    you like. A call that is refused (HttpError) had no effect, and the next call takes its place in the order.

    Data comes as `input_ids` with the `inputs` of the loss, as a ready `batch` of both, as `conversations` (loss on the assistant's
    turns), or as `texts`. Losses are sums over tokens. `loss_config` and `inputs` hold what `client.capabilities()` lists for the loss.
    `micro_batch_tokens`: padded tokens of one pass through the model; changes no sum.
    """

    def __init__(self, tasks: Tasks, session: Session, model_id: str) -> None:
        self._tasks = tasks
        self._session = session
        self._order = _Order(tasks, model_id)
        self.model_id = model_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_id!r})"

    async def forward(
        self,
        *,
        input_ids: IntArrayLike | None = None,
        inputs: Mapping[str, NumberArrayLike] | None = None,
        batch: TokenBatch | None = None,
        conversations: Conversations | None = None,
        texts: Sequence[str] | None = None,
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
        micro_batch_tokens: int | None = None,
    ) -> AsyncFuture[PassResult]:
        """Log-probs (or embeddings) and metrics; leaves the model as it is."""
        given = _Pass(input_ids, inputs, batch, conversations, texts, loss, loss_config, micro_batch_tokens)
        return await self._order.submit(given.request(native.Forward, self.model_id), reader(PassResult))

    async def forward_backward(
        self,
        *,
        input_ids: IntArrayLike | None = None,
        inputs: Mapping[str, NumberArrayLike] | None = None,
        batch: TokenBatch | None = None,
        conversations: Conversations | None = None,
        texts: Sequence[str] | None = None,
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
        micro_batch_tokens: int | None = None,
    ) -> AsyncFuture[PassResult]:
        """As `forward`, and adds to the gradient that the next optimizer step uses up."""
        given = _Pass(input_ids, inputs, batch, conversations, texts, loss, loss_config, micro_batch_tokens)
        return await self._order.submit(given.request(native.ForwardBackward, self.model_id), reader(PassResult))

    async def evaluate(
        self,
        *,
        input_ids: IntArrayLike | None = None,
        inputs: Mapping[str, NumberArrayLike] | None = None,
        batch: TokenBatch | None = None,
        conversations: Conversations | None = None,
        texts: Sequence[str] | None = None,
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
        micro_batch_tokens: int | None = None,
    ) -> AsyncFuture[StepResult]:
        """The metrics of `forward` alone."""
        given = _Pass(input_ids, inputs, batch, conversations, texts, loss, loss_config, micro_batch_tokens)
        return await self._order.submit(given.request(native.Evaluate, self.model_id), reader(StepResult))

    async def optim_step(self, *, optimizer: AdamWConfig | SgdConfig | None = None) -> AsyncFuture[StepResult]:
        """One step with the gradient so far. `optimizer`: in place of the one that the model was created with."""
        with checked_arguments():
            request = native.OptimStep(model_id=self.model_id, seq_id=1, optimizer=optimizer)
        return await self._order.submit(request, reader(StepResult))

    async def train_step(
        self,
        *,
        input_ids: IntArrayLike | None = None,
        inputs: Mapping[str, NumberArrayLike] | None = None,
        batch: TokenBatch | None = None,
        conversations: Conversations | None = None,
        texts: Sequence[str] | None = None,
        loss: str = "cross_entropy",
        loss_config: Mapping[str, float] | None = None,
        micro_batch_tokens: int | None = None,
        optimizer: AdamWConfig | SgdConfig | None = None,
    ) -> AsyncFuture[PassResult]:
        """`forward_backward` and `optim_step` in one command: both take effect, or neither does."""
        given = _Pass(input_ids, inputs, batch, conversations, texts, loss, loss_config, micro_batch_tokens)
        return await self._order.submit(given.request(native.TrainStep, self.model_id, optimizer), reader(PassResult))

    async def save_weights(
        self, *, name: str, overwrite: bool = False, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncFuture[WeightsSaved]:
        """A checkpoint to go on training from, optimizer state included."""
        with checked_arguments():
            request = native.SaveWeights(
                model_id=self.model_id, seq_id=1, name=name, overwrite=overwrite, ttl_s=ttl_s, metadata=_plain(metadata)
            )
        return await self._order.submit(request, reader(WeightsSaved))

    async def load_weights(self, *, checkpoint: str, load_optimizer: bool = False) -> AsyncFuture[WeightsLoaded]:
        """Put a saved checkpoint in place of the model's weights; with its optimizer state, or a fresh one."""
        with checked_arguments():
            request = native.LoadWeights(model_id=self.model_id, seq_id=1, checkpoint=checkpoint, load_optimizer=load_optimizer)
        return await self._order.submit(request, reader(WeightsLoaded))

    @overload
    async def publish_sampler_weights(
        self, *, name: str, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncFuture[WeightsPublished]: ...

    @overload
    async def publish_sampler_weights(self) -> AsyncFuture[AsyncSamplingClient]: ...

    async def publish_sampler_weights(
        self, *, name: str | None = None, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncFuture[WeightsPublished] | AsyncFuture[AsyncSamplingClient]:
        """Freeze the weights as they are after the commands so far. With a name: as a checkpoint, which `AsyncClient.sampling` opens.
        Without: for the sampling client that the future gives, as long as the session lasts."""
        if name is None:
            check_unnamed(ttl_s, metadata)
            return await self._publish_unnamed()
        with checked_arguments():
            request = native.PublishSamplerWeights(model_id=self.model_id, seq_id=1, name=name, ttl_s=ttl_s, metadata=_plain(metadata))
        return await self._order.submit(request, reader(WeightsPublished))

    async def info(self) -> ModelInfo:
        """What the server knows of the model; answers also while the model is busy. Raises HttpError, ConnectionFailed."""
        return await self._order.info()

    async def unload(self) -> None:
        """Drop the model and what of its work has not run. Its checkpoints stay."""
        await self._tasks.transport.post(native.UnloadModel(model_id=self.model_id), Answer)

    async def _publish_unnamed(self) -> AsyncFuture[AsyncSamplingClient]:
        request = native.PublishSamplerWeights(model_id=self.model_id, seq_id=1, sampler_seq=next(self._session.sampler_numbers))
        return await self._order.submit(
            request, lambda result: AsyncSamplingClient(self._tasks, _Sampler.model_validate(result).sampler_id)
        )


@dataclass(frozen=True)
class _Pass:
    """The data and the loss of one call, as they were given."""

    input_ids: IntArrayLike | None
    inputs: Mapping[str, NumberArrayLike] | None
    batch: TokenBatch | None
    conversations: Conversations | None
    texts: Sequence[str] | None
    loss: str
    loss_config: Mapping[str, float] | None
    micro_batch_tokens: int | None

    def request(self, kind: type[P], model_id: str, optimizer: AdamWConfig | SgdConfig | None = None) -> P:
        """Raises ClientValidationError."""
        fields: dict[str, object] = {
            "model_id": model_id,
            "seq_id": 1,
            "batch": self._batch(),
            "conversations": self._conversations(),
            "texts": _tuple("texts", self.texts),
            "loss": self.loss,
            "loss_config": {} if self.loss_config is None else dict(self.loss_config),
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        if optimizer is not None:
            fields["optimizer"] = optimizer
        with checked_arguments():
            return kind.model_validate(fields)

    def _batch(self) -> TokenBatch | None:
        if self.input_ids is None:
            if self.inputs is not None:
                raise ClientValidationError("inputs", "need input_ids beside them")
            return self.batch
        if self.batch is not None:
            raise ClientValidationError("input_ids", "and batch: send exactly one of them")
        inputs = {} if self.inputs is None else number_arrays("inputs", self.inputs)
        with checked_arguments():
            return TokenBatch(input_ids=int_array("input_ids", self.input_ids), inputs=inputs)

    def _conversations(self) -> tuple[Conversation, ...] | None:
        if self.conversations is None:
            return None
        return tuple(_conversation(f"conversations.{place}", given) for place, given in enumerate(self.conversations))


class _Order:
    """The seq ids of one model. One submit at a time, so a refused one can give its seq id to the next."""

    def __init__(self, tasks: Tasks, model_id: str) -> None:
        self._tasks = tasks
        self._model_id = model_id
        self._turn = asyncio.Lock()
        self._next = 1
        self._is_known = True  # False: a call came to no clear end, so the server must say which seq id is next

    async def submit(self, request: ModelRequest, read: Read[T]) -> AsyncFuture[T]:
        """Send it under the next seq id. Raises as `Transport.post`."""
        self._tasks.transport.check_loop()
        async with self._turn:
            if not self._is_known:
                await self._ask()
            self._is_known = False
            try:
                future = await self._tasks.submit(request.model_copy(update={"seq_id": self._next}), read)
            except HttpError as error:
                self._is_known = _left_no_trace(error)
                raise
            except ClientValidationError:
                self._is_known = True
                raise
            self._next += 1
            self._is_known = True
            return future

    async def info(self) -> ModelInfo:
        return await self._tasks.transport.get(f"/models/{quote(self._model_id, safe='')}", ModelInfo)

    async def _ask(self) -> None:
        info = await self.info()
        if info.next_seq is not None:
            self._next = info.next_seq


def check_unnamed(ttl_s: int | None, metadata: Mapping[str, str] | None) -> None:
    """Raises ClientValidationError for what only sampler weights with a name can have."""
    if ttl_s is not None or metadata is not None:
        raise ClientValidationError("name", "is missing: ttl_s and metadata belong to a checkpoint with a name")


class _Sampler(Answer):
    """`WeightsPublished` of a sampler without a name."""

    sampler_id: str


def _left_no_trace(error: HttpError) -> bool:
    """Whether the seq id of the refused call is free. Not so where the server has another body under it."""
    return not error.may_have_arrived and error.reason is not ReasonCode.REQUEST_REJECTED


def _conversation(field: str, given: Conversation | Messages) -> Conversation:
    if isinstance(given, Conversation):
        return given
    with checked_arguments(field):
        return Conversation(messages=chat(field, given))


def _tuple(field: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """A text alone is a sequence too, of its letters: that is never meant."""
    if isinstance(given, str):
        raise ClientValidationError(field, "must be a list of texts")
    return None if given is None else tuple(given)


def _plain(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if metadata is None else dict(metadata)
