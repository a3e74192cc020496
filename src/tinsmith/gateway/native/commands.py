"""Native requests as commands: pure functions of a request, the model's record and the texts of its base model.

Called off the event loop where a request is large. Fields that say where a command belongs stay here; an engine's own field goes on where
it is not null.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from tinsmith.gateway.preflight import check_compute
from tinsmith.gateway.submission import derived_seed
from tinsmith.protocol import native
from tinsmith.protocol.arrays import Array
from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.loss_checks import FieldNames
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.native import AdamWConfig, Conversation, Evaluate, Forward, LoraOptions, PassRequest, SgdConfig, TokenBatch
from tinsmith.protocol.sampling import SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo, ModelRecord
from tinsmith.protocol.tensors import DType, Tensor, int64_values
from tinsmith.protocol.training import Compute, LoraConfig, OptimStep
from tinsmith.protocol.wire_bounds import MAX_DATUMS, check_command_size, check_count, check_parts
from tinsmith.text.conversations import Conversations, Rendered

_TARGETS, _WEIGHTS = "target_tokens", "weights"
_LARGEST_ID = 2**31 - 1
_BATCH_NAMES = FieldNames(
    loss="loss",
    config="loss_config",
    data="batch",
    datum="batch.input_ids[{}]",
    tokens="batch.input_ids[{}]",
    inputs="batch.inputs",
    input="batch.inputs.{1}[{0}]",
)


def compute_of(body: PassRequest, base: BaseModelInfo, texts: Conversations | None) -> Compute:
    """`texts` is there where the request holds text, whose bounds were checked (`text_bounds`). Raises ValidationFailed,
    InputTokensExceeded, PayloadTooLarge."""
    data = tuple(_bounded(_data(body, base, texts)))
    command = Compute(
        data=data,
        loss_fn=body.loss,
        loss_fn_config=dict(sorted(body.loss_config.items())),
        backward=not isinstance(body, Forward | Evaluate),
        metrics_only=isinstance(body, Evaluate),
        micro_batch_tokens=body.micro_batch_tokens,
    )
    check_compute(command, base, _names(body))
    return command


def num_ids(ids: Array) -> int:
    """How many there are, whatever their form."""
    if isinstance(ids.value, Tensor):
        return prod(ids.value.shape)
    return len(ids.value) if ids.rank == 1 else sum(map(len, ids.value))


def text_form(body: PassRequest) -> str | None:
    """The field that cannot be read without a tokenizer."""
    if body.conversations is not None:
        return "conversations"
    return None if body.texts is None else "texts"


def step_of(optimizer: AdamWConfig | SgdConfig | None, model: ModelRecord) -> OptimStep:
    """As the request says, or else as the model was created with, its schedule included."""
    if optimizer is not None:
        return OptimStep(optimizer=optimizer.params())
    return OptimStep(optimizer=AdamWConfig().params() if model.optimizer is None else model.optimizer, schedule=model.schedule)


def lora_of(options: LoraOptions | None, rid: str) -> LoraConfig:
    """Without a seed it follows from the request's id."""
    asked = LoraOptions() if options is None else options
    return LoraConfig(**asked.model_dump(exclude={"seed"}), seed=derived_seed(rid) if asked.seed is None else asked.seed)


def prompt_of(body: native.Sample, texts: Conversations | None) -> ModelInput:
    """`texts` as in `compute_of`. Raises ValidationFailed."""
    if body.prompt_ids is not None:
        return _model_input(_one_row(body.prompt_ids, "prompt_ids"), "prompt_ids")
    if texts is None:
        raise ValidationFailed("messages, text: the base model has no tokenizer; send prompt_ids")
    if body.messages is not None:
        return _packed(texts.prompt([message.model_dump() for message in body.messages]))
    return _packed(texts.encode(body.text or ""))


def sampling_of(body: native.Sample, rid: str) -> SamplingParams:
    """Without a seed it follows from the request's id."""
    asked = body.sampling
    return SamplingParams(
        seed=derived_seed(rid) if asked.seed is None else asked.seed,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        stop=asked.stop if asked.stop_token_ids is None else asked.stop_token_ids,
    )


def _names(body: PassRequest) -> FieldNames:
    """What the request calls what the command holds. Text has no inputs of its own."""
    form = text_form(body)
    return _BATCH_NAMES if form is None else replace(_BATCH_NAMES, data=form, datum=f"{form}[{{}}]", tokens=f"{form}[{{}}]")


