"""The spans that the SDK sends with a datum are read, checked against it, and no part of the command."""

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol import wire
from tinsmith.protocol.errors import ValidationFailed

PLAIN = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7]),
    loss_fn_inputs={"target_tokens": np.array([6, 7, 8]), "weights": np.array([0.0, 1.0, 1.0], dtype=np.float32)},
)
CLAIMED = PLAIN.with_provenance(
    model_input=[PromptProvenanceSpan(sequence_id="a", length=2), SampledProvenanceSpan(sequence_id="a", length=1)],
    loss_fn_inputs=[PromptProvenanceSpan(sequence_id="a", offset=1, length=1), SampledProvenanceSpan(sequence_id="a", length=2)],
)


def request_of(datum: types.Datum) -> pb.ForwardBackwardRequest:
    body = types.ForwardBackwardInput(data=[PLAIN, datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=body, model_id="s:train:0", seq_id=9)
    return pb.ForwardBackwardRequest.FromString(forward_backward_request_to_proto(request).SerializeToString())


def test_spans_are_no_part_of_the_command():
    claimed, plain = (wire.decode_forward_backward(request_of(one).SerializeToString()) for one in (CLAIMED, PLAIN))
    assert request_of(CLAIMED).data[1].loss_fn_input_spans[1].sampled_tokens.length == 2
    assert claimed == plain
    assert wire.digest(claimed.compute) == wire.digest(plain.compute)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda datum: datum.ClearField("loss_fn_input_spans"), r"^data\[1\]\.loss_fn_input_spans: empty, .*; send both or none"),
        (lambda datum: datum.ClearField("model_input_spans"), r"^data\[1\]\.model_input_spans: empty"),
        (lambda datum: datum.model_input_spans.add().SetInParent(), r"^data\[1\]\.model_input_spans\[2\]: has no kind"),
        (
            lambda datum: setattr(datum.model_input_spans[0].prompt_tokens, "length", 1),
            r"^data\[1\]\.model_input_spans: cover 2 positions of 3",
        ),
        (
            lambda datum: setattr(datum.loss_fn_input_spans[1].sampled_tokens, "length", 2**62),
            r"^data\[1\]\.loss_fn_input_spans: cover \d+ positions of 3",
        ),
        (
            lambda datum: setattr(datum.loss_fn_input_spans[1].sampled_tokens, "offset", -1),
            r"^data\[1\]\.loss_fn_input_spans\[1\]: offset -1 and length 2",
        ),
        (
            lambda datum: setattr(datum.loss_fn_input_spans[0].prompt_tokens, "sequence_id", ""),
            r"^data\[1\]\.loss_fn_input_spans\[0\]\.sequence_id: empty",
        ),
    ],
)
def test_spans_that_do_not_fit_their_datum_are_refused_by_field(change, message):
    request = request_of(CLAIMED)
    change(request.data[1])
    with pytest.raises(ValidationFailed, match=message):
        wire.decode_forward_backward(request.SerializeToString())
