"""Bounds that hold before any parser runs."""

import pytest

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol import wire_bounds
from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge
from tinsmith.protocol.wire_bounds import MAX_CHUNKS, MAX_COMMAND, MAX_DATUMS, Head, check_forward_backward, check_json, read_head


def body_of(message: pb.ForwardBackwardRequest) -> bytes:
    return message.SerializeToString()


@pytest.mark.proves("R28")
def test_the_head_is_readable_however_the_body_goes_on():
    whole = body_of(pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=300, data=[pb.Datum()] * 3, loss_fn="x"))
    assert read_head(whole) == Head("s:train:0", 300)
    assert read_head(whole[:14]) == Head("s:train:0", 300)
    assert read_head(whole[:12]) == Head("s:train:0", None)
    assert read_head(whole[:4]) == Head(None, None)
    assert read_head(b"\xff" * 20) == Head(None, None)
    assert read_head(b"") == Head(None, None)


def test_a_negative_seq_is_no_seq():
    assert read_head(body_of(pb.ForwardBackwardRequest(model_id="m", seq_id=-1))) == Head("m", None)


def test_a_common_request_passes():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="x", loss_fn_config={"a": 1.0}, forward_only=True)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(400)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=bytes(800), dtype=2, shape=[100]))
    datum.model_input_spans.add().prompt_tokens.length = 100
    check_forward_backward(body_of(message))


def datums(num: int) -> bytes:
    return b"\x1a\x00" * num


def datum(content: bytes) -> bytes:
    size = len(content)
    return b"\x1a" + bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + content


def test_bounds_of_a_request():
    check_forward_backward(datums(MAX_DATUMS))
    cases = {
        "data: more than 4096 datums": datums(MAX_DATUMS + 1),
        r"data\[0\].model_input: more than 4096 chunks": datum(b"\x0a\x00" * (MAX_CHUNKS + 1)),
        r"data\[0\].loss_fn_inputs: more than 64 tensors": datum(b"\x12\x00" * 65),
        r"data\[0\]: more than 8192 provenance spans": datum(b"\x1a\x00\x22\x00" * 4097),
        "data: more than 131072 chunks, tensors and spans": datum(b"\x0a\x00" * MAX_CHUNKS) * 33,
        "loss_fn_config: more than 128 entries": b"\x2a\x00" * 129,
        f"the bound is {MAX_COMMAND}": bytes(MAX_COMMAND + 1),
    }
    for message, body in cases.items():
        with pytest.raises(PayloadTooLarge, match=message):
            check_forward_backward(body)


@pytest.mark.parametrize("shape", [b"\x22\x7f" + b"\x01" * 127, b"\x20\x01" * 9])
def test_the_shape_of_a_tensor_is_short(shape):
    tensor = b"\x12" + (bytes([len(shape)]) if len(shape) < 128 else bytes([len(shape) & 0x7F | 0x80, len(shape) >> 7])) + shape
    entry = b"\x12" + (bytes([len(tensor)]) if len(tensor) < 128 else bytes([len(tensor) & 0x7F | 0x80, len(tensor) >> 7])) + tensor
    with pytest.raises(PayloadTooLarge, match="dimensions"):
        check_forward_backward(datum(entry))


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x05\x00",  # longer than the rest
        b"\x0b",  # a group
        b"\x09\x00",  # a fixed 64 that is cut off
        b"\x0d\x00",  # a fixed 32 that is cut off
        b"\x08" + b"\xff" * 11,  # a varint without end
        b"\x08",  # a tag without value
    ],
)
def test_damaged_bodies_are_refused(body):
    with pytest.raises(InvalidRequest, match="at byte"):
        check_forward_backward(body)


def test_fixed_fields_are_stepped_over():
    check_forward_backward(b"\x49" + bytes(8) + b"\x4d" + bytes(4) + b"\x18\x05" + datum(b"\x08\x01" + b"\x12\x02\x08\x01"))


def test_json_depth_ignores_brackets_in_strings():
    check_json(b"[" * 32 + b"]" * 32)
    check_json(b'["' + b"[" * 100 + b'\\"' + b"{" * 100 + b'"]')
    check_json(b"[]" * 100)
    with pytest.raises(PayloadTooLarge, match="32 levels"):
        check_json(b"[" * 33 + b"]" * 33)
    with pytest.raises(PayloadTooLarge, match="32 levels"):
        check_json(b'{"a":' * 33 + b"1" + b"}" * 33)


def test_json_counts(monkeypatch):
    monkeypatch.setattr(wire_bounds, "MAX_JSON_VALUES", 10)
    monkeypatch.setattr(wire_bounds, "MAX_JSON_CONTAINERS", 10)
    monkeypatch.setattr(wire_bounds, "MAX_JSON_STRINGS", 10)
    monkeypatch.setattr(wire_bounds, "MAX_DECODED", 100)
    for body, what in ((b"1," * 11, "values"), (b"[]" * 11, "lists and objects"), (b'""' * 11, "strings"), (bytes(101), "bytes")):
        with pytest.raises(PayloadTooLarge, match=what):
            check_json(body)
