"""What a sample may ask of its prompt."""

from array import array
from dataclasses import replace

import pytest

from tinsmith.protocol import sample_checks
from tinsmith.protocol.errors import InputTokensExceeded, ValidationFailed
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.sample_checks import MAX_CELLS, check_sample, scored_from
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.tensors import Csr, DType, Tensor

LIMITS = Limits(vocab_size=100, max_context=64)


def ids(*values: int, shape: tuple[int, ...]) -> Tensor:
    return Tensor(DType.INT64, shape, array("q", values).tobytes())


def sparse(crow: list[int], values: list[int], num_columns: int = 3) -> Tensor:
    csr = Csr(array("q", crow).tobytes(), array("q", [0] * len(values)).tobytes())
    return Tensor(DType.INT64, (len(crow) - 1, num_columns), array("q", values).tobytes(), csr)


def sample(*, num_tokens: int = 4, **asked: object) -> Sample:
    prompt = ModelInput((TextChunk(array("i", range(1, num_tokens + 1)).tobytes()),))
    return replace(Sample(prompt, SamplingParams(seed=0), 1, None), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"target_prompt_logprobs": ids(-1, -1, 99, shape=(3, 1))},
        {"target_prompt_logprobs": sparse([0, 0, 1, 2], [0, -1])},
        {"topk_prompt_logprobs": 5, "topk_sample_logprobs": 5, "prompt_alt_tokens_k": 5},
        {"params": SamplingParams(seed=0, logit_bias={0: 1.0, 99: -1.0})},
    ],
)
def test_what_may_be_asked(asked: dict[str, object]) -> None:
    check_sample(sample(**asked), LIMITS)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: .*set prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n: 0 .*send 1 to 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n: 4 .*send 1 to 3"),
        ({"target_prompt_logprobs": Tensor(DType.FLOAT32, (3, 1), bytes(12))}, "target_prompt_logprobs: dtype float32"),
        ({"target_prompt_logprobs": ids(1, 2, 3, shape=(3,))}, r"target_prompt_logprobs: shape \[3\]"),
        ({"target_prompt_logprobs": ids(1, 2, 3, 4, shape=(4, 1))}, r"shape \[4, 1\] .*send \[3, K\]"),
        ({"target_prompt_logprobs": ids(shape=(3, 0))}, "names no token"),
        ({"target_prompt_logprobs": ids(-1, -1, -1, shape=(3, 1))}, "names no token"),
        ({"target_prompt_logprobs": sparse([0, 0, 0, 0], [])}, "names no token"),
        ({"target_prompt_logprobs": ids(1, -2, 3, shape=(3, 1))}, "got -2 to 3"),
        ({"target_prompt_logprobs": ids(1, 2, 100, shape=(3, 1))}, r"\[0, 100\)"),
        ({"params": SamplingParams(seed=0, logit_bias={100: 1.0})}, r"logit_bias: .*\[0, 100\)"),
    ],
)
def test_what_may_not_be_asked_is_refused_by_its_field(asked: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationFailed, match=words):
        check_sample(sample(**asked), LIMITS)


def test_the_prompt_is_checked_first() -> None:
    with pytest.raises(InputTokensExceeded, match="prompt"):
        check_sample(sample(num_tokens=65, prompt_logprobs_last_n=1), LIMITS)


@pytest.mark.parametrize("field", ["topk_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs", "target_prompt_logprobs"])
def test_answers_are_bounded(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 cells: 4 tokens of the prompt x 3, 2 samples of 2 tokens x 3, 3 rows x 4."""
    asked: dict[str, object] = {field: ids(*range(12), shape=(3, 4)) if field == "target_prompt_logprobs" else 3}
    request = sample(num_samples=2, params=SamplingParams(seed=0, max_tokens=2), **asked)
    monkeypatch.setattr(sample_checks, "MAX_CELLS", 12)
    check_sample(request, LIMITS)
    monkeypatch.setattr(sample_checks, "MAX_CELLS", 11)
    with pytest.raises(ValidationFailed, match=f"{field}: the answer would have 12 cells, the bound is 11"):
        check_sample(request, LIMITS)


def test_a_sample_without_max_tokens_counts_the_room_that_it_has() -> None:
    limits = Limits(vocab_size=100, max_context=MAX_CELLS)
    check_sample(sample(topk_sample_logprobs=1), limits)
    with pytest.raises(ValidationFailed, match="topk_sample_logprobs"):
        check_sample(sample(topk_sample_logprobs=2), limits)


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({}, 3),
        ({"topk_sample_logprobs": 3}, 3),
        ({"prompt_logprobs": True}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, 2),
        ({"topk_prompt_logprobs": 1}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "prompt_alt_tokens_k": 1}, 0),
        ({"target_prompt_logprobs": ids(-1, -1, -1, 5, -1, -1, shape=(3, 2))}, 1),
        ({"target_prompt_logprobs": sparse([0, 0, 2, 3], [-1, 0, 4])}, 1),
        ({"target_prompt_logprobs": sparse([0, 2, 2, 3], [-1, -1, 4])}, 2),
        ({"target_prompt_logprobs": sparse([0, 0, 0, 1], [4]), "prompt_logprobs": True, "prompt_logprobs_last_n": 2}, 1),
    ],
)
def test_the_first_row_that_anything_is_asked_of(asked: dict[str, object], first: int) -> None:
    check_sample(sample(**asked), LIMITS)
    assert scored_from(sample(**asked)) == first
