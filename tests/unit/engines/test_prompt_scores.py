"""Scores of a prompt from logits that come in chunks: each at its position, whatever the chunks."""

import math
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tinsmith.engines.prompt_scores import PromptScores
from tinsmith.engines.sampling_rules import LogprobMode, NonFiniteLogits
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.tensors import Csr, DType, Tensor, float32_values, int64_values

VOCAB, WIDTH = 12, 16  # the embedding is padded
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_ROWS = len(PROMPT) - 1
LOGITS = 2 * torch.randn(len(PROMPT), WIDTH, generator=torch.Generator().manual_seed(0))
LOGPROBS = torch.log_softmax(LOGITS, -1)
ALL_AT_ONCE = (0, len(PROMPT))


def sample(**asked: object) -> Sample:
    prompt = ModelInput((TextChunk(array("i", PROMPT).tobytes()),))
    return replace(Sample(prompt, SamplingParams(seed=5), 1, None), **asked)  # type: ignore[arg-type]


def scores(request: Sample, *bounds: int, mode: LogprobMode = "tempered") -> PromptScores:
    """Of logits that come cut at `bounds`."""
    scored = PromptScores(request, PROMPT, VOCAB, mode)
    for start, end in pairwise(bounds):
        if scored.wants(start, end):
            scored.take(start, LOGITS[start:end])
    return scored


def targets(rows: list[list[int]]) -> Tensor:
    return Tensor(DType.INT64, (len(rows), len(rows[0])), array("q", [token for row in rows for token in row]).tobytes())


BOUNDS = [ALL_AT_ONCE, (0, 3, 6, 8), (0, 1, 7, 8)]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_token_is_scored_by_the_logits_before_it(bounds: tuple[int, ...]) -> None:
    scored = scores(sample(prompt_logprobs=True, topk_prompt_logprobs=2), *bounds)
    assert scored.logprobs is not None
    assert scored.logprobs[0] is None
    assert scored.logprobs[1:] == pytest.approx([float(LOGPROBS[row, PROMPT[row + 1]]) for row in range(NUM_ROWS)])
    assert scored.best is not None
    assert scored.best[0] is None
    for row, best in enumerate(scored.best[1:]):
        assert best is not None
        assert [token for token, _ in best] == LOGPROBS[row, :VOCAB].topk(2).indices.tolist(), "no id of the padding"


@pytest.mark.parametrize("bounds", [*BOUNDS, (5, 8), (6, 8)])
def test_the_last_n_are_scored_and_the_others_are_not(bounds: tuple[int, ...]) -> None:
    full = scores(sample(prompt_logprobs=True, topk_prompt_logprobs=2), *ALL_AT_ONCE)
    scored = scores(sample(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=1), *bounds)
    assert full.logprobs is not None
    assert full.best is not None
    assert scored.logprobs == [None] * 7 + full.logprobs[7:]
    assert scored.best == [None] * 7 + full.best[7:]


def test_rows_that_nothing_is_asked_of_are_not_wanted() -> None:
    assert not scores(sample()).wants(0, 8)
    last = scores(sample(prompt_logprobs=True, prompt_logprobs_last_n=2))
    assert [last.wants(*bounds) for bounds in ((0, 5), (0, 6), (5, 6), (6, 8), (7, 8))] == [False, True, True, True, False]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_targets_are_scored_at_the_position_after_their_row(bounds: tuple[int, ...]) -> None:
    rows = [[-1, -1], [-1, 7], [0, 0], [11, -1], [-1, -1], [2, 3], [4, -1]]
    scored = scores(sample(target_prompt_logprobs=targets(rows)), *bounds).target_logprobs
    assert scored is not None
    assert (scored.dtype, scored.shape, scored.csr) == (DType.FLOAT32, (7, 2), None)
    expected = [0.0 if token == -1 else float(LOGPROBS[row, token]) for row, ids in enumerate(rows) for token in ids]
    assert list(float32_values(scored.data)) == pytest.approx(expected)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_sparse_targets_are_answered_in_their_own_layout(bounds: tuple[int, ...]) -> None:
    cells = [(1, 7), (3, 11), (3, -1), (3, 0), (6, 4)]
    crow = [sum(row < bound for row, _ in cells) for bound in range(NUM_ROWS + 1)]
    csr = Csr(array("q", crow).tobytes(), array("q", [0, 0, 1, 3, 2]).tobytes())
    asked = Tensor(DType.INT64, (NUM_ROWS, 4), array("q", [token for _, token in cells]).tobytes(), csr)
    scored = scores(sample(target_prompt_logprobs=asked), *bounds).target_logprobs
    assert scored is not None
    assert (scored.shape, scored.csr) == (asked.shape, csr)
    assert list(float32_values(scored.data)) == pytest.approx([0.0 if token == -1 else float(LOGPROBS[row, token]) for row, token in cells])


