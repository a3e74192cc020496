"""Datums to tensors: what is refused by index and key, what is legal, and how micro-batches are planned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engines.datums import compute, datum, ints, sparse, tensor
from tinsmith.engines import batch
from tinsmith.engines.batch import Limits, pad, plan, read_config, read_examples
from tinsmith.protocol.errors import InputTokensExceeded, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.losses import LossInput, LossSpec
from tinsmith.protocol.tensors import Csr, DType, Tensor

LIMITS = Limits(vocab_size=100, max_context=8)
GOOD = datum([1, 2, 3], target_tokens=ints([2, 3, 4]), weights=tensor([1, 1, 1]))
ROWS = {"target_tokens": ints([2, 3, 4]), "logprobs": tensor([-1, -1, -1]), "advantages": tensor([1, 1, 1])}


def rl(**changed: Tensor) -> Datum:
    return datum([1, 2, 3], **(ROWS | changed))


REFUSED = [
    ("cross_entropy", datum([], target_tokens=ints([])), "datum 1: model_input: expected at least one token"),
    ("cross_entropy", datum([1, 100], target_tokens=ints([1, 1])), r"datum 1: model_input: expected token ids in \[0, 100\), got 100"),
    ("cross_entropy", datum([1, -1], target_tokens=ints([1, 1])), "model_input: expected token ids .* got -1"),
    ("cross_entropy", datum([1]), "datum 1: loss_fn_inputs: cross_entropy needs target_tokens; got none"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), mask=tensor([1])), "does not take mask; accepted keys: target_tokens, weights"),
    ("cross_entropy", datum([1], target_tokens=tensor([1])), "datum 1: target_tokens: expected dtype int64, got float32"),
    ("cross_entropy", datum([1, 2], target_tokens=ints([1])), r"target_tokens: expected shape \[2\], .* got \[1\]"),
    ("cross_entropy", datum([1, 2], target_tokens=ints([[1, 1]])), r"target_tokens: expected shape \[2, K >= 1\], .* got \[1, 2\]"),
    ("cross_entropy", datum([1], target_tokens=ints(np.zeros((1, 0)))), r"expected shape \[1, K >= 1\], .* got \[1, 0\]"),
    ("cross_entropy", datum([1], target_tokens=ints([[[1]]])), r"target_tokens: expected rank 1 or 2, got shape \[1, 1, 1\]"),
    ("cross_entropy", datum([1], target_tokens=ints([-100])), r"target_tokens: expected token ids in \[0, 100\), got -100"),
    ("cross_entropy", datum([1], target_tokens=ints([100])), "target_tokens: expected token ids .* got 100"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), weights=tensor([[1, 1]])), r"weights: expected the shape of target_tokens \[1\]"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), weights=tensor([np.nan])), "datum 1: weights: expected finite numbers"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), weights=tensor([np.inf])), "weights: expected finite numbers, got 1 of NaN"),
    ("cross_entropy", datum([1], target_tokens=Tensor(DType.INT64, (1,), b"123")), "target_tokens: 3 bytes"),
    (
        "cross_entropy",
        datum([1], target_tokens=Tensor(DType.INT64, (1, 9), b"", Csr(np.array([0, 1]).tobytes(), b""))),
        "target_tokens: sparse row pointers",
    ),
    ("importance_sampling", rl(target_tokens=ints([[2], [3], [4]])), r"target_tokens: expected rank 1, got shape \[3, 1\]"),
    ("importance_sampling", datum([1], target_tokens=ints([1]), advantages=tensor([1])), "importance_sampling needs logprobs"),
    ("importance_sampling", rl(advantages=tensor([1, 1])), r"datum 1: advantages: expected shape \[3\], .* got \[2\]"),
    ("importance_sampling", rl(advantages=tensor([0, np.nan, 0])), "advantages: expected finite numbers, got 1"),
    ("importance_sampling", rl(logprobs=tensor([-np.inf, 0, 0])), "logprobs: expected finite numbers"),
    ("importance_sampling", rl(sequence_ratio_mask=tensor([1, 1, 1])), "does not take sequence_ratio_mask"),
]


@pytest.mark.parametrize(("loss_fn", "bad", "message"), REFUSED)
def test_a_bad_datum_is_refused_by_index_and_key(loss_fn: str, bad: Datum, message: str) -> None:
    good = GOOD if loss_fn == "cross_entropy" else rl()
    with pytest.raises(ValidationFailed, match=message):
        read_examples(compute([good, bad], loss_fn), LIMITS)


def test_a_datum_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputTokensExceeded, match="datum 0: model_input: 9 tokens, the context holds 8"):
        read_examples(compute([datum([1] * 9, target_tokens=ints([1] * 9))]), LIMITS)


def test_no_datums_are_refused() -> None:
    with pytest.raises(ValidationFailed, match="at least one datum"):
        read_examples(compute([]), LIMITS)


@pytest.mark.parametrize("read", [read_config, lambda command: read_examples(command, LIMITS)])
def test_an_unknown_loss_is_refused_with_the_known_ones(read: object) -> None:
    with pytest.raises(ValidationFailed, match="'ppo2' is not offered; choose one of cross_entropy, importance_sampling"):
        read(compute([GOOD], "ppo2"))  # type: ignore[operator]


def test_an_unknown_config_key_is_refused_with_the_accepted_ones() -> None:
    with pytest.raises(ValidationFailed, match="cross_entropy does not take 'temperature'; accepted keys: none"):
        read_config(compute([GOOD], config={"temperature": 1.0}))


@pytest.mark.parametrize("value", ["0.2", True, float("nan"), float("inf")])
def test_a_config_value_that_is_no_finite_number_is_refused(value: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batch.LOSSES, "clipped", LossSpec({"target_tokens": LossInput(DType.INT64)}, {"high": 1.2, "low": 0.8}))
    with pytest.raises(ValidationFailed, match=r"high must be a finite number, .*; accepted keys: high, low"):
        read_config(compute([GOOD], "clipped", config={"high": value}))


def test_config_defaults_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batch.LOSSES, "clipped", LossSpec({"target_tokens": LossInput(DType.INT64)}, {"high": 1.2, "low": 0.8}))
    assert read_config(compute([GOOD], "clipped", config={"high": 2})) == {"high": 2.0, "low": 0.8}


def test_target_0_and_positive_logprobs_are_legal() -> None:
    (example,) = read_examples(compute([rl(target_tokens=ints([0, 0, 1]), logprobs=tensor([0.1, 0, 0]))], "importance_sampling"), LIMITS)
    assert example.targets.tolist() == [0, 0, 1]
    assert example.num_targets == 1


def test_integer_weights_are_cast() -> None:
    (example,) = read_examples(compute([datum([1, 2], target_tokens=ints([2, 3]), weights=ints([0, 2]))]), LIMITS)
    assert example.inputs["weights"].dtype == torch.float32
    assert example.inputs["weights"].tolist() == [0, 2]


def test_sparse_inputs_are_dense_before_they_are_paired() -> None:
    targets, weights = [[0, 7], [0, 0], [9, 8]], [[0.75, 0.25], [0, 0], [0, 0.9]]
    dense = datum([1, 2, 3], target_tokens=ints(targets), weights=tensor(weights))
    for changed in (
        datum([1, 2, 3], target_tokens=sparse(targets, DType.INT64), weights=tensor(weights)),
        datum([1, 2, 3], target_tokens=ints(targets), weights=sparse(weights)),
        datum([1, 2, 3], target_tokens=sparse(targets, DType.INT64), weights=sparse(weights)),
    ):
        (expected,), (example,) = (read_examples(compute([one]), LIMITS) for one in (dense, changed))
        assert torch.equal(example.targets, expected.targets)
        assert torch.equal(example.inputs["weights"], expected.inputs["weights"])
        assert example.num_targets == 2


def test_a_sparse_tensor_without_entries_is_all_zeros() -> None:
    empty = Tensor(DType.FLOAT32, (1, 2), b"", Csr(np.array([0, 0]).tobytes(), b""))
    (example,) = read_examples(compute([datum([1], target_tokens=ints([[1, 2]]), weights=empty)]), LIMITS)
    assert example.inputs["weights"].tolist() == [[0, 0]]


def test_padding_is_masked() -> None:
    examples = read_examples(compute([GOOD, datum([7], target_tokens=ints([8]))]), LIMITS)
    tokens_BT, mask_BT = pad(examples)
    assert tokens_BT.tolist() == [[1, 2, 3], [7, 0, 0]]
    assert mask_BT.tolist() == [[True, True, True], [True, False, False]]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_micro_batches_hold_every_datum_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget)
    assert sorted(position for group in batches for position in group) == list(range(len(lengths)))
    for group in batches:
        assert len(group) == 1 or len(group) * max(lengths[position] for position in group) <= budget


def test_errors_are_user_errors() -> None:
    with pytest.raises(TinsmithError) as caught:
        read_examples(compute([]), LIMITS)
    assert caught.value.category == "user"
