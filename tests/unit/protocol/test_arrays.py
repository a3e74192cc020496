"""Arrays as the native protocol carries them."""

import time
from base64 import b64encode

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from tinsmith.protocol.arrays import MAX_BYTES, Array, IntArray, NumberArray, encode, read
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values


class Holder(BaseModel):
    ids: IntArray | None = None
    numbers: NumberArray | None = None


def ids(text: str) -> Array:
    held = Holder.model_validate_json('{"ids":' + text + "}").ids
    assert held is not None
    return held


def test_one_sequence_is_a_vector() -> None:
    assert int64_values(ids("[3,4,5]").whole().data).tolist() == [3, 4, 5]


def test_a_batch_may_be_ragged() -> None:
    rows = ids("[[1,2],[3]]").rows()
    assert [(row.shape, int64_values(row.data).tolist()) for row in rows] == [((2,), [1, 2]), ((1,), [3])]


def test_a_ragged_batch_is_no_single_tensor() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ids("[[1,2],[3]]").whole()


def test_a_vector_has_no_rows() -> None:
    with pytest.raises(ValueError, match="rank 1"):
        ids("[1,2]").rows()


@pytest.mark.proves("R43")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1,true]", "integers alone, got bool"),
        ("[1.0]", "integers alone, got float"),
        ('["1"]', "integers alone, got str"),
        ("[null]", "integers alone, got NoneType"),
        ("[[1],2]", "same rank"),
        ("[1,[2]]", "integers alone, got list"),
        ("[[[[1]]]]", "deeper than 3"),
        ("7", "a list of numbers"),
        ('"AAAA"', "a list of numbers"),
        ("[9223372036854775808]", "holds a number that int64 does not"),
        ('{"dtype":"int64","shape":[1]}', "the fields dtype, shape and data"),
        ('{"dtype":"int32","shape":[1],"data":""}', "dtype must be one of float32, int64"),
        ('{"dtype":"int64","shape":[true],"data":""}', "shape must be a list of 1 to 3 integers"),
        ('{"dtype":"int64","shape":[],"data":""}', "shape must be a list of 1 to 3 integers"),
        ('{"dtype":"int64","shape":[1],"data":"!"}', "no base64"),
        ('{"dtype":"int64","shape":[2],"data":"AAAAAAAAAAA="}', "needs 2 elements, 1 were sent"),
        ('{"dtype":"float32","shape":[1],"data":"AAAAAA=="}', "must be int64, got float32"),
    ],
)
def test_what_is_no_array_of_integers_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ids(text)


@pytest.mark.parametrize("text", ["[1e39]", "[NaN]", "[Infinity]", "[true]"])
def test_a_number_that_float32_does_not_hold_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Holder.model_validate_json('{"numbers":' + text + "}")


def test_numbers_are_float32_where_one_has_a_point() -> None:
    whole, broken = (Holder.model_validate_json('{"numbers":' + text + "}").numbers for text in ("[1,2]", "[1,2.5]"))
    assert whole is not None
    assert whole.dtype is DType.INT64
    assert broken is not None
    assert float32_values(broken.whole().data).tolist() == [1.0, 2.5]


def test_encoded_arrays_come_back_as_they_went() -> None:
    tensor = Tensor(DType.INT64, (2, 2), np.arange(4, dtype="<i8").tobytes())
    held = Holder(ids=encode(tensor)).ids  # type: ignore[arg-type]  # validated
    assert held is not None
    assert isinstance(held.value, Tensor)
    assert held.whole() == tensor
    assert [int64_values(row.data).tolist() for row in held.rows()] == [[0, 1], [2, 3]]
    assert Holder.model_validate_json(Holder(ids=held).model_dump_json()).ids == held


def test_a_numpy_array_is_sent_encoded() -> None:
    sent = Holder(numbers=np.array([[0.5, 1.5]], dtype=np.float32)).model_dump(mode="json")["numbers"]  # type: ignore[arg-type]  # validated
    assert sent == {"dtype": "float32", "shape": [1, 2], "data": b64encode(np.array([0.5, 1.5], "<f4").tobytes()).decode()}


@pytest.mark.parametrize("array", [np.zeros(2, np.float64), np.zeros(2, np.int32), np.zeros((1, 1, 1, 1), np.int64), np.array(1)])
def test_a_numpy_array_of_another_kind_is_refused(array: object) -> None:
    with pytest.raises(ValueError, match="must be a float32 or int64 array"):
        read(array, None)


def test_lists_stay_lists_on_the_wire() -> None:
    assert Holder.model_validate_json('{"ids":[[1],[2,3]]}').model_dump(mode="json")["ids"] == [[1], [2, 3]]


@pytest.mark.proves("R43")
def test_two_mebi_ids_validate_in_one_pass_and_more_are_refused_by_name_of_the_bound() -> None:
    num = MAX_BYTES // 8
    text = "[[" + "],[".join([",".join(["7"] * 1024)] * (num // 1024)) + "]]"
    began = time.monotonic()
    assert ids(text).rank == 2
    assert time.monotonic() - began < 5  # measured: 0.1 s
    with pytest.raises(ValidationError, match=f"more than {num} elements \\({MAX_BYTES} bytes\\)"):
        ids(text[:-1] + ",[7]]")


def test_an_encoded_array_is_bounded_too() -> None:
    data = "A" * (4 * (MAX_BYTES // 3 + 8))
    with pytest.raises(ValidationError, match=f"at most {MAX_BYTES} bytes"):
        ids('{"dtype":"int64","shape":[1],"data":"' + data + '"}')
