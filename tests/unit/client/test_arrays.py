"""Arrays in and out."""

import subprocess
import sys
from array import array

import numpy as np
import pytest
import torch

from tinsmith.client import ClientValidationError, PassResult, ResultArray
from tinsmith.client.arrays import int_array, number_array, number_arrays
from tinsmith.protocol import arrays
from tinsmith.protocol.tensors import DType, Tensor


def result(dtype: DType, shape: tuple[int, ...], data: bytes) -> ResultArray:
    return ResultArray.model_validate(arrays.encode(Tensor(dtype, shape, data)))


FLOATS = result(DType.FLOAT32, (2, 3), array("f", [0.5, -1.5, 2.5, 3.5, 4.5, 5.5]).tobytes())


def test_a_result_gives_python_numbers_in_its_shape():
    assert FLOATS.tolist() == [[0.5, -1.5, 2.5], [3.5, 4.5, 5.5]]
    assert (len(FLOATS), repr(FLOATS)) == (2, "ResultArray(float32, [2, 3])")
    assert result(DType.INT64, (2, 1, 2), array("q", [1, 2, 3, -4]).tobytes()).tolist() == [[[1, 2]], [[3, -4]]]
    assert result(DType.FLOAT32, (0,), b"").tolist() == []
    assert result(DType.FLOAT32, (0, 4), b"").tolist() == []
    assert result(DType.FLOAT32, (2, 0), b"").tolist() == [[], []]


def test_bytes_are_read_as_little_endian():
    assert result(DType.FLOAT32, (1,), b"\x00\x00\x80\x3f").tolist() == [1.0]
    assert result(DType.INT64, (1,), b"\x02" + b"\x00" * 7).numpy().tolist() == [2]


def test_a_result_gives_a_numpy_array_of_ones_own():
    got = FLOATS.numpy()
    assert (got.dtype, got.shape) == (np.float32, (2, 3))
    got[0, 0] = 9
    assert FLOATS.tolist()[0][0] == 0.5


def test_the_parts_of_a_pass_are_such_arrays():
    encoded = arrays.encode(Tensor(DType.FLOAT32, (1,), array("f", [2.0]).tobytes()))
    answer = PassResult.model_validate({"logprobs": [encoded], "embeddings": [encoded], "metrics": {}})
    assert [answer.logprobs[0].tolist(), answer.embeddings[0].tolist()] == [[2.0], [2.0]]


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3, 4]],
        ((1, 2), (3, 4)),
        np.array([[1, 2], [3, 4]]),
        np.array([[1, 3], [2, 4]]).T,
        np.array([[1, 2], [3, 4]], dtype=np.int32),
        np.array([[1, 2], [3, 4]], dtype=">i8"),
        torch.tensor([[1, 2], [3, 4]]),
        [np.array([1, 2]), np.array([3, 4])],
        [array("q", [1, 2]), array("i", [3, 4])],
        [torch.tensor([1, 2]), [3, 4]],
        [[np.int64(1), 2], [3, 4]],
    ],
)
def test_whatever_holds_numbers_is_taken(given):
    assert int_array("input_ids", given).whole() == Tensor(DType.INT64, (2, 2), array("q", [1, 2, 3, 4]).tobytes())


def test_a_known_buffer_travels_as_its_bytes_and_numbers_do_not():
    assert isinstance(number_array("advantages", np.ones((2, 2), dtype=np.float32)).value, Tensor)
    assert isinstance(number_array("advantages", np.ones((2, 2))).value, list)


def test_rows_may_differ_in_length():
    assert [row.shape for row in int_array("input_ids", [np.array([1, 2, 3]), [4]]).rows()] == [(3,), (1,)]


def test_what_a_result_gave_can_be_sent_again():
    [both] = number_arrays("inputs", {"logprobs": FLOATS}).values()
    assert (both.dtype, both.whole().shape) == (DType.FLOAT32, (2, 3))
    [rows] = number_arrays("inputs", {"logprobs": [FLOATS]}).values()
    assert rows.whole().shape == (1, 2, 3)


@pytest.mark.proves("R37")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("abc", "must be a list of numbers"),
        (b"abc", "must be a float32 or int64 array"),
        (5, "must be a list of numbers"),
        ([1.0, 2], "must hold integers alone, got float"),
        ([[1], 2], "mixes numbers and lists"),
        ([True], "must hold integers alone, got bool"),
        (np.array([True]), "must hold integers alone, got bool"),
        (np.array([1.0], dtype=np.float32), "must be int64, got float32"),
        ([[[[1]]]], "is nested deeper than 3 levels"),
        (np.array(1), "must be a list of numbers"),
        (["a"], "must hold integers alone, got str"),
    ],
)
def test_what_holds_no_numbers_is_refused_by_name(given, problem):
    with pytest.raises(ClientValidationError, match=problem) as raised:
        int_array("input_ids", given)
    assert raised.value.field == "input_ids"


def test_a_result_tells_where_numpy_is_missing():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from tinsmith.client import ResultArray\n"
        "made = ResultArray(dtype='float32', shape=(1,), data='AACAPw==')\n"
        "print(made.tolist())\n"
        "try: made.numpy()\n"
        "except ImportError: print('no numpy')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[1.0]\nno numpy\n"
