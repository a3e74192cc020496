"""Arrays between the caller and the protocol: lists, buffers and tensors in, results with `.tolist()` and `.numpy()` out.

Needs no array library: what has a buffer (NumPy, array.array) travels as its bytes, what only has `tolist` (torch) as numbers.
"""

import struct
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tinsmith.client.errors import ClientValidationError
from tinsmith.protocol import arrays
from tinsmith.protocol.arrays import Array
from tinsmith.protocol.native_answers import EncodedArray
from tinsmith.protocol.native_answers import PassResult as EncodedPassResult
from tinsmith.protocol.tensors import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMATS = {"float32": "f", "int64": "q"}
_MAX_DEPTH = arrays.MAX_RANK + 1  # one above what is legal: the protocol's own check then says so


class ArrayObject(Protocol):
    """A NumPy array, a torch tensor on the CPU, an array.array, or a `ResultArray`."""

    def tolist(self) -> Any: ...


IntArrayLike: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] | Sequence[ArrayObject] | ArrayObject
NumberArrayLike: TypeAlias = (
    Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]] | Sequence[ArrayObject] | ArrayObject
)


class ResultArray(EncodedArray):
    """An array of a result: float32 or int64 numbers, row by row."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {list(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    def tolist(self) -> list[Any]:
        """Python numbers, nested as `shape` says."""
        data = b64decode(self.data)
        code = _FORMATS[self.dtype]
        flat = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
        return _nested(flat, self.shape)

    def numpy(self) -> "NDArray[Any]":
        """A NumPy array of the same dtype and shape, writable. Raises ImportError where NumPy is not installed."""
        import numpy

        return numpy.frombuffer(b64decode(self.data), dtype=numpy.dtype(self.dtype).newbyteorder("<")).reshape(self.shape).copy()


class PassResult(EncodedPassResult):
    """`logprobs`, `embeddings`: one array a sequence, in order. Metrics are sums unless their name says otherwise."""

    logprobs: tuple[ResultArray, ...] = ()
    embeddings: tuple[ResultArray, ...] = ()


def _nested(flat: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    if len(shape) <= 1:
        return list(flat)
    stride = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[row * stride : (row + 1) * stride], shape[1:]) for row in range(shape[0])]


def int_array(field: str, value: IntArrayLike) -> Array:
    """Raises ClientValidationError naming `field`."""
    return _read(field, value, DType.INT64)


def number_array(field: str, value: NumberArrayLike) -> Array:
    """Raises ClientValidationError naming `field`."""
    return _read(field, value, None)


def number_arrays(field: str, values: Mapping[str, NumberArrayLike]) -> dict[str, Array]:
    return {name: number_array(f"{field}.{name}", value) for name, value in values.items()}


def _read(field: str, value: object, dtype: DType | None) -> Array:
    try:
        return arrays.read(_plain(value, _MAX_DEPTH), dtype)
    except ValueError as error:
        raise ClientValidationError(field, str(error)) from None


def _plain(value: object, depth: int) -> object:
    """`value` as the protocol reads it: a buffer that it knows, or lists."""
    if isinstance(value, list | tuple):
        may_hold_arrays = depth > 0 and bool(value) and not isinstance(value[0], int | float)
        return [_as_list(item, depth - 1) for item in value] if may_hold_arrays else value
    if isinstance(value, ResultArray):
        return value.model_dump()
    return value if _has_known_buffer(value) else _as_list(value, depth)


def _as_list(value: object, depth: int) -> object:
    if isinstance(value, list | tuple):
        return _plain(value, depth)
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def _has_known_buffer(value: object) -> bool:
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # what has no buffer raises
    except (TypeError, BufferError, ValueError):
        return False
    return view.format in ("f", "q", "l") and view.ndim >= 1
