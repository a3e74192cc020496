"""The native protocol: every request under /native/v1, for server and client alike, and what its task comes to.

A client builds the request that it means and serialises it once; the server validates the same class. Requests are closed to unknown
fields, and strict: no text or boolean passes for a number. Who calls is said by headers and never by a body.

Each field of a training or sampling request has one role (`fields_of`): CONTROL fields say where a command belongs and never reach an
engine; ENGINE fields are for engines that know them (`protocol/capabilities.py`), forwarded unless null; PAYLOAD is the command.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tinsmith.protocol.arrays import IntArray, NumberArray
from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.native_answers import (
    ModelCreated,
    PassResult,
    SampleResult,
    StepResult,
    WeightsLoaded,
    WeightsPublished,
    WeightsSaved,
)
from tinsmith.protocol.sampling import MAX_NUM_SAMPLES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOP_K
from tinsmith.protocol.sessions import MAX_TAGS, MAX_TEXT, MAX_TTL_S, MIN_TTL_S
from tinsmith.protocol.training import MAX_LORA_RANK, AdamParams, LrSchedule, SgdParams
from tinsmith.protocol.wire_bounds import MAX_CONFIG, MAX_DATUMS, MAX_SAMPLE_SEQ, MAX_SEQ, MAX_TENSORS

PREFIX = "/native/v1"
PROTOCOL_VERSION = "1"
MAX_TURNS = 1024  # messages of one conversation
MAX_MESSAGES = 16_384  # of all conversations of one command
MAX_CHARACTERS = 4 * 2**20  # of the texts or contents of one command, or of a prompt: about a full command of tokens with their targets
MAX_RENDERED = 3 * 2**30  # characters written to find the assistant's turns of a command or prompt; MAX_TURNS by turns of two pass
MAX_RETRIEVED = 64  # request ids of one retrieve_futures
MAX_SEED = 2**63 - 1


class FieldRole(StrEnum):
    CONTROL = "control"
    ENGINE = "engine"
    PAYLOAD = "payload"


class StrictRequest(BaseModel):
    """Base of every request. `path` is below PREFIX."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    path: ClassVar[str]


class StrictPart(BaseModel):
    """Base of what a request is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def fields_of(request: type[StrictRequest], role: FieldRole) -> tuple[str, ...]:
    """The fields of that role, in order; a field without a mark is PAYLOAD."""
    return tuple(name for name, field in request.model_fields.items() if _role(field.metadata) is role)


def _role(metadata: list[object]) -> FieldRole:
    marks = [mark for mark in metadata if isinstance(mark, FieldRole)]
    return marks[0] if marks else FieldRole.PAYLOAD


Id = Annotated[str, Field(min_length=1, max_length=256)]
SessionId = Annotated[Id, FieldRole.CONTROL]
ModelId = Annotated[Id, FieldRole.CONTROL]
SamplerId = Annotated[Id, FieldRole.CONTROL]
RequestId = Annotated[Id, FieldRole.CONTROL]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ), FieldRole.CONTROL]  # a model's calls are counted from 1
Number = Annotated[int, Field(ge=0, le=MAX_SEQ), FieldRole.CONTROL]  # a session's models and samplers are counted from 0
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
Metadata = Annotated[dict[str, str], Field(max_length=256)]
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


# Sessions and models.


class CreateSession(StrictRequest):
    """Models and samplers belong to a session. It ends by `EndSession`, or after five minutes without a heartbeat."""

    path: ClassVar[str] = "/create_session"
    tags: Annotated[tuple[Text, ...], Field(max_length=MAX_TAGS)] = ()
    metadata: Metadata | None = None
    project_id: Text | None = None
    display_name: Text | None = None


class Heartbeat(StrictRequest):
    path: ClassVar[str] = "/heartbeat"
    session_id: SessionId


class EndSession(StrictRequest):
    path: ClassVar[str] = "/end_session"
    session_id: SessionId
    reason: Literal["success", "errored", "interrupted"] = "success"


class LoraOptions(StrictPart):
    """`seed` fixes the initial weights; without one it follows from the request's id. At least one train flag is true."""

    rank: Annotated[int, Field(ge=1, le=MAX_LORA_RANK)] = 32
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("train_attn, train_mlp, train_unembed: at least one must be true")
        return self


