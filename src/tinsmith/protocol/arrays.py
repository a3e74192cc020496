"""Arrays of numbers as the native protocol carries them: nested lists, or base64 of little-endian bytes with a dtype and a shape.

One pass over the leaves checks what they are: a boolean is no number here, 1.0 is no integer, and rows may differ in length but not in
rank. Knows nothing of what an array means; `Array.rows` and `Array.whole` give the tensors of `protocol/tensors.py`.
"""

import binascii
import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from tinsmith.protocol.errors import TinsmithError
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.wire_bounds import MAX_COMMAND

MAX_RANK = 3  # a batch of sequences with several values a position
MAX_BYTES = MAX_COMMAND  # of one array, decoded

_CODES = {DType.FLOAT32: "f", DType.INT64: "q"}
_BUFFERS = {"f": DType.FLOAT32, "q": DType.INT64, "l": DType.INT64}  # formats of the buffer protocol that need no conversion
_NUMBERS: Mapping[DType, frozenset[type]] = {DType.INT64: frozenset({int}), DType.FLOAT32: frozenset({int, float})}
_FIELDS = frozenset({"dtype", "shape", "data"})


@dataclass(frozen=True, slots=True)
class Array:
    """`value`: a tensor where the numbers came encoded, else nested lists as they came; `rank` counts their levels."""

    dtype: DType
    rank: int
    value: Tensor | list[Any]

    def whole(self) -> Tensor:
        """The array as one tensor. Raises ValueError where rows differ in length."""
        if isinstance(self.value, Tensor):
            return self.value
        shape = _shape(self.value, self.rank)
        data = b"".join(array(_CODES[self.dtype], leaf).tobytes() for leaf in _leaves(self.value, self.rank))
        return Tensor(self.dtype, shape, data)

    def rows(self) -> list[Tensor]:
        """One tensor an element of the first axis. Raises ValueError for an array of rank 1, or where the inside of a row is ragged."""
        if self.rank < 2:
            raise ValueError(f"has rank {self.rank}; send one row a sequence")
        if not isinstance(self.value, Tensor):
            return [Array(self.dtype, self.rank - 1, row).whole() for row in self.value]
        num_rows, *rest = self.value.shape
        size = math.prod(rest) * self.dtype.itemsize
        return [Tensor(self.dtype, tuple(rest), self.value.data[row * size : (row + 1) * size]) for row in range(num_rows)]


def encode(tensor: Tensor) -> dict[str, object]:
    """The encoded form of a dense tensor."""
    return {"dtype": tensor.dtype.value, "shape": list(tensor.shape), "data": b64encode(tensor.data).decode()}


def read(value: object, dtype: DType | None) -> Array:
    """An array from nested lists, from its encoded form, or from an object with a buffer (a NumPy array). Raises ValueError.

    `dtype` None: whatever comes; lists are float32 where one of their numbers is written with a point, else int64.
    """
    if isinstance(value, Array):
        return value
    if isinstance(value, Mapping):
        return _decode(value, dtype)
    if isinstance(value, list | tuple):
        return _read_lists(value, dtype)
    return _read_buffer(value, dtype)


def _decode(tree: Mapping[object, object], dtype: DType | None) -> Array:
    if set(tree) != _FIELDS:
        raise ValueError("an encoded array has the fields dtype, shape and data, and no other")
    sent, shape, data = tree["dtype"], tree["shape"], tree["data"]
    if not isinstance(sent, str) or sent not in list(DType):
        raise ValueError(f"dtype must be one of {', '.join(DType)}")
    if not isinstance(shape, list | tuple) or not 1 <= len(shape) <= MAX_RANK or any(type(dim) is not int for dim in shape):
        raise ValueError(f"shape must be a list of 1 to {MAX_RANK} integers")
    if not isinstance(data, str) or len(data) > 4 * MAX_BYTES // 3 + 4:
        raise ValueError(f"data must be base64 of at most {MAX_BYTES} bytes")
    try:
        decoded = b64decode(data, validate=True)
        tensor = Tensor(DType(sent), tuple(shape), decoded).check("array")
    except binascii.Error as error:
        raise ValueError(f"data is no base64 ({error})") from error
    except TinsmithError as error:
        raise ValueError(error.message) from error
    return _checked(Array(tensor.dtype, len(tensor.shape), tensor), dtype)


