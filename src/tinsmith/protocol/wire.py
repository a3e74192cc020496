"""Bytes and messages: how commands and results lie in the store, and the binary bodies of the Tinker wire.

The only module that knows zstd; protobuf is known here, in `wire_samples` and in `wire_tensors`. Knows nothing of HTTP, tenants or
lanes. Encodings are deterministic: equal commands give equal bytes, so a digest over them is a digest over the decoded command, however
it travelled.

What a caller sent raises a user error that names the field and the remedy; bytes that the server itself has stored raise whatever
their parser raises.
"""

import hashlib
import io
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import prod

import zstandard
from google.protobuf.message import DecodeError

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol.custom_losses import CustomLoss
from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk, unreadable_chunk
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.spans import ProvenanceSpan, check_provenance
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values
from tinsmith.protocol.training import (
    Compute,
    ComputeOutput,
    CreateModel,
    Kind,
    LoadWeights,
    Message,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TrainingCommand,
    TrainStep,
)
from tinsmith.protocol.wire_bounds import MAX_DECODED, MAX_ZSTD_WINDOW, check_forward_backward
from tinsmith.protocol.wire_samples import decode_sample, encode_sample
from tinsmith.protocol.wire_samples import decode_sample_output as decode_sample_output
from tinsmith.protocol.wire_samples import encode_sample_output as encode_sample_output
from tinsmith.protocol.wire_samples import sample_output_json as sample_output_json
from tinsmith.protocol.wire_tensors import DTYPE_TO_WIRE, read_tensor, write_tensor

ARRAY_RECORD = "ArrayRecord"

_JSON_COMMANDS: dict[Kind, type[CreateModel | LoadWeights | OptimStep | SaveWeights | SaveWeightsForSampler | SaveWeightsExternal]] = {
    model.kind: model for model in (CreateModel, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler, SaveWeightsExternal)
}
_COMPUTES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.EVALUATE, Kind.TRAIN_STEP})
_FRAME = 4  # bytes of a frame's length


# Commands, as they lie in the store.


def encode_command(command: TrainingCommand | Sample) -> bytes:
    """Deterministic; `decode_command` gives back an equal command."""
    match command:
        case Compute():
            return _framed(_compute_head(command), _compute_message(command))
        case TrainStep():
            head = _compute_head(command.compute) | {"step": command.step.model_dump(mode="json")}
            return _framed(head, _compute_message(command.compute))
        case Sample():
            return encode_sample(command)
        case _:
            return _canonical_json(command)


def decode_command(kind: Kind, body: bytes) -> TrainingCommand | Sample:
    if kind in _COMPUTES:
        return _decode_framed(body)
    if kind is Kind.SAMPLE:
        return decode_sample(body)
    return _JSON_COMMANDS[kind].model_validate_json(body)


def digest(command: TrainingCommand | Sample) -> str:
    """sha256 over the decoded command: equal for equal commands, whether they came as JSON, protobuf or compressed."""
    return digest_of(command.kind, encode_command(command))


def digest_of(kind: Kind, encoded: bytes) -> str:
    """`digest` of a command that is encoded already."""
    hashed = hashlib.sha256(kind.encode() + b"\0")
    hashed.update(encoded)
    return hashed.hexdigest()


def _canonical_json(command: Message) -> bytes:
    return _json(command.model_dump(mode="json"))


