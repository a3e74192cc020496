"""A command with a loss is refused with the field, what was expected and the remedy, before anything is unpacked."""

import re
from array import array

import pytest

from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.loss_checks import (
    FieldNames,
    Limits,
    check_bounds,
    check_compute,
    check_finite,
    check_ratio_mask,
    read_config,
    spec_of,
)
from tinsmith.protocol.losses import LOSSES, REFUSED_LOSSES, Bounds, LossInput, LossSpec
from tinsmith.protocol.tensors import MAX_COMMAND_ELEMENTS, MAX_ELEMENTS, Csr, DType, Tensor
from tinsmith.protocol.training import Compute

LIMITS = Limits(vocab_size=100, max_context=64)


def model_input(*tokens: int) -> ModelInput:
    return ModelInput((TextChunk(array("i", tokens).tobytes()),))


def int64s(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.INT64, shape or (len(values),), array("q", values).tobytes())


def floats(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.FLOAT32, shape or (len(values),), array("f", values).tobytes())


def compute(loss_fn: str = "cross_entropy", config: dict[str, float | str] | None = None, tokens=(1, 2), **inputs: Tensor) -> Compute:
    datum = Datum(model_input(*tokens), {"target_tokens": int64s(*tokens)} | inputs)
    return Compute((datum,), loss_fn, config or {}, backward=True)


def pairs(loss_fn: str, num_datums: int, config: dict[str, float | str] | None = None) -> Compute:
    inputs = {"target_tokens": int64s(1, 2)} if loss_fn == "dpo" else {}
    return Compute((Datum(model_input(1, 2), inputs),) * num_datums, loss_fn, config or {}, backward=True)


@pytest.mark.parametrize(
    "command",
    [
        compute(),
        compute(weights=floats(1, 0.5)),
        compute(weights=int64s(1, 0)),  # a caller's integer tensor stands for float32
        compute(target_tokens=int64s(1, 2, 3, 4, shape=(2, 2)), weights=floats(1, 2, 3, 4, shape=(2, 2))),
        compute("importance_sampling", logprobs=floats(0, 0), advantages=floats(1, -1)),
        compute("ppo", {"clip_low_threshold": 1, "clip_high_threshold": 1}, logprobs=floats(0, 0), advantages=floats(1, -1)),
        compute("cispo", {"clip_low_threshold": 0}, logprobs=floats(0, 0), advantages=int64s(1, -1), clip_high_threshold=int64s(1, 2)),
        compute("dro", {"beta": 0}, logprobs=floats(0, 0), advantages=floats(1, -1), weights=floats(1, 0)),
        compute("gspo", logprobs=floats(0, 0), advantages=floats(1, -1), sequence_ratio_mask=floats(0, 1)),
        pairs("dpo", 4, {"beta": 0.5}),
        pairs("infonce", 2, {"temperature": 1.0}),
    ],
)
def test_good_commands_pass(command):
    check_compute(command, LIMITS)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (compute("astrology"), ValidationFailed, r"loss_fn: 'astrology' is not implemented; use one of cispo, cross_entropy, dpo"),
        (compute(config={"clip": 1.0}), ValidationFailed, r"loss_fn_config: unknown key 'clip'; cross_entropy accepts no keys"),
        (Compute((), "cross_entropy", {}, backward=True), ValidationFailed, "data: empty"),
        (compute(tokens=()), ValidationFailed, r"data\[0\]\.model_input: has no tokens"),
        (compute(tokens=(1,) * 65), InputTokensExceeded, r"data\[0\]\.model_input: 65 tokens exceed the context of 64"),
        (compute(tokens=(1, 100)), ValidationFailed, r"token ids must lie in \[0, 100\)"),
        (compute(tokens=(-1, 5)), ValidationFailed, "got -1 to 5"),
        (compute(mask=floats(1, 1)), ValidationFailed, "reads no input 'mask'; it reads target_tokens, weights"),
        (compute("infonce"), ValidationFailed, "data.0.: half a pair"),
        (compute("importance_sampling", logprobs=floats(0, 0)), ValidationFailed, "needs 'advantages'"),
        (compute(weights=floats(1)), ValidationFailed, r"loss_fn_inputs\.weights: has 1 rows for 2 tokens"),
        (compute(weights=floats(1, shape=(1, 1, 1))), ValidationFailed, r"weights: has rank 3, allowed are 1, 2"),
        (compute(weights=floats(1, 2, shape=(2, 1))), ValidationFailed, r"weights: has shape \[2, 1\], target_tokens \[2\]"),
        (compute("gspo", logprobs=floats(0, 0), advantages=floats(0, 0)), ValidationFailed, "gspo needs 'sequence_ratio_mask'"),
        (compute(target_tokens=int64s(shape=(2, 0))), ValidationFailed, r"target_tokens: shape \[2, 0\] has no columns"),
        (compute(target_tokens=floats(1, 2)), ValidationFailed, r"target_tokens: must be int64, got float32"),
        (compute(target_tokens=Tensor(DType.INT64, (2,), b"123")), ValidationFailed, "target_tokens: 3 bytes"),
    ],
)
def test_bad_commands_are_refused_by_field(command, error, message):
    with pytest.raises(error, match=message):
        check_compute(command, LIMITS)


