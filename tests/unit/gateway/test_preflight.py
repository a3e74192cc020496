"""Bad input is refused before it costs a turn in a queue; the refusal names the field."""

from array import array

import pytest

from tests.fakes.face import INFO
from tinsmith.gateway.preflight import check_compute, check_sample
from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.tensors import MAX_COMMAND_ELEMENTS, MAX_ELEMENTS, Csr, DType, Tensor
from tinsmith.protocol.training import Compute


def model_input(*tokens: int) -> ModelInput:
    return ModelInput((TextChunk(array("i", tokens).tobytes()),))


def int64s(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.INT64, shape or (len(values),), array("q", values).tobytes())


def floats(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.FLOAT32, shape or (len(values),), array("f", values).tobytes())


def compute(loss_fn: str = "cross_entropy", config: dict[str, float | str] | None = None, tokens=(1, 2), **inputs: Tensor) -> Compute:
    datum = Datum(model_input(*tokens), {"target_tokens": int64s(*tokens)} | inputs)
    return Compute((datum,), loss_fn, config or {}, backward=True)


@pytest.mark.parametrize(
    "command",
    [
        compute(),
        compute(weights=floats(1, 0.5)),
        compute(weights=int64s(1, 0)),  # a caller's integer tensor stands for float32
        compute(target_tokens=int64s(1, 2, 3, 4, shape=(2, 2)), weights=floats(1, 2, 3, 4, shape=(2, 2))),
        compute("importance_sampling", logprobs=floats(0, 0), advantages=floats(1, -1)),
    ],
)
def test_good_passes(command):
    check_compute(command, INFO)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (compute("astrology"), ValidationFailed, r"loss_fn: 'astrology' is not implemented; use one of cross_entropy"),
        (compute(config={"clip": 1.0}), ValidationFailed, r"loss_fn_config: unknown key 'clip'; cross_entropy accepts no keys"),
        (Compute((), "cross_entropy", {}, backward=True), ValidationFailed, "data: empty"),
        (compute(tokens=()), ValidationFailed, r"data\[0\]\.model_input: has no tokens"),
        (compute(tokens=(1,) * 65), InputTokensExceeded, r"data\[0\]\.model_input: 65 tokens exceed the context of 64"),
        (compute(tokens=(1, 100)), ValidationFailed, r"token ids must lie in \[0, 100\)"),
        (compute(tokens=(-1, 5)), ValidationFailed, "got -1 to 5"),
        (compute(mask=floats(1, 1)), ValidationFailed, "reads no input 'mask'; it reads target_tokens, weights"),
        (compute("importance_sampling", logprobs=floats(0, 0)), ValidationFailed, "needs 'advantages'"),
        (compute(weights=floats(1)), ValidationFailed, r"loss_fn_inputs\.weights: has 1 rows for 2 tokens"),
        (compute(weights=floats(1, shape=(1, 1, 1))), ValidationFailed, r"weights: has rank 3, allowed are 1, 2"),
        (compute(target_tokens=int64s(shape=(2, 0))), ValidationFailed, r"target_tokens: shape \[2, 0\] has no columns"),
        (compute(target_tokens=floats(1, 2)), ValidationFailed, r"target_tokens: must be int64, got float32"),
    ],
)
def test_bad_passes(command, error, message):
    with pytest.raises(error, match=message):
        check_compute(command, INFO)


@pytest.mark.parametrize("value", ["text", float("nan"), float("inf")])
def test_a_config_value_is_a_finite_number(monkeypatch, value):
    monkeypatch.setitem(LOSSES["cross_entropy"].config, "clip", 1.0)
    check_compute(compute(config={"clip": 0.5}), INFO)
    with pytest.raises(ValidationFailed, match=r"loss_fn_config\.clip: .*accepts clip"):
        check_compute(compute(config={"clip": value}), INFO)


def test_what_sparse_tensors_unfold_to_is_bounded():
    """Half a kilobyte a datum would be 32 MiB each in the engine."""
    columns = MAX_ELEMENTS // 2
    sparse = Tensor(DType.INT64, (2, columns), array("q", [1]).tobytes(), Csr(array("q", [0, 0, 1]).tobytes(), array("q", [5]).tobytes()))
    datum = compute(target_tokens=sparse.check("target_tokens")).data[0]
    allowed = MAX_COMMAND_ELEMENTS // MAX_ELEMENTS
    check_compute(Compute((datum,) * allowed, "cross_entropy", {}, backward=True), INFO)
    with pytest.raises(PayloadTooLarge, match=rf"data: the loss inputs have {(allowed + 1) * MAX_ELEMENTS} elements when dense"):
        check_compute(Compute((datum,) * (allowed + 1), "cross_entropy", {}, backward=True), INFO)


def sample(num_tokens: int, max_tokens: int | None) -> Sample:
    return Sample(model_input(*[1] * num_tokens), SamplingParams(seed=0, max_tokens=max_tokens), 1, None)


@pytest.mark.proves("R45")
@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "fits"),
    [(60, 4, True), (60, 10**30, True), (64, 1, True), (64, None, True), (65, 1, False), (0, 1, False)],
)
def test_a_prompt_may_fill_the_context_and_no_more(num_tokens, max_tokens, fits):
    if fits:
        check_sample(sample(num_tokens, max_tokens), INFO)
        return
    with pytest.raises(TinsmithError, match="prompt"):
        check_sample(sample(num_tokens, max_tokens), INFO)
