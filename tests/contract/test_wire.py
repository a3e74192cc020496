"""Our bytes against the SDK's own protobuf module, which is the judge: it parses ours, we parse its."""

import math
from array import array

import numpy as np
import pytest
from tinker import types
from tinker.lib.public_interfaces.sampling_client import (
    _check_prompt_alt_tokens_returned,
    _check_prompt_logprobs_last_n_honored,
)
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tinsmith.protocol import tinker_pb2 as ours
from tinsmith.protocol import wire
from tinsmith.protocol.sampling import PromptAltTokens, SampledSequence, SampleOutput, StopReason
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.protocol.training import ComputeOutput
from tinsmith.protocol.wire_bounds import Head, read_head


def fields_of(message) -> dict[str, tuple[int, int, bool, bool, str]]:
    """Number, type, repeated, presence and message type of every field, by name."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            "" if field.message_type is None else field.message_type.full_name.split(".", message.full_name.count("."))[-1].split(".")[-1],
        )
        for field in message.fields
    }


def test_every_message_has_the_fields_of_the_sdks():
    judged = dict(theirs.DESCRIPTOR.message_types_by_name)
    unused = {"SamplingParams", "StopStrings", "StopTokens"}  # described by the SDK, sent by nothing
    assert set(ours.DESCRIPTOR.message_types_by_name) == set(judged) - unused
    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        assert fields_of(message) == fields_of(judged[name]), name


def test_the_enums_agree():
    for name, enum in ours.DESCRIPTOR.enum_types_by_name.items():
        judge = theirs.DESCRIPTOR.enum_types_by_name[name]
        assert {value.name: value.number for value in enum.values} == {value.name: value.number for value in judge.values}


def sdk_request(**changes) -> types.ForwardBackwardRequest:
    dense = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": np.array([0.0, 1.0, 0.5], dtype=np.float32)},
    )
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]),
        loss_fn_inputs={
            "weights": types.TensorData(
                data=np.array([1.0], dtype=np.float32),
                dtype="float32",
                shape=[2, 3],
                sparse_crow_indices=[0, 0, 1],
                sparse_col_indices=[2],
            )
        },
    )
    body = types.ForwardBackwardInput(data=[dense, sparse], loss_fn="cross_entropy", **changes)
    return types.ForwardBackwardRequest(forward_backward_input=body, model_id="s:train:0", seq_id=9)


@pytest.mark.parametrize("forward_only", [False, True])
def test_we_read_what_the_sdk_sends(forward_only):
    message = forward_backward_request_to_proto(sdk_request(loss_fn_config={"clip": 0.5, "mode": "hard"}))
    message.forward_only = forward_only
    body = message.SerializeToString()
    assert read_head(body[:64]) == Head("s:train:0", 9)
    request = wire.decode_forward_backward(body)
    assert (request.model_id, request.seq_id) == ("s:train:0", 9)
    assert request.compute.backward is not forward_only
    assert request.compute.loss_fn == "cross_entropy"
    assert request.compute.loss_fn_config == {"clip": 0.5, "mode": "hard"}
    dense, sparse = request.compute.data
    assert dense.model_input.tokens == [5, 6, 7]
    assert dense.loss_fn_inputs == {
        "target_tokens": Tensor(DType.INT64, (3,), array("q", [6, 7, 8]).tobytes()),
        "weights": Tensor(DType.FLOAT32, (3,), array("f", [0, 1, 0.5]).tobytes()),
    }
    assert sparse.loss_fn_inputs["weights"] == Tensor(
        DType.FLOAT32, (2, 3), array("f", [1]).tobytes(), Csr(array("q", [0, 0, 1]).tobytes(), array("q", [2]).tobytes())
    )


def test_the_sdk_reads_our_stored_commands():
    command = wire.decode_forward_backward(forward_backward_request_to_proto(sdk_request()).SerializeToString()).compute
    stored = wire.encode_command(command)
    end_of_head = 4 + int.from_bytes(stored[:4], "little")
    parsed = theirs.ForwardBackwardRequest.FromString(stored[end_of_head:])
    assert len(parsed.data) == 2
    assert parsed.data[0].loss_fn_inputs["target_tokens"].dtype == theirs.DTYPE_INT64


def test_the_sdk_reads_our_compute_output():
    rows = [
        Tensor(DType.FLOAT32, shape, array("f", data).tobytes()) for shape, data in (((2,), [1, 2]), ((1,), [3]), ((2, 2), [4, 5, 6, 7]))
    ]
    read = deserialize_forward_backward_output(wire.encode_compute_output(ComputeOutput(tuple(rows), {"loss:sum": 3.5})))
    assert read.loss_fn_output_type == "ArrayRecord"
    assert read.metrics == {"loss:sum": 3.5}
    assert [output["logprobs"].shape for output in read.loss_fn_outputs] == [[2], [1], [2, 2]]
    assert [output["logprobs"].tolist() for output in read.loss_fn_outputs] == [[1, 2], [3], [[4, 5], [6, 7]]]


def test_the_sdk_reads_our_sample_output():
    output = SampleOutput(
        sequences=[SampledSequence([1, 2], [-0.5, -0.25], StopReason.STOP), SampledSequence([], [], StopReason.LENGTH)],
        prompt_logprobs=[None, -0.5],
        topk_prompt_logprobs=[None, [(4, -0.5), (5, -1.0)]],
        target_prompt_logprobs=Tensor(DType.FLOAT32, (1, 1), array("f", [-2]).tobytes()),
    )
    read = deserialize_sample_response(wire.encode_sample_output(output))
    assert [sequence.stop_reason for sequence in read.sequences] == ["stop", "length"]
    assert [sequence.tokens for sequence in read.sequences] == [[1, 2], []]
    assert read.sequences[0].logprobs == [-0.5, -0.25]
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs == [None, [(4, -0.5), (5, -1.0)]]
    assert read.target_prompt_logprobs.tolist() == [[-2.0]]
    assert math.isnan(read.prompt_logprobs_np[0])
    assert (read.prompt_alt_tokens, read.prompt_cache_hit_tokens, read.sequences[0].topk_logprobs) == (None, 0, None)


def test_the_sdk_reads_everything_that_a_sample_can_ask_for():
    csr = Csr(array("q", [0, 1, 3]).tobytes(), array("q", [2, 0, 1]).tobytes())
    output = SampleOutput(
        sequences=[SampledSequence([4, 2], [-0.5, -0.25], StopReason.STOP, [[(4, -0.5), (9, -1.5)], [(2, -0.25)]])],
        prompt_logprobs=[None, None, -0.75],
        topk_prompt_logprobs=[None, None, [(6, -0.5)]],
        target_prompt_logprobs=Tensor(DType.FLOAT32, (2, 3), array("f", [-2, 0, -3]).tobytes(), csr),
        prompt_alt_tokens=PromptAltTokens(
            Tensor(DType.INT64, (2, 2), array("q", [7, 8, 9, 7]).tobytes()),
            Tensor(DType.FLOAT32, (2, 2), array("f", [-1, -2, -3, -4]).tobytes()),
        ),
        prompt_cache_hit_tokens=512,
    )
    read = deserialize_sample_response(wire.encode_sample_output(output))
    assert read.sequences[0].topk_logprobs == [[(4, -0.5), (9, -1.5)], [(2, -0.25)]]
    assert read.sequences[0].topk_logprobs_np.token_ids.tolist() == [[4, 9], [2, 0]]
    assert read.prompt_logprobs == [None, None, -0.75]
    assert read.topk_prompt_logprobs == [None, None, [(6, -0.5)]]
    targets = read.target_prompt_logprobs
    assert (targets.dtype, list(targets.shape), targets.sparse_crow_indices, targets.sparse_col_indices) == (
        "float32",
        [2, 3],
        [0, 1, 3],
        [2, 0, 1],
    )
    assert np.asarray(targets.data).tolist() == [-2.0, 0.0, -3.0]
    assert (read.prompt_alt_tokens.tokens.dtype, read.prompt_alt_tokens.tokens.tolist()) == ("int64", [[7, 8], [9, 7]])
    assert read.prompt_alt_tokens.logprobs.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert read.prompt_cache_hit_tokens == 512
    _check_prompt_logprobs_last_n_honored(read, 1)
    _check_prompt_alt_tokens_returned(read, 2)


def test_the_sdk_takes_answers_about_a_prompt_of_one_token_for_answers():
    empty = PromptAltTokens(Tensor(DType.INT64, (0, 2), b""), Tensor(DType.FLOAT32, (0, 2), b""))
    sequence = SampledSequence([1], [-0.5], StopReason.LENGTH)
    read = deserialize_sample_response(wire.encode_sample_output(SampleOutput([sequence], [None], [None], prompt_alt_tokens=empty)))
    assert (read.prompt_logprobs, read.topk_prompt_logprobs) == ([None], [None])
    _check_prompt_alt_tokens_returned(read, 2)
    assert read.prompt_alt_tokens.tokens.shape == [0, 2]