@pytest.mark.parametrize("loss_fn", ["dpo", "infonce"])
def test_half_a_pair_is_named(loss_fn):
    with pytest.raises(
        ValidationFailed, match=rf"^data\[2\]: half a pair; {loss_fn} reads consecutive datums as pairs, send an even number"
    ):
        check_compute(pairs(loss_fn, 3), LIMITS)


def test_an_input_that_a_loss_does_not_read_is_refused_where_it_reads_none():
    datum = Datum(model_input(1), {"target_tokens": int64s(1)})
    with pytest.raises(ValidationFailed, match="infonce reads no input 'target_tokens'; it reads none"):
        check_compute(Compute((datum, datum), "infonce", {}, backward=False), LIMITS)


@pytest.mark.proves("R48")
@pytest.mark.parametrize(("loss_fn", "key"), [("dpo", "beta"), ("infonce", "temperature")])
@pytest.mark.parametrize("value", [0.0, -0.1])
def test_a_scale_is_above_0(loss_fn, key, value):
    with pytest.raises(ValidationFailed, match=rf"loss_fn_config\.{key}: must be above 0, got {value}; the default is"):
        check_compute(pairs(loss_fn, 2, {key: value}), LIMITS)


@pytest.mark.parametrize("value", ["text", True, float("nan"), float("inf")])
def test_a_config_value_is_a_finite_number(monkeypatch, value):
    monkeypatch.setitem(LOSSES, "clipped", LossSpec({"target_tokens": LossInput(DType.INT64)}, {"high": 1.2, "low": 0.8}))
    with pytest.raises(ValidationFailed, match=r"loss_fn_config\.high: .* is no finite number; clipped accepts high, low"):
        read_config(compute("clipped", config={"high": value}))


def test_config_defaults_are_filled_in(monkeypatch):
    monkeypatch.setitem(LOSSES, "clipped", LossSpec({"target_tokens": LossInput(DType.INT64)}, {"high": 1.2, "low": 0.8}))
    assert read_config(compute("clipped", config={"high": 2})) == {"high": 2.0, "low": 0.8}


@pytest.mark.parametrize("names", [FieldNames(), FieldNames(loss="loss", config="loss_config")])
@pytest.mark.parametrize(
    ("loss_fn", "key", "value", "wanted"),
    [
        ("ppo", "clip_low_threshold", 1.2, "in [0, 1], got 1.2; the default is 0.8, it bounds the ratio itself"),
        ("cispo", "clip_low_threshold", -0.2, "in [0, 1], got -0.2; the default is 0.0, it bounds the ratio itself"),
        ("gspo", "clip_high_threshold", 0.2, "at least 1, got 0.2; the default is 1.2, it bounds the ratio itself"),
        ("dro", "beta", -1e-9, "at least 0, got -1e-09; the default is 0.05"),
    ],
)
def test_a_config_value_out_of_its_bounds_is_refused_in_the_words_of_the_face(names, loss_fn, key, value, wanted):
    with pytest.raises(ValidationFailed, match=rf"^{names.config}\.{key}: must be {re.escape(wanted)}"):
        read_config(compute(loss_fn, config={key: value}), names)