def _data(body: PassRequest, base: BaseModelInfo, texts: Conversations | None) -> Iterator[Datum]:
    if body.batch is not None:
        yield from _columns(body.batch)
        return
    if texts is None:
        raise ValidationFailed("conversations, texts: the base model has no tokenizer; send token ids")
    has_targets = body.loss not in LOSSES or _TARGETS in LOSSES[body.loss].inputs
    if body.conversations is not None:
        for index, conversation in enumerate(body.conversations):
            yield _supervised(conversation, f"conversations[{index}]", base, texts, has_targets=has_targets)
    else:
        for index, text in enumerate(body.texts or ()):
            yield _plain(texts.encode(text), f"texts[{index}]", base, has_targets=has_targets)


def _bounded(data: Iterable[Datum]) -> Iterator[Datum]:
    """The data, no more than a command may hold: what is over a bound is not made."""
    num_parts, size = 0, 0
    for datum in data:
        num_parts += 1 + len(datum.loss_fn_inputs)
        size += _size(datum)
        check_parts(num_parts)
        check_command_size(size)
        yield datum


# Token ids, by column.


def _columns(batch: TokenBatch) -> Iterator[Datum]:
    rows = _rows(batch.input_ids, "batch.input_ids", is_batch=batch.input_ids.rank == 2)
    if batch.input_ids.rank > 2:
        raise ValidationFailed("batch.input_ids: has rank 3; send one sequence ([T]) or one row a sequence ([B,T])")
    check_count("batch.input_ids", len(rows), MAX_DATUMS, "sequences", "send several commands")
    columns: dict[str, Sequence[Tensor]] = {}
    for name, column in sorted(batch.inputs.items()):
        columns[name] = _rows(column, f"batch.inputs.{name}", is_batch=batch.input_ids.rank == 2)
        if len(columns[name]) != len(rows):
            raise ValidationFailed(f"batch.inputs.{name}: has {len(columns[name])} rows for {len(rows)} sequences; send one row a sequence")
    for index, row in enumerate(rows):
        yield Datum(_model_input(row, f"batch.input_ids[{index}]"), {name: column[index] for name, column in columns.items()})


def _rows(column: Array, field: str, *, is_batch: bool) -> list[Tensor]:
    try:
        return column.rows() if is_batch else [column.whole()]
    except ValueError as error:
        raise ValidationFailed(f"{field}: {error}") from error


def _one_row(ids: Array, field: str) -> Tensor:
    if ids.rank != 1:
        raise ValidationFailed(f"{field}: has rank {ids.rank}; send one sequence ([T])")
    return ids.whole()


def _model_input(ids: Tensor, field: str) -> ModelInput:
    values = int64_values(ids.data)
    if values and not 0 <= min(values) <= max(values) <= _LARGEST_ID:
        raise ValidationFailed(
            f"{field}: token ids must lie in [0, {_LARGEST_ID}], got {min(values)} to {max(values)}; use the base model's tokenizer"
        )
    return _packed(values)


# Text.


def _supervised(conversation: Conversation, field: str, base: BaseModelInfo, texts: Conversations, *, has_targets: bool) -> Datum:
    messages = [message.model_dump() for message in conversation.messages]
    try:
        rendered = texts.supervise(messages, base.max_context)
    except (InputTokensExceeded, ValidationFailed) as error:
        raise type(error)(f"{field}.{error.message}") from error
    if not has_targets:
        return Datum(_packed(rendered.tokens), {})
    if not any(rendered.is_trained[1:]):
        raise ValidationFailed(f"{field}: has no turn of the assistant to learn from; add one, or send texts")
    return _shifted(rendered)


def _shifted(rendered: Rendered) -> Datum:
    return Datum(
        _packed(rendered.inputs),
        {
            _TARGETS: _vector(DType.INT64, "q", rendered.targets),
            _WEIGHTS: _vector(DType.FLOAT32, "f", rendered.weights),
        },
    )


def _plain(tokens: list[int], field: str, base: BaseModelInfo, *, has_targets: bool) -> Datum:
    num_inputs = len(tokens) - has_targets
    if num_inputs > base.max_context:
        raise InputTokensExceeded(f"{field}: {num_inputs} tokens exceed the context of {base.max_context}; shorten it")
    if not has_targets:
        return Datum(_packed(tokens), {})
    if len(tokens) < 2:
        raise ValidationFailed(f"{field}: has {len(tokens)} tokens, and each but the first is a target; send at least two")
    return _shifted(Rendered(tokens, [True] * len(tokens)))


def _vector(dtype: DType, code: str, values: Sequence[float]) -> Tensor:
    return Tensor(dtype, (len(values),), array(code, values).tobytes())


def _packed(tokens: Iterable[int]) -> ModelInput:
    return ModelInput((TextChunk(array("i", tokens).tobytes()),))


def _size(datum: Datum) -> int:
    return 4 * len(datum.model_input) + sum(len(tensor.data) for tensor in datum.loss_fn_inputs.values())
