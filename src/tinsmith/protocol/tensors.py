"""Tensors as they travel and lie in the store: little-endian, row-major bytes with a dtype and a shape.

Knows nothing of torch or numpy; `engines/batch.py` turns these into arrays. Shapes are checked before anything is allocated.
"""

import math
import operator
from array import array
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from tinsmith.protocol.errors import ValidationFailed

MAX_ELEMENTS = 4 * 1024 * 1024  # of one dense tensor: a command is at most 16 MiB decoded, at 4 bytes an element
MAX_COMMAND_ELEMENTS = 2 * MAX_ELEMENTS  # of all tensors of one command, dense: sparse ones may unfold to more than they take


class DType(StrEnum):
    FLOAT32 = "float32"
    INT64 = "int64"

    @property
    def itemsize(self) -> int:
        return 4 if self is DType.FLOAT32 else 8


@dataclass(frozen=True, slots=True)
class Csr:
    """Row pointers [rows + 1] and column indices [nnz] of a sparse 2-D tensor, int64 little-endian."""

    crow: bytes
    col: bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` holds prod(shape) elements, or nnz elements where `csr` is set (rank 2 then; unlisted entries are 0)."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes
    csr: Csr | None = None

    def check(self, field: str) -> "Tensor":
        """Return self if shape, byte counts and indices agree; else ValidationFailed naming `field`."""
        if any(dim < 0 for dim in self.shape):
            raise ValidationFailed(f"{field}: shape {list(self.shape)} has a negative dimension; send the shape of the data")
        elements = math.prod(self.shape)
        if elements > MAX_ELEMENTS:
            raise ValidationFailed(
                f"{field}: shape {list(self.shape)} has {elements} elements, the bound is {MAX_ELEMENTS}; send smaller chunks"
            )
        if len(self.data) % self.dtype.itemsize:
            raise ValidationFailed(f"{field}: {len(self.data)} bytes are no whole number of {self.dtype} elements; send all of them")
        held = len(self.data) // self.dtype.itemsize
        if self.csr is None:
            if held != elements:
                raise ValidationFailed(
                    f"{field}: shape {list(self.shape)} needs {elements} elements, {held} were sent; send the shape of the data"
                )
            return self
        self._check_csr(field, self.csr, held)
        return self

    def _check_csr(self, field: str, csr: Csr, nnz: int) -> None:
        if len(self.shape) != 2:
            raise ValidationFailed(f"{field}: a sparse tensor needs a shape of rank 2, got {list(self.shape)}; send it dense")
        if len(csr.crow) % 8 or len(csr.col) % 8:
            raise ValidationFailed(f"{field}: sparse indices must be int64")
        rows, columns = self.shape
        crow, col = int64_values(csr.crow), int64_values(csr.col)
        if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != nnz or any(map(operator.gt, crow, islice(crow, 1, None))):
            raise ValidationFailed(f"{field}: sparse row pointers must be {rows + 1} non-decreasing values from 0 to {nnz}")
        if len(col) != nnz or (nnz and (min(col) < 0 or max(col) >= columns)):
            raise ValidationFailed(f"{field}: sparse column indices must be {nnz} values in [0, {columns})")


def float32_values(data: bytes) -> "array[float]":
    """Little-endian float32 bytes as an array; every platform that we run on is little-endian."""
    values = array("f")
    values.frombytes(data)
    return values


def int64_values(data: bytes) -> "array[int]":
    values = array("q")
    values.frombytes(data)
    return values


def int32_values(data: bytes) -> "array[int]":
    values = array("i")
    values.frombytes(data)
    return values
