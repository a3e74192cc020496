"""Bad input is refused before it costs a turn in a queue, by the facts of the base model; the refusal names the field."""

from array import array

import pytest

from tests.fakes.face import INFO
from tinsmith.gateway.preflight import check_compute, check_sample
from tinsmith.protocol.errors import InputTokensExceeded, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import Compute


def model_input(*tokens: int) -> ModelInput:
    return ModelInput((TextChunk(array("i", tokens).tobytes()),))


def compute(*tokens: int) -> Compute:
    targets = Tensor(DType.INT64, (len(tokens),), array("q", tokens).tobytes())
    return Compute((Datum(model_input(*tokens), {"target_tokens": targets}),), "cross_entropy", {}, backward=True)


@pytest.mark.proves("R45")
def test_a_datum_may_fill_the_context_and_the_vocabulary_and_no_more():
    check_compute(compute(*[99] * 64), INFO)
    with pytest.raises(InputTokensExceeded, match=r"data\[0\]\.model_input: 65 tokens exceed the context of 64"):
        check_compute(compute(*[99] * 65), INFO)
    with pytest.raises(ValidationFailed, match=r"token ids must lie in \[0, 100\), got 1 to 100"):
        check_compute(compute(1, 100), INFO)


def sample(num_tokens: int, max_tokens: int | None) -> Sample:
    return Sample(model_input(*[1] * num_tokens), SamplingParams(seed=0, max_tokens=max_tokens), 1, None)


@pytest.mark.proves("R45")
@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "fits"),
    [(60, 4, True), (60, 2**31 - 1, True), (64, 1, True), (64, None, True), (65, 1, False), (0, 1, False)],
)
def test_a_prompt_may_fill_the_context_and_no_more(num_tokens, max_tokens, fits):
    if fits:
        check_sample(sample(num_tokens, max_tokens), INFO)
        return
    with pytest.raises(TinsmithError, match="prompt"):
        check_sample(sample(num_tokens, max_tokens), INFO)