class AdamWConfig(StrictPart):
    """AdamW as torch.optim.AdamW computes it. `max_grad_norm` null: no clipping."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None

    def params(self) -> AdamParams:
        return AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=0.0 if self.max_grad_norm is None else self.max_grad_norm,
        )


class SgdConfig(StrictPart):
    """SGD as torch.optim.SGD computes it. `max_grad_norm` null: no clipping."""

    type: Literal["sgd"] = "sgd"
    learning_rate: Annotated[float, Field(ge=0)] = 1e-2
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None

    def params(self) -> SgdParams:
        return SgdParams(
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            grad_clip_norm=0.0 if self.max_grad_norm is None else self.max_grad_norm,
        )


OptimizerConfig = Annotated[AdamWConfig | SgdConfig, Field(discriminator="type")]


class CreateModel(StrictRequest):
    """A new adapter on a base model, or on the weights of a `checkpoint` (its LoRA shape is then the checkpoint's).

    `optimizer` and `schedule` are kept with the adapter: steps that name none use them. A model of one optimizer takes no step of another.
    """

    path: ClassVar[str] = "/create_model"
    session_id: SessionId
    model_seq: Number
    base_model: Text | None = None
    lora: LoraOptions | None = None
    checkpoint: Path | None = None
    load_optimizer: bool = False
    optimizer: OptimizerConfig | None = None
    schedule: LrSchedule | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _begins_somewhere(self) -> Self:
        if self.checkpoint is None and self.base_model is None:
            raise ValueError("base_model, checkpoint: send one of them")
        if self.checkpoint is not None and self.lora is not None:
            raise ValueError("lora: the checkpoint has its own; leave lora out")
        if self.checkpoint is None and self.load_optimizer:
            raise ValueError("load_optimizer: there is no checkpoint to load from; leave it out")
        return self


class UnloadModel(StrictRequest):
    path: ClassVar[str] = "/unload_model"
    model_id: ModelId


# Training.


class TokenBatch(StrictPart):
    """Columns: row b of each belongs to sequence b. Rows may differ in length.

    `input_ids`: [T], one sequence, or [B,T]. `inputs`: what the loss reads, by name (capabilities list them): one value a token ([T],
    [B,T]), or several where the loss takes several targets a token ([T,K], [B,T,K]). Targets are shifted: target t follows token t.
    """

    input_ids: IntArray
    inputs: Annotated[dict[str, NumberArray], Field(max_length=MAX_TENSORS)] = {}


class ChatMessage(StrictPart):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Conversation(StrictPart):
    """Rendered by the base model's chat template; loss on the assistant's turns alone.

    A content that holds a control token of the base model, such as its end of a turn, is refused. The conversations of one command have
    at most 16,384 messages and 4 Mi characters, and each at most what a context holds. Each assistant's turn takes a rendering of all that
    is before it, so many conversations of very many turns need several commands.
    """

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_TURNS)]


class ModelRequest(StrictRequest):
    """A call of a model. The seq ids of a model's calls are consecutive; a call that is refused gives its seq id back."""

    model_id: ModelId
    seq_id: SeqId


class PassRequest(ModelRequest):
    """Data, in one of three forms, and a loss. `texts` are tokenized as they are; with a loss that has targets, every token is one.

    Control tokens in `texts` are read as such. `texts` are bounded in characters as conversations are.

    `micro_batch_tokens`: padded tokens of one pass through the model, in place of the trainer's own bound; changes no sum.
    """

    batch: TokenBatch | None = None
    conversations: Annotated[tuple[Conversation, ...], Field(min_length=1, max_length=MAX_DATUMS)] | None = None
    texts: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_DATUMS)] | None = None
    loss: Annotated[str, Field(max_length=64)] = "cross_entropy"
    loss_config: Annotated[dict[str, float], Field(max_length=MAX_CONFIG)] = {}
    micro_batch_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQ), FieldRole.ENGINE] = None

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if sum(form is not None for form in (self.batch, self.conversations, self.texts)) != 1:
            raise ValueError("batch, conversations, texts: send exactly one of them")
        return self


class Forward(PassRequest):
    path: ClassVar[str] = "/forward"


class ForwardBackward(PassRequest):
    path: ClassVar[str] = "/forward_backward"


class Evaluate(PassRequest):
    """A forward pass that answers metrics alone."""

    path: ClassVar[str] = "/evaluate"


class OptimStep(ModelRequest):
    """`optimizer` null: as the model was created with."""

    path: ClassVar[str] = "/optim_step"
    optimizer: OptimizerConfig | None = None


class TrainStep(PassRequest):
    """forward_backward and optim_step in one command: both take effect, or neither does."""

    path: ClassVar[str] = "/train_step"
    optimizer: OptimizerConfig | None = None


class SaveWeights(ModelRequest):
    path: ClassVar[str] = "/save_weights"
    name: Path
    overwrite: bool = False
    ttl_s: Ttl | None = None
    metadata: Metadata | None = None


class LoadWeights(ModelRequest):
    path: ClassVar[str] = "/load_weights"
    checkpoint: Path
    load_optimizer: bool = False


