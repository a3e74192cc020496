"""The JSON bodies of the Tinker wire, as SDKs of many versions write them: fields left out, explicit nulls, unknown extras.

Knows nothing of HTTP. The server owns every default. A fault is a user error that names the field and the remedy.
"""

from array import array
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinsmith.protocol.errors import InvalidRequest, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk, unreadable_chunk
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.protocol.training import Compute
from tinsmith.protocol.wire_bounds import (
    MAX_CHUNKS,
    MAX_CONFIG,
    MAX_DATUMS,
    MAX_RANK,
    MAX_SEQ,
    MAX_TENSORS,
    Head,
    check_command_size,
    check_json,
    check_parts,
)

MAX_SHOWN_FAULTS = 3  # of a body, in one message


class Body(BaseModel):
    """Base of the request bodies: a null is the same as an absent field, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, tree: object) -> object:
        if isinstance(tree, dict):
            return {key: value for key, value in tree.items() if value is not None}
        return tree


AnyBody = TypeVar("AnyBody", bound=Body)
Count = Annotated[int, Field(ge=0, le=MAX_SEQ)]  # callers count models and sampling sessions from 0


class ChunkBody(Body):
    """SDKs up to 0.16 send no `type`: a chunk that has tokens is text. What other chunks hold is not looked at."""

    type: str | None = None
    tokens: list[Any] | None = None

    def decode(self, field: str) -> TextChunk:
        if self.tokens is None or self.type not in (None, "encoded_text"):
            raise unreadable_chunk(field, self.type)
        return TextChunk(_packed("i", self.tokens, f"{field}.tokens"))


class ModelInputBody(Body):
    chunks: list[ChunkBody] = Field(default=[], max_length=MAX_CHUNKS)

    def decode(self, field: str) -> ModelInput:
        return ModelInput(tuple(chunk.decode(f"{field}.chunks[{index}]") for index, chunk in enumerate(self.chunks)))


class TensorBody(Body):
    """`shape` absent: a vector. Sparse where both index lists are there."""

    data: list[Any]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = Field(default=None, max_length=MAX_RANK)
    sparse_crow_indices: list[Any] | None = None
    sparse_col_indices: list[Any] | None = None

    def decode(self, field: str) -> Tensor:
        data = _packed("f" if self.dtype == "float32" else "q", self.data, f"{field}.data")
        csr = None
        if self.sparse_crow_indices is not None and self.sparse_col_indices is not None:
            csr = Csr(
                _packed("q", self.sparse_crow_indices, f"{field}.sparse_crow_indices"),
                _packed("q", self.sparse_col_indices, f"{field}.sparse_col_indices"),
            )
        shape = (len(self.data),) if self.shape is None else tuple(self.shape)
        return Tensor(DType(self.dtype), shape, data, csr).check(field)


class DatumBody(Body):
    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody] = Field(default={}, max_length=MAX_TENSORS)

    def decode(self, field: str) -> Datum:
        return Datum(
            self.model_input.decode(f"{field}.model_input"),
            {name: tensor.decode(f"{field}.loss_fn_inputs.{name}") for name, tensor in sorted(self.loss_fn_inputs.items())},
        )


class PassBody(Body):
    """What the old SDKs nest under forward_input or forward_backward_input."""

    data: list[DatumBody] = Field(max_length=MAX_DATUMS)
    loss_fn: str
    loss_fn_config: dict[str, Annotated[float, Field(strict=True)] | str] = Field(default={}, max_length=MAX_CONFIG)  # true is no number

    def decode(self, *, backward: bool) -> Compute:
        check_parts(sum(len(datum.model_input.chunks) + len(datum.loss_fn_inputs) for datum in self.data))
        compute = Compute(
            data=tuple(datum.decode(f"data[{index}]") for index, datum in enumerate(self.data)),
            loss_fn=self.loss_fn,
            loss_fn_config=dict(sorted(self.loss_fn_config.items())),
            backward=backward,
        )
        check_command_size(_decoded_size(compute))
        return compute


class ForwardBackwardBody(Body):
    """`forward_input` asks for a forward pass alone."""

    forward_input: PassBody | None = None
    forward_backward_input: PassBody | None = None

    def decode(self) -> Compute:
        if self.forward_backward_input is not None:
            return self.forward_backward_input.decode(backward=True)
        if self.forward_input is not None:
            return self.forward_input.decode(backward=False)
        raise ValidationFailed("forward_backward_input: missing; send it, or forward_input to /forward")


def parse(body: bytes) -> object:
    """The JSON text as plain data, within the bounds. Raises PayloadTooLarge, InvalidRequest."""
    check_json(body)
    try:
        # Old SDKs write NaN and Infinity. Refused here they would hide model and seq; the fields refuse them.
        return pydantic_core.from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise InvalidRequest(f"body: no valid JSON ({error}); send a JSON object") from error


def validate(model: type[AnyBody], tree: object) -> AnyBody:
    """Raises ValidationFailed that names the fields."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ValidationFailed(describe(error)) from error


def describe(error: ValidationError) -> str:
    """The first faults in one line, each with its field."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    shown = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:MAX_SHOWN_FAULTS])
    hidden = len(faults) - MAX_SHOWN_FAULTS
    return f"{shown} (and {hidden} more)" if hidden > 0 else shown


def json_head(tree: object) -> Head:
    """model_id and seq_id of a parsed training request, whatever else is wrong with it."""
    if not isinstance(tree, dict):
        return Head(None, None)
    model_id, seq_id = tree.get("model_id"), tree.get("seq_id")
    return Head(
        model_id=model_id if isinstance(model_id, str) else None,
        seq_id=seq_id if isinstance(seq_id, int) and not isinstance(seq_id, bool) and abs(seq_id) <= MAX_SEQ else None,
    )


def _packed(code: Literal["i", "q", "f"], values: list[Any], field: str) -> bytes:
    try:
        return array(code, values).tobytes()
    except (TypeError, OverflowError) as error:
        want = "numbers" if code == "f" else f"integers of {32 if code == 'i' else 64} bits"
        raise ValidationFailed(f"{field}: {error}; send a flat list of {want}") from error


def _decoded_size(compute: Compute) -> int:
    size = 0
    for datum in compute.data:
        size += 4 * len(datum.model_input)
        for tensor in datum.loss_fn_inputs.values():
            size += len(tensor.data) + (len(tensor.csr.crow) + len(tensor.csr.col) if tensor.csr is not None else 0)
    return size