def alternatives(k: int = 400, mode: LogprobMode = "tempered", bounds: tuple[int, ...] = ALL_AT_ONCE, **params: float):
    request = sample(prompt_alt_tokens_k=k, params=SamplingParams.model_validate({"seed": 5, "top_k": 1, "top_p": 0.1} | params))
    drawn = scores(request, *bounds, mode=mode).alt_tokens
    assert drawn is not None
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (DType.INT64, DType.FLOAT32)
    assert drawn.tokens.shape == drawn.logprobs.shape == (NUM_ROWS, k)
    tokens, logprobs = torch.tensor(list(int64_values(drawn.tokens.data))), torch.tensor(list(float32_values(drawn.logprobs.data)))
    return tokens.view(NUM_ROWS, k), logprobs.view(NUM_ROWS, k)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_alternatives_follow_the_model_at_the_requests_temperature(temperature: float) -> None:
    tokens, logprobs = alternatives(temperature=temperature)
    distribution = torch.log_softmax(LOGITS[:NUM_ROWS, :VOCAB].double() / temperature, -1)
    torch.testing.assert_close(logprobs, distribution.gather(1, tokens).float())
    for row in range(NUM_ROWS):
        frequencies = torch.bincount(tokens[row], minlength=VOCAB) / tokens.shape[1]
        assert float((frequencies - distribution[row].exp()).abs().max()) < 0.12, "five standard deviations"


def test_alternatives_repeat_by_seed_whatever_the_chunks() -> None:
    tokens, logprobs = alternatives(k=8)
    for again in (alternatives(k=8), alternatives(k=8, bounds=(0, 3, 6, 8))):
        assert torch.equal(tokens, again[0])
        assert torch.equal(logprobs, again[1])
    assert torch.equal(tokens[:, :3], alternatives(k=3)[0])
    assert not torch.equal(tokens, alternatives(k=8, seed=6)[0])


def test_greedy_alternatives_are_the_best_token_with_its_raw_logprob() -> None:
    tokens, logprobs = alternatives(k=2, temperature=0)
    best = LOGITS[:NUM_ROWS, :VOCAB].argmax(-1)
    assert tokens.tolist() == [[token, token] for token in best.tolist()]
    torch.testing.assert_close(logprobs[:, 0], LOGPROBS[range(NUM_ROWS), best])


def test_the_raw_mode_tells_the_models_own_logprobs_of_alternatives() -> None:
    tokens, logprobs = alternatives(k=3, temperature=0.5, mode="raw")
    torch.testing.assert_close(logprobs, LOGPROBS[:NUM_ROWS].gather(1, tokens))


@pytest.mark.parametrize("asked", [{"prompt_logprobs": True}, {"prompt_alt_tokens_k": 1}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_score_nothing(asked: dict[str, object], bad: float) -> None:
    broken = LOGITS.clone()
    broken[2, 0] = bad
    with pytest.raises(NonFiniteLogits):
        PromptScores(sample(**asked), PROMPT, VOCAB, "tempered").take(0, broken)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    prompt = ModelInput((TextChunk(array("i", [3]).tobytes()),))
    request = replace(sample(prompt_logprobs=True, topk_prompt_logprobs=1, prompt_alt_tokens_k=2), prompt=prompt)
    scored = PromptScores(request, [3], VOCAB, "tempered")
    assert not scored.wants(0, 1)
    assert (scored.logprobs, scored.best) == ([None], [None])
    assert scored.alt_tokens is not None
    assert scored.alt_tokens.tokens.shape == (0, 2)