class PublishSamplerWeights(ModelRequest):
    """The adapter as it is at this call, frozen for sampling: under a name, or for the one sampler of `sampler_seq`."""

    path: ClassVar[str] = "/publish_sampler_weights"
    name: Path | None = None
    sampler_seq: Annotated[int | None, Field(ge=0, le=MAX_SEQ), FieldRole.CONTROL] = None
    ttl_s: Ttl | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _has_one_name(self) -> Self:
        if (self.name is None) == (self.sampler_seq is None):
            raise ValueError("name, sampler_seq: send exactly one of them")
        return self


# Sampling.


class CreateSampler(StrictRequest):
    """A base model, or one with the adapter of a sampler `checkpoint`."""

    path: ClassVar[str] = "/create_sampler"
    session_id: SessionId
    sampler_seq: Number
    base_model: Text | None = None
    checkpoint: Path | None = None

    @model_validator(mode="after")
    def _samples_something(self) -> Self:
        if self.checkpoint is None and self.base_model is None:
            raise ValueError("base_model, checkpoint: send one of them")
        return self


class SamplingOptions(StrictPart):
    """temperature 0 is greedy; top_k -1 and top_p 1 are off. `stop` null: the end-of-sequence token stops; empty: nothing does before
    max_tokens. A seeded request answers the same each time. `max_tokens` null: up to the context limit."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_SEQ)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEQ)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)], ...], Field(max_length=MAX_STOPS)] | None = (
        None
    )
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MAX_STOPS)] | None = None

    @model_validator(mode="after")
    def _has_one_stop(self) -> Self:
        if self.stop is not None and self.stop_token_ids is not None:
            raise ValueError("stop, stop_token_ids: send one of them")
        return self


class Sample(StrictRequest):
    """A prompt in one of three forms. A sampler's seq ids need be neither consecutive nor in order; the same one again is a repeat.

    `text` is tokenized as it is, control tokens included; `messages` whose content holds one are refused.
    """

    path: ClassVar[str] = "/sample"
    sampler_id: SamplerId
    seq_id: Annotated[int, Field(ge=0, le=MAX_SAMPLE_SEQ), FieldRole.CONTROL]
    prompt_ids: IntArray | None = None
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_TURNS)] | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    num_samples: Annotated[int, Field(ge=1, le=MAX_NUM_SAMPLES)] = 1
    sampling: SamplingOptions = SamplingOptions()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if sum(form is not None for form in (self.prompt_ids, self.messages, self.text)) != 1:
            raise ValueError("prompt_ids, messages, text: send exactly one of them")
        return self


class SampleStream(Sample):
    """Answers lines of JSON (`StreamFrame`) while the tokens are drawn."""

    path: ClassVar[str] = "/sample_stream"


# Tasks.


class RetrieveFuture(StrictRequest):
    path: ClassVar[str] = "/retrieve_future"
    request_id: RequestId


class RetrieveFutures(StrictRequest):
    """Answers as soon as one of them has ended, with the envelope of each."""

    path: ClassVar[str] = "/retrieve_futures"
    request_ids: Annotated[tuple[Id, ...], Field(min_length=1, max_length=MAX_RETRIEVED), FieldRole.CONTROL]


class CancelFuture(StrictRequest):
    """Drops a command that has not started."""

    path: ClassVar[str] = "/cancel"
    request_id: RequestId


class Drain(StrictRequest):
    """An operator's order to one process (ids: /status): take nothing more, finish, snapshot, hand back. Its deployment starts another."""

    path: ClassVar[str] = "/drain"
    process_id: Id


REQUESTS: tuple[type[StrictRequest], ...] = (
    CancelFuture,
    CreateModel,
    CreateSampler,
    CreateSession,
    Drain,
    EndSession,
    Evaluate,
    Forward,
    ForwardBackward,
    Heartbeat,
    LoadWeights,
    OptimStep,
    PublishSamplerWeights,
    RetrieveFuture,
    RetrieveFutures,
    Sample,
    SampleStream,
    SaveWeights,
    TrainStep,
    UnloadModel,
)

RESULTS: Mapping[str, type[Answer]] = {
    Forward.path: PassResult,
    ForwardBackward.path: PassResult,
    Evaluate.path: StepResult,
    OptimStep.path: StepResult,
    TrainStep.path: PassResult,
    CreateModel.path: ModelCreated,
    SaveWeights.path: WeightsSaved,
    LoadWeights.path: WeightsLoaded,
    PublishSamplerWeights.path: WeightsPublished,
    Sample.path: SampleResult,
}  # what the envelope of each queued request holds
