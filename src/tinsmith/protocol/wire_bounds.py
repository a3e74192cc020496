"""Bounds of a body, checked on its raw bytes before any parser sees it. Knows the field numbers; builds no message.

A parser that expands first and counts later can be fed 8 MB of empty datums that become 900 MB of objects. So the protobuf wire is
walked once and counted, JSON is scanned for depth and size, and the first fields of a body are readable even where the body itself is
refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge

MIB = 1024 * 1024
MAX_WIRE = 64 * MIB  # bytes of a request as it travels
MAX_DECODED = 64 * MIB  # the same, decompressed
MAX_COMMAND = 16 * MIB  # of one command, decoded
MAX_ZSTD_WINDOW = 8 * MIB
MAX_DATUMS = 4096
MAX_CHUNKS = 4096  # a datum; the same bound holds for its provenance spans
MAX_TENSORS = 64  # a datum
MAX_PARTS = 131_072  # chunks, tensors and spans of one command together
MAX_CONFIG = 64  # entries of a loss's config
MAX_RANK = 8
MAX_DEPTH = 32  # of nested JSON
MAX_SEQ = 2**31 - 1  # of a model's requests, and of the models and sampling sessions of a session: int32 on the wire
MAX_SAMPLE_SEQ = 2**63 - 1  # a clone of a sampling client counts from a multiple of 10^9
MAX_JSON_VALUES = 5 * MIB  # commas of a JSON body: a command of 16 MiB holds 4 Mi numbers of 4 bytes
MAX_JSON_CONTAINERS = 64 * MAX_DATUMS  # a datum of an old SDK takes about 17
MAX_JSON_STRINGS = 128 * MAX_DATUMS  # and about 25

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Numbers are most of a JSON body and say nothing of its depth. Where such a character follows a backslash the text is no JSON, and a
# parser stops there.
_NUMERIC = b"0123456789+-.,: \t\r\n"
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Head:
    """The first fields of a forward_backward request; None where the bytes at hand do not hold them."""

    model_id: str | None
    seq_id: int | None


def read_head(body: bytes) -> Head:
    """model_id and seq_id of a protobuf body, of which only the beginning need be there. Never raises."""
    found: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(body, 0, len(body)):
            if number > 2:
                break
            found[number] = body[value[0] : value[1]] if isinstance(value, tuple) else value
    except InvalidRequest:
        pass  # cut off or damaged; what was read before counts
    model_id, seq_id = found.get(1), found.get(2)
    return Head(
        model_id=model_id.decode(errors="replace") if isinstance(model_id, bytes) else None,
        seq_id=seq_id if isinstance(seq_id, int) and seq_id <= MAX_SEQ else None,
    )


def check_forward_backward(body: bytes) -> None:
    """Walk a protobuf body and count. Raises PayloadTooLarge naming the bound, InvalidRequest for damaged bytes."""
    check_command_size(len(body))
    num_datums, num_config, num_parts = 0, 0, 0
    for number, value in _fields(body, 0, len(body)):
        if not isinstance(value, tuple):
            continue
        if number == 3:
            num_datums += 1
            check_count("data", num_datums, MAX_DATUMS, "datums", "send several requests")
            num_parts += _check_datum(body, num_datums - 1, *value)
            check_parts(num_parts)
        elif number in (5, 7):
            num_config += 1
            check_count("loss_fn_config", num_config, 2 * MAX_CONFIG, "entries", "send only keys that the loss knows")


def check_command_size(size: int) -> None:
    if size > MAX_COMMAND:
        raise PayloadTooLarge(f"body: {size} bytes decoded, the bound is {MAX_COMMAND}; send the data in smaller chunks")


def check_count(field: str, count: int, bound: int, what: str, remedy: str) -> None:
    if count > bound:
        raise PayloadTooLarge(f"{field}: more than {bound} {what}; {remedy}")


def check_parts(num_parts: int) -> None:
    check_count("data", num_parts, MAX_PARTS, "chunks, tensors and spans in one request", "send several requests")


def check_json(body: bytes) -> None:
    """Raises PayloadTooLarge if parsing the JSON text could cost much more memory than the text, or nests too deep."""
    if len(body) > MAX_DECODED:
        raise PayloadTooLarge(f"body: {len(body)} bytes decoded, the bound is {MAX_DECODED}; send the data in smaller chunks")
    check_count("body", body.count(b","), MAX_JSON_VALUES, "values", "send the data in smaller chunks")
    check_count("body", body.count(b"[") + body.count(b"{"), MAX_JSON_CONTAINERS, "lists and objects", "send the data in smaller chunks")
    check_count("body", body.count(b'"') // 2, MAX_JSON_STRINGS, "strings", "send the data in smaller chunks")
    structure = body.translate(None, _NUMERIC)
    depth = 0
    for token in _JSON_TOKEN.finditer(structure):
        mark = structure[token.start()]
        if mark in b"[{":
            depth += 1
            check_count("body", depth, MAX_DEPTH, "levels of nesting", "flatten it")
        elif mark in b"]}":
            depth -= 1


def _check_datum(body: bytes, index: int, start: int, end: int) -> int:
    """Answers the number of parts in the datum that lies in body[start:end]."""
    num_chunks, num_tensors, num_spans = 0, 0, 0
    for number, value in _fields(body, start, end):
        if not isinstance(value, tuple):
            continue
        if number == 1:
            num_chunks += 1
            check_count(f"data[{index}].model_input", num_chunks, MAX_CHUNKS, "chunks", "join them")
        elif number == 2:
            num_tensors += 1
            check_count(f"data[{index}].loss_fn_inputs", num_tensors, MAX_TENSORS, "tensors", "send only what the loss reads")
            _check_tensor_entry(body, index, *value)
        elif number in (3, 4):
            num_spans += 1
            check_count(f"data[{index}]", num_spans, 2 * MAX_CHUNKS, "provenance spans", "join them")
    return num_chunks + num_tensors + num_spans


def _check_tensor_entry(body: bytes, index: int, start: int, end: int) -> None:
    """A map entry {1: name, 2: Tensor}: the shape must be short, however it is packed."""
    num_dims = 0
    for number, value in _fields(body, start, end):
        if number != 2 or not isinstance(value, tuple):
            continue
        for inner, part in _fields(body, *value):
            if inner == 4:
                # Packed dimensions are at least one byte each; at most ten.
                num_dims += 1 if not isinstance(part, tuple) else -(-(part[1] - part[0]) // 10)
                check_count(f"data[{index}].loss_fn_inputs", num_dims, MAX_RANK, "dimensions in a tensor", "reshape it")


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """(field number, varint value or the (start, end) of its bytes) of the message in body[start:end], fixed-size values apart."""
    at = start
    while at < end:
        tag, at = _varint(body, at, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _BYTES:
            length, at = _varint(body, at, end)
            if length > end - at:
                raise _damaged(at)
            yield number, (at, at + length)
            at += length
        elif wire_type == _VARINT:
            value, at = _varint(body, at, end)
            yield number, value
        elif wire_type in (_FIXED32, _FIXED64):
            at += 4 if wire_type == _FIXED32 else 8
            if at > end:
                raise _damaged(at)
        else:
            raise _damaged(at)


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < end and shift < 64:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _damaged(at)


def _damaged(at: int) -> InvalidRequest:
    return InvalidRequest(f"body: no valid protobuf message (at byte {at}); send a ForwardBackwardRequest")
