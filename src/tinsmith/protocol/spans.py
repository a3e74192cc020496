"""Where the tokens of a datum come from, as its sender claims: runs of the prompts and of the sequences of earlier samples.

A field's spans tile it: each covers the next `length` positions. They are checked where they arrive and kept nowhere, since no loss that
is offered reads them. Knows nothing of the wire, nor of which sequences exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.protocol.errors import ValidationFailed


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """Positions [offset, offset + length) of the prompt or, where `is_sampled`, of the sampled tokens of a sequence."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool


def check_provenance(field: str, num_rows: int, of_input: Sequence[ProvenanceSpan], of_loss: Sequence[ProvenanceSpan]) -> None:
    """`field`: the datum's. `num_rows`: of its model input, which is that of each loss input too. Both lists empty: no claim.

    Raises ValidationFailed for one list without the other, a span that is unsound, and lists that do not cover exactly all rows.
    """
    named = {f"{field}.model_input_spans": of_input, f"{field}.loss_fn_input_spans": of_loss}
    if not of_input and not of_loss:
        return
    for name, spans in named.items():
        if not spans:
            raise ValidationFailed(f"{name}: empty, and the other list of spans is not; send both or none")
        for index, span in enumerate(spans):
            _check_span(f"{name}[{index}]", span)
        covered = sum(span.length for span in spans)
        if covered != num_rows:
            raise ValidationFailed(f"{name}: cover {covered} positions of {num_rows}; send spans that tile all of them")


def _check_span(field: str, span: ProvenanceSpan) -> None:
    if not span.sequence_id:
        raise ValidationFailed(f"{field}.sequence_id: empty; send that of a sampled sequence")
    if span.offset < 0 or span.length < 0:
        raise ValidationFailed(f"{field}: offset {span.offset} and length {span.length} must be at least 0; send positions of the sequence")
