"""Datums to tensors: what is refused by index and key, what is legal, and how micro-batches are planned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engines.datums import compute, datum, ints, sparse, tensor
from tinsmith.engines.batch import pad, plan, read_examples
from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.tensors import Csr, DType, Tensor

LIMITS = Limits(vocab_size=100, max_context=8)
GOOD = datum([1, 2, 3], target_tokens=ints([2, 3, 4]), weights=tensor([1, 1, 1]))
ROWS = {"target_tokens": ints([2, 3, 4]), "logprobs": tensor([-1, -1, -1]), "advantages": tensor([1, 1, 1])}


def rl(**changed: Tensor) -> Datum:
    return datum([1, 2, 3], **(ROWS | changed))


REFUSED = [
    ("cross_entropy", datum([1], target_tokens=ints([-100])), r"data\[1\]\.loss_fn_inputs\.target_tokens: token ids .* got -100 to -100"),
    ("cross_entropy", datum([1], target_tokens=ints([100])), r"target_tokens: token ids must lie in \[0, 100\), got 100 to 100"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), weights=tensor([np.nan])), r"weights: 1 elements are NaN or infinite"),
    ("cross_entropy", datum([1], target_tokens=ints([1]), weights=tensor([np.inf])), "weights: 1 elements are NaN or infinite"),
    (
        "cross_entropy",
        datum([1], target_tokens=Tensor(DType.INT64, (1, 9), b"", Csr(np.array([0, 1]).tobytes(), b""))),
        "target_tokens: sparse row pointers",
    ),
    ("importance_sampling", rl(advantages=tensor([0, np.nan, 0])), "advantages: 1 elements are NaN"),
    ("importance_sampling", rl(logprobs=tensor([-np.inf, 0, 0])), "logprobs: 1 elements are NaN or infinite"),
]


@pytest.mark.parametrize(("loss_fn", "bad", "message"), REFUSED)
def test_a_bad_number_is_refused_by_index_and_key(loss_fn: str, bad: Datum, message: str) -> None:
    good = GOOD if loss_fn == "cross_entropy" else rl()
    with pytest.raises(ValidationFailed, match=message):
        read_examples(compute([good, bad], loss_fn), LIMITS)


def test_what_the_protocol_refuses_is_refused_here_too() -> None:
    with pytest.raises(InputTokensExceeded, match=r"data\[0\]\.model_input: 9 tokens exceed the context of 8"):
        read_examples(compute([datum([1] * 9, target_tokens=ints([1] * 9))]), LIMITS)
    with pytest.raises(ValidationFailed, match="data: empty"):
        read_examples(compute([]), LIMITS)
    with pytest.raises(ValidationFailed, match="'cross_entropy' is not implemented; use one of dpo"):
        read_examples(compute([GOOD]), LIMITS, {"dpo"})


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
