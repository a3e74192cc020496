"""JSON bodies as old SDKs write them."""

import contextlib
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.protocol import wire_json
from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.protocol.wire_bounds import Head
from tinsmith.protocol.wire_json import ForwardBackwardBody, json_head, parse, validate


def decode(tree: object):
    return validate(ForwardBackwardBody, parse(json.dumps(tree).encode())).decode()


def request(**changes: object) -> dict[str, object]:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
            "weights": {"data": [1, 0.5, 0], "dtype": "float32", "shape": None},
        },
    }
    return {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None} | changes


@pytest.mark.proves("R69")
def test_the_oldest_form_is_read_with_our_defaults():
    compute = decode({"forward_backward_input": request(), "model_id": "m", "seq_id": 1, "extra": None})
    assert compute.backward
    assert compute.loss_fn == "cross_entropy"
    assert compute.loss_fn_config == {}
    datum = compute.data[0]
    assert datum.model_input.tokens == [1, 2, 3]
    assert datum.loss_fn_inputs == {
        "target_tokens": Tensor(DType.INT64, (3,), array("q", [2, 3, 4]).tobytes()),
        "weights": Tensor(DType.FLOAT32, (3,), array("f", [1, 0.5, 0]).tobytes()),
    }


def test_the_name_of_the_input_tells_the_direction():
    assert not decode({"forward_input": request()}).backward
    with pytest.raises(ValidationFailed, match="forward_backward_input: missing"):
        decode({"model_id": "m"})


def test_numbers_that_are_not_finite_reach_the_engine_in_tensors_alone():
    tensor = {"data": [1, 2, float("nan")], "dtype": "float32"}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"weights": tensor}}
    held = decode({"forward_input": request(data=[datum])}).data[0].loss_fn_inputs["weights"]
    assert held.data == array("f", [1, 2, float("nan")]).tobytes()
    with pytest.raises(ValidationFailed, match="loss_fn_config"):
        decode({"forward_input": request(loss_fn_config={"k": float("inf")})})


@pytest.mark.parametrize("value", [True, [1], float("nan")])
def test_a_loss_is_configured_by_numbers_and_text(value):
    assert decode({"forward_input": request(loss_fn_config={"b": "text", "a": 1})}).loss_fn_config == {"a": 1.0, "b": "text"}
    with pytest.raises(ValidationFailed, match=r"loss_fn_config\.k"):
        decode({"forward_input": request(loss_fn_config={"k": value})})


def test_sparse_tensors():
    tensor = {"data": [7], "dtype": "int64", "shape": [2, 3], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    held = decode({"forward_input": request(data=[datum])}).data[0].loss_fn_inputs["target_tokens"]
    assert held.csr == Csr(array("q", [0, 0, 1]).tobytes(), array("q", [2]).tobytes())
    assert held.shape == (2, 3)


@pytest.mark.parametrize(
    ("datum", "names"),
    [
        ({"model_input": {"chunks": [{"type": "image"}]}}, r"data\[0\]\.model_input\.chunks\[0\]: image chunks need .* processor"),
        ({"model_input": {"chunks": [{"tokens": [1]}, {"type": "image_asset_pointer"}]}}, r"chunks\[1\]: image_asset_pointer"),
        ({"model_input": {"chunks": [{"type": "dmel", "dmel": "?"}]}}, r"chunks\[0\]: dmel chunks need .* audio encoder"),
        ({"model_input": {"chunks": [{"type": "video", "tokens": [1]}]}}, r"known type \(video\)"),
        ({"model_input": {"chunks": [{}]}}, r"known type \(none\)"),
        ({"model_input": {"chunks": [{"tokens": [1.5]}]}}, r"chunks\[0\]\.tokens: .*integers of 32 bits"),
        ({"model_input": {"chunks": [{"tokens": [2**31]}]}}, "integers of 32 bits"),
        ({"model_input": {"chunks": [{"tokens": ["a"]}]}}, "integers of 32 bits"),
        (
            {"model_input": {"chunks": []}, "loss_fn_inputs": {"w": {"data": ["x"], "dtype": "float32"}}},
            r"loss_fn_inputs\.w\.data: .*flat list of numbers",
        ),
        (
            {"model_input": {"chunks": []}, "loss_fn_inputs": {"w": {"data": [2**63], "dtype": "int64"}}},
            "integers of 64 bits",
        ),
        ({"model_input": {"chunks": []}, "loss_fn_inputs": {"w": {"data": [1], "dtype": "float32", "shape": [2]}}}, "needs 2 elements"),
        ({"model_input": {"chunks": []}, "loss_fn_inputs": {"w": {"data": [1], "dtype": "bool"}}}, r"dtype"),
        ({}, r"forward_backward_input\.data\.0\.model_input: Field required"),
    ],
)
def test_faults_name_the_field(datum, names):
    with pytest.raises(ValidationFailed, match=names):
        decode({"forward_backward_input": request(data=[datum])})


def test_a_command_over_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr("tinsmith.protocol.wire_bounds.MAX_COMMAND", 40)
    with pytest.raises(PayloadTooLarge, match="48 bytes decoded"):
        decode({"forward_backward_input": request()})


def test_text_that_is_no_json_is_refused():
    for body in (b"", b"{", b"[nan]", b'{"a": 1,}', b'"\\ud800"', b"1" * 5000):
        with pytest.raises(InvalidRequest, match="no valid JSON"):
            parse(body)


def test_the_head_is_read_whatever_else_is_wrong():
    assert json_head({"model_id": "m", "seq_id": 4, "data": object()}) == Head("m", 4)
    assert json_head({"model_id": 5, "seq_id": "4"}) == Head(None, None)
    assert json_head({"seq_id": True}) == Head(None, None)
    assert json_head({"seq_id": 2**31}) == Head(None, None)
    assert json_head(parse(b'{"model_id": "m", "seq_id": 1, "x": [NaN, -Infinity]}')) == Head("m", 1)
    assert json_head([1]) == Head(None, None)


def test_many_faults_are_cut_short():
    with pytest.raises(ValidationFailed, match=r"\(and 2 more\)"):
        validate(ForwardBackwardBody, {"forward_input": {"data": [{"model_input": 1}] * 5, "loss_fn": "x"}})
    with pytest.raises(ValidationFailed, match="body"):
        validate(ForwardBackwardBody, [])


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "model_input", "chunks", "tokens", "type"]), inner)
    ),
    max_leaves=12,
)


@given(json_trees)
def test_no_tree_raises_anything_but_a_user_error(tree):
    with contextlib.suppress(ValidationFailed):
        wire_json.validate(ForwardBackwardBody, {"forward_input": {"data": [tree], "loss_fn": "x"}}).decode()