def _json(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _compute_head(command: Compute) -> dict[str, object]:
    """What the Tinker wire has no field for; only what is not the default, so that an old body and a new one are the same bytes."""
    custom = None if command.custom_loss is None else command.custom_loss.model_dump(mode="json")
    asked = {"metrics_only": command.metrics_only, "micro_batch_tokens": command.micro_batch_tokens, "custom_loss": custom}
    return {name: value for name, value in asked.items() if value}


def _framed(head: dict[str, object], message: pb.ForwardBackwardRequest) -> bytes:
    """Length of the head (uint32, little-endian), the head as JSON, the message."""
    encoded = _json(head)
    return b"".join((len(encoded).to_bytes(_FRAME, "little"), encoded, message.SerializeToString(deterministic=True)))


def _decode_framed(body: bytes) -> Compute | TrainStep:
    end = _FRAME + int.from_bytes(body[:_FRAME], "little")
    head = json.loads(body[_FRAME:end])
    step = head.pop("step", None)
    if "custom_loss" in head:
        head["custom_loss"] = CustomLoss.model_validate(head["custom_loss"])
    compute = replace(_compute(pb.ForwardBackwardRequest.FromString(body[end:])), **head)
    return compute if step is None else TrainStep(compute, OptimStep.model_validate(step))


# forward and forward_backward.


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A decoded request for a forward pass, with or without backward."""

    model_id: str
    seq_id: int
    compute: Compute


def decode_forward_backward(body: bytes) -> ForwardBackward:
    """A protobuf request. Raises PayloadTooLarge, InvalidRequest or ValidationFailed before anything large is built."""
    check_forward_backward(body)
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRequest("body: no valid protobuf message; send a ForwardBackwardRequest") from error
    return ForwardBackward(message.model_id, message.seq_id, _compute(message))


def decompress(body: bytes, limit: int = MAX_DECODED) -> bytes:
    """A zstd body of at most `limit` bytes decoded. Raises PayloadTooLarge, InvalidRequest."""
    decoded = decompress_head(body, limit + 1)
    if len(decoded) > limit:
        raise PayloadTooLarge(f"body: more than {limit} bytes decompressed; send the data in smaller chunks")
    # A reader of a stream takes a cut frame for a short one; most frames announce their size (-1: this one does not).
    if len(decoded) < _announced_size(body):
        raise InvalidRequest("body: the zstd frame is cut off; send it whole")
    return decoded


def decompress_head(body: bytes, size: int) -> bytes:
    """Up to `size` first bytes of a zstd body, streamed, so a small body cannot unfold into memory. Raises InvalidRequest."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    try:
        with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as stream:
            return stream.read(size)
    except zstandard.ZstdError as error:
        raise InvalidRequest(
            f"body: no zstd that this server reads ({error}); compress with a window of at most {MAX_ZSTD_WINDOW} bytes"
        ) from error


def _announced_size(body: bytes) -> int:
    try:
        return zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise InvalidRequest("body: no zstd frame; send one, or no Content-Encoding") from error


def _compute_message(command: Compute) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(loss_fn=command.loss_fn, forward_only=not command.backward)
    for key, value in command.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    for datum in command.data:
        written = message.data.add()
        for chunk in datum.model_input.chunks:
            written.model_input.add().encoded_text.tokens = chunk.tokens
        for name, tensor in datum.loss_fn_inputs.items():
            write_tensor(written.loss_fn_inputs[name], tensor)
    return message


def _compute(message: pb.ForwardBackwardRequest) -> Compute:
    return Compute(
        data=tuple(_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_fn_config=_loss_config(message),
        backward=not message.forward_only,
    )


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(sorted(message.loss_fn_config.items()))
    config: dict[str, float | str] = {}
    for key, value in sorted(message.loss_fn_config_v2.items()):
        if value.WhichOneof("value") is None:
            raise ValidationFailed(f"loss_fn_config.{key}: has no value; send a number or a text")
        config[key] = value.text if value.HasField("text") else value.number
    return config


def _datum(message: pb.Datum, field: str) -> Datum:
    chunks = tuple(_chunk(chunk, f"{field}.model_input.chunks[{index}]") for index, chunk in enumerate(message.model_input))
    names = sorted(message.loss_fn_inputs)
    tensors = {name: read_tensor(message.loss_fn_inputs[name], f"{field}.loss_fn_inputs.{name}") for name in names}
    datum = Datum(ModelInput(chunks), tensors)
    _check_spans(message, field, len(datum.model_input))
    return datum


def _check_spans(message: pb.Datum, field: str, num_rows: int) -> None:
    of_input = _spans(message.model_input_spans, f"{field}.model_input_spans")
    of_loss = _spans(message.loss_fn_input_spans, f"{field}.loss_fn_input_spans")
    check_provenance(field, num_rows, of_input, of_loss)


def _spans(messages: Sequence[pb.ProvenanceSpan], field: str) -> list[ProvenanceSpan]:
    found = []
    for index, message in enumerate(messages):
        kind = message.WhichOneof("span")
        if kind is None:
            raise ValidationFailed(f"{field}[{index}]: has no kind; send prompt_tokens or sampled_tokens")
        span = message.sampled_tokens if kind == "sampled_tokens" else message.prompt_tokens
        found.append(ProvenanceSpan(span.sequence_id, span.offset, span.length, is_sampled=kind == "sampled_tokens"))
    return found


def _chunk(message: pb.Chunk, field: str) -> TextChunk:
    kind = message.WhichOneof("chunk")
    if kind != "encoded_text":
        raise unreadable_chunk(field, kind)
    tokens = message.encoded_text.tokens
    if len(tokens) % 4:
        raise ValidationFailed(f"{field}: {len(tokens)} bytes are no whole number of int32 tokens; send 4 bytes a token")
    return TextChunk(tokens)


def encode_compute_output(output: ComputeOutput) -> bytes:
    """A ForwardBackwardOutput with one record a datum in order; neighbours of equal trailing shape share an array record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=ARRAY_RECORD, metrics=output.metrics)
    for name, outputs in (("logprobs", output.logprobs), ("embeddings", output.embeddings)):
        for trailing, tensors in groupby(outputs, key=lambda tensor: tensor.shape[1:]):
            _write_record(message.loss_fn_outputs.add(), name, trailing, list(tensors))
    return message.SerializeToString(deterministic=True)


def _write_record(record: pb.ArrayRecord, name: str, trailing: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    record.type_tag = ARRAY_RECORD
    record.num_datums = len(tensors)
    field = record.fields[name]
    field.dtype = DTYPE_TO_WIRE[DType.FLOAT32]
    field.data = b"".join(tensor.data for tensor in tensors)
    field.offsets = array("q", accumulate((len(tensor.data) for tensor in tensors), initial=0)).tobytes()
    field.trailing_shape.extend(trailing)


def decode_compute_output(encoded: bytes) -> ComputeOutput:
    """What `encode_compute_output` was given."""
    message = pb.ForwardBackwardOutput.FromString(encoded)
    return ComputeOutput(_outputs(message, "logprobs"), dict(message.metrics), _outputs(message, "embeddings"))


def _outputs(message: pb.ForwardBackwardOutput, name: str) -> tuple[Tensor, ...]:
    records = [record for record in message.loss_fn_outputs if name in record.fields]
    return tuple(tensor for record in records for tensor in _record_tensors(record.fields[name]))


def _record_tensors(field: pb.BatchedTensor) -> list[Tensor]:
    offsets = int64_values(field.offsets)
    trailing = tuple(field.trailing_shape)
    row = DType.FLOAT32.itemsize * prod(trailing)
    return [
        Tensor(DType.FLOAT32, ((end - start) // row if row else 0, *trailing), field.data[start:end]) for start, end in pairwise(offsets)
    ]


def compute_output_json(encoded: bytes) -> bytes:
    """The JSON form of an encoded ForwardBackwardOutput, for SDKs that read no protobuf (they do read Python's Infinity and NaN)."""
    output = decode_compute_output(encoded)
    records = [
        {name: {"data": float32_values(tensor.data).tolist(), "dtype": tensor.dtype, "shape": tensor.shape}}
        for name, tensors in (("logprobs", output.logprobs), ("embeddings", output.embeddings))
        for tensor in tensors
    ]
    return json.dumps({"loss_fn_output_type": ARRAY_RECORD, "loss_fn_outputs": records, "metrics": output.metrics}).encode()
