"""Claims of where tokens come from: both lists or none, sound spans, and every row covered once."""

import pytest

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.spans import ProvenanceSpan, check_provenance


def prompt(length: int, offset: int = 0, sequence_id: str = "q") -> ProvenanceSpan:
    return ProvenanceSpan(sequence_id, offset, length, is_sampled=False)


def sampled(length: int, offset: int = 0) -> ProvenanceSpan:
    return ProvenanceSpan("s", offset, length, is_sampled=True)


@pytest.mark.parametrize(
    ("of_input", "of_loss"),
    [([], []), ([prompt(5)], [sampled(5)]), ([prompt(2, 7), sampled(3)], [prompt(1), sampled(0), sampled(4, 1)])],
)
def test_spans_that_tile_all_rows_pass(of_input, of_loss):
    check_provenance("data[0]", 5, of_input, of_loss)


@pytest.mark.parametrize(
    ("of_input", "of_loss", "message"),
    [
        ([prompt(5)], [], r"^data\[2\]\.loss_fn_input_spans: empty, and the other list of spans is not; send both or none"),
        ([], [sampled(5)], r"^data\[2\]\.model_input_spans: empty"),
        ([prompt(4)], [sampled(5)], r"^data\[2\]\.model_input_spans: cover 4 positions of 5; send spans that tile all of them"),
        ([prompt(5)], [sampled(3), sampled(3)], r"^data\[2\]\.loss_fn_input_spans: cover 6 positions of 5"),
        ([prompt(6), prompt(-1)], [sampled(5)], r"^data\[2\]\.model_input_spans\[1\]: offset 0 and length -1 must be at least 0"),
        ([prompt(5)], [sampled(1), sampled(4, -1)], r"^data\[2\]\.loss_fn_input_spans\[1\]: offset -1 and length 4 must be at least 0"),
        ([prompt(5, sequence_id="")], [sampled(5)], r"^data\[2\]\.model_input_spans\[0\]\.sequence_id: empty"),
    ],
)
def test_spans_that_do_not_are_refused_by_field(of_input, of_loss, message):
    with pytest.raises(ValidationFailed, match=message):
        check_provenance("data[2]", 5, of_input, of_loss)