def _checked(sent: Array, wanted: DType | None) -> Array:
    """Whole numbers may stand for float32; float32 stands for nothing else."""
    if wanted is DType.INT64 and sent.dtype is not DType.INT64:
        raise ValueError(f"must be int64, got {sent.dtype}")
    return sent


def _read_lists(value: Sequence[Any], wanted: DType | None) -> Array:
    rank = _rank(value)
    dtype = _dtype(value, rank) if wanted is None else wanted
    num = 0
    for leaf in _leaves(value, rank):
        if not isinstance(leaf, list | tuple):
            raise ValueError("mixes numbers and lists; every row must have the same rank")
        num += len(leaf)
        if num * dtype.itemsize > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES // dtype.itemsize} elements ({MAX_BYTES} bytes); send several commands")
        _check_leaf(leaf, dtype)
    return Array(dtype, rank, list(value))


def _check_leaf(leaf: Sequence[Any], dtype: DType) -> None:
    kinds = set(map(type, leaf))
    if kinds - _NUMBERS[dtype]:
        wanted = "integers" if dtype is DType.INT64 else "numbers"
        raise ValueError(f"must hold {wanted} alone, got {', '.join(sorted(kind.__name__ for kind in kinds - _NUMBERS[dtype]))}")
    try:
        held = array(_CODES[dtype], leaf)
    except OverflowError as error:
        raise ValueError(f"holds a number that {dtype} does not ({error})") from error
    if dtype is DType.FLOAT32 and not all(map(math.isfinite, held)):
        raise ValueError("holds a number that float32 does not, or NaN; send finite numbers")


def _dtype(value: Sequence[Any], rank: int) -> DType:
    has_float = any(float in set(map(type, leaf)) for leaf in _leaves(value, rank) if isinstance(leaf, list | tuple))
    return DType.FLOAT32 if has_float else DType.INT64


def _rank(value: object) -> int:
    rank = 0
    while isinstance(value, list | tuple):
        rank += 1
        if rank > MAX_RANK:
            raise ValueError(f"is nested deeper than {MAX_RANK} levels")
        value = value[0] if value else None
    return rank


def _leaves(value: Sequence[Any], rank: int) -> Iterator[Any]:
    """The innermost lists of nested lists, in order; something else where a row has another rank."""
    if rank == 1:
        yield value
        return
    for row in value:
        if isinstance(row, list | tuple):
            yield from _leaves(row, rank - 1)
        else:
            yield row


def _shape(value: Sequence[Any], rank: int) -> tuple[int, ...]:
    if rank == 1:
        return (len(value),)
    shapes = {_shape(row, rank - 1) for row in value}
    if len(shapes) > 1:
        raise ValueError("rows differ in length")
    return (len(value), *chain.from_iterable(shapes))


def _read_buffer(value: object, dtype: DType | None) -> Array:
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # what has no buffer raises
    except TypeError as error:
        raise ValueError("must be a list of numbers, or an object with dtype, shape and data") from error
    held = _BUFFERS.get(view.format)
    if held is None or held.itemsize != view.itemsize or not 1 <= view.ndim <= MAX_RANK or view.nbytes > MAX_BYTES:
        raise ValueError(f"must be a float32 or int64 array of 1 to {MAX_RANK} axes and at most {MAX_BYTES} bytes")
    return _checked(Array(held, view.ndim, Tensor(held, tuple(view.shape or ()), view.tobytes())), dtype)


def _write(sent: Array) -> object:
    return encode(sent.value) if isinstance(sent.value, Tensor) else sent.value


def _schema(item: str) -> dict[str, Any]:
    leaf = {"type": "array", "items": {"type": item}}
    lists = [leaf, {"type": "array", "items": leaf}, {"type": "array", "items": {"type": "array", "items": leaf}}]
    encoded = {
        "type": "object",
        "properties": {
            "dtype": {"enum": ["int64"] if item == "integer" else [dtype.value for dtype in DType]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_RANK},
            "data": {"type": "string", "contentEncoding": "base64"},
        },
        "required": sorted(_FIELDS),
        "additionalProperties": False,
    }
    return {"anyOf": [*lists, encoded]}


IntArray = Annotated[
    Array, PlainValidator(lambda value: read(value, DType.INT64)), PlainSerializer(_write), WithJsonSchema(_schema("integer"))
]
NumberArray = Annotated[Array, PlainValidator(lambda value: read(value, None)), PlainSerializer(_write), WithJsonSchema(_schema("number"))]
