"""Tensors: shapes, byte counts and sparse indices are checked before anything is built."""

from array import array

import pytest

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.tensors import MAX_ELEMENTS, Csr, DType, Tensor, float32_values, int32_values, int64_values


def q(*values: int) -> bytes:
    return array("q", values).tobytes()


def f(*values: float) -> bytes:
    return array("f", values).tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(DType.FLOAT32, (2,), f(1, 2)),
        Tensor(DType.INT64, (2, 1), q(1, 2)),
        Tensor(DType.INT64, (0,), b""),
        Tensor(DType.INT64, (), q(1)),
        Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 0, 1), q(2))),
        Tensor(DType.INT64, (2, 3), b"", Csr(q(0, 0, 0), b"")),
        Tensor(DType.INT64, (1, 3), q(5, 6), Csr(q(0, 2), q(1, 1))),
    ],
)
def test_good_tensors_pass(tensor):
    assert tensor.check("t") is tensor


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor(DType.FLOAT32, (-1,), b""), "negative"),
        (Tensor(DType.FLOAT32, (MAX_ELEMENTS + 1,), b""), "the bound is"),
        (Tensor(DType.FLOAT32, (1 << 40, 1 << 40), b""), "the bound is"),
        (Tensor(DType.INT64, (1,), b"1234"), "no whole number"),
        (Tensor(DType.FLOAT32, (3,), f(1, 2)), "needs 3 elements, 2 were sent"),
        (Tensor(DType.INT64, (2,), q(5), Csr(q(0, 0, 1), q(2))), "rank 2"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(b"1234", q(2))), "int64"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 1), q(2))), "row pointers"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(1, 1, 1), q(2))), "row pointers"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 0, 2), q(2))), "row pointers"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 2, 1), q(2))), "row pointers"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 0, 1), q(3))), "column indices"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 0, 1), q(-1))), "column indices"),
        (Tensor(DType.INT64, (2, 3), q(5), Csr(q(0, 0, 1), q(1, 2))), "column indices"),
    ],
)
def test_bad_tensors_are_refused_by_their_field(tensor, message):
    with pytest.raises(ValidationFailed, match=rf"^t: .*{message}"):
        tensor.check("t")


def test_bytes_as_values():
    assert float32_values(f(1, 2)).tolist() == [1, 2]
    assert int64_values(q(1, -2)).tolist() == [1, -2]
    assert int32_values(array("i", [1, -2]).tobytes()).tolist() == [1, -2]