def test_bounds_are_of_config_keys_and_hold_their_defaults():
    for spec in LOSSES.values():
        assert set(spec.bounds) <= set(spec.config)
        assert all(spec.config[key] in bounds for key, bounds in spec.bounds.items())


@pytest.mark.parametrize("names", [FieldNames(), FieldNames(loss="loss")])
def test_a_loss_that_cannot_be_offered_is_refused_with_what_to_use_for_it(names):
    assert not set(REFUSED_LOSSES) & set(LOSSES)
    with pytest.raises(ValidationFailed, match=rf"^{names.loss}: 'stable_reinforce' is not offered, .*; use cispo or ppo"):
        check_compute(compute("stable_reinforce", {"kl_coeff": 0.01}), LIMITS, names=names)


@pytest.mark.parametrize(("lowest", "highest", "is_good"), [(0, 1, True), (0.5, 0.5, True), (-1e-6, 1, False), (0, 1.000001, False)])
def test_rows_are_held_to_their_bounds(lowest, highest, is_good):
    wanted = LossInput(DType.FLOAT32, bounds=Bounds(0.0, 1.0, hint="a share"))
    check_bounds("f", LossInput(DType.FLOAT32), lowest, highest)
    if is_good:
        check_bounds("f", wanted, lowest, highest)
    else:
        with pytest.raises(ValidationFailed, match=r"^f: must be in \[0, 1\], got .* to .*; a share$"):
            check_bounds("f", wanted, lowest, highest)


def test_a_sequence_that_trains_needs_a_row_in_its_mask():
    check_ratio_mask(3, has_members=False, trains=False)
    check_ratio_mask(3, has_members=True, trains=True)
    with pytest.raises(ValidationFailed, match=r"^data\[3\]\.loss_fn_inputs\.sequence_ratio_mask: is 0 everywhere"):
        check_ratio_mask(3, has_members=False, trains=True)


def test_only_what_an_engine_offers_is_listed():
    with pytest.raises(ValidationFailed, match=r"'infonce' is not implemented; use one of cross_entropy, dpo$"):
        spec_of("infonce", {"dpo", "cross_entropy"})


def test_numbers_that_are_not_finite_are_counted():
    check_finite("f", 0)
    with pytest.raises(ValidationFailed, match="f: 2 elements are NaN or infinite; send finite numbers"):
        check_finite("f", 2)


def test_what_sparse_tensors_unfold_to_is_bounded():
    """Half a kilobyte a datum would be 32 MiB each in the engine."""
    columns = MAX_ELEMENTS // 2
    sparse = Tensor(DType.INT64, (2, columns), array("q", [1]).tobytes(), Csr(array("q", [0, 0, 1]).tobytes(), array("q", [5]).tobytes()))
    datum = compute(target_tokens=sparse.check("target_tokens")).data[0]
    allowed = MAX_COMMAND_ELEMENTS // MAX_ELEMENTS
    check_compute(Compute((datum,) * allowed, "cross_entropy", {}, backward=True), LIMITS)
    with pytest.raises(PayloadTooLarge, match=rf"data: the loss inputs have {(allowed + 1) * MAX_ELEMENTS} elements when dense"):
        check_compute(Compute((datum,) * (allowed + 1), "cross_entropy", {}, backward=True), LIMITS)


def test_refusals_are_user_errors_of_one_line():
    with pytest.raises(TinsmithError) as caught:
        check_compute(compute("no\nsuch\nloss" * 100), LIMITS)
    assert caught.value.category == "user"
    assert "\n" not in caught.value.message
