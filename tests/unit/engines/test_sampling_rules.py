"""The distribution that is drawn from, its log-probs, and the draw itself."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engines.sampling_rules import Draw, LogprobMode, NonFiniteLogits, alternative_uniform, candidates, draw, uniform
from tinsmith.protocol.sampling import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0])


def params(**settings: object) -> SamplingParams:
    return SamplingParams.model_validate({"seed": 0} | settings)


def logprob_of(token: int, logits: torch.Tensor = LOGITS, mode: str = "tempered", **settings: float) -> float | None:
    """The log-prob returned with `token`, None if it cannot be drawn."""
    for step in range(2000):
        drawn = draw(logits, len(logits), params(**settings), step / 2000, "raw" if mode == "raw" else "tempered")
        if drawn.token == token:
            return drawn.logprob
    return None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-0.40760596, -1.40760596, -2.40760596]),
        ({"temperature": 0.5}, [-0.14293163, -2.14293163, -4.14293163]),
        ({"temperature": 0.5, "top_k": 2}, [-0.12692801, -2.12692801, None]),
        ({"temperature": 0}, [-0.40760596, None, None]),
    ],
)
def test_logprobs_are_those_of_the_distribution_drawn_from(settings: dict[str, float], expected: list[float | None]) -> None:
    for token, logprob in enumerate(expected):
        assert logprob_of(token, **settings) == (None if logprob is None else pytest.approx(logprob, abs=1e-6))


def test_the_raw_mode_answers_the_models_own_logprobs() -> None:
    for token, logprob in enumerate([-0.40760596, -1.40760596]):
        assert logprob_of(token, mode="raw", temperature=0.5, top_k=2) == pytest.approx(logprob, abs=1e-6)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert draw(torch.tensor([0.0, 3.0, 3.0]), 3, params(temperature=0), 0.9, "tempered").token == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert draw(LOGITS, 3, params(temperature=temperature), 0.999, "tempered") == Draw(0, 0.0)


def test_a_large_temperature_is_nearly_uniform() -> None:
    assert logprob_of(2, temperature=1e6) == pytest.approx(math.log(1 / 3), abs=1e-5)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    ids, logprobs = candidates(torch.zeros(10), params(top_k=3))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2]
    assert logprobs.exp().tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("top_k", "kept"), [(-1, 3), (0, 3), (1, 1), (3, 3), (100, 3)])
def test_top_k_is_off_at_minus_one_and_zero(top_k: int, kept: int) -> None:
    assert len(candidates(LOGITS, params(top_k=top_k))[1]) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, [2]), (0.5, [2]), (0.51, [1, 2]), (0.8, [1, 2]), (0.81, [0, 1, 2]), (1.0, None)])
def test_top_p_keeps_the_token_that_crosses(top_p: float, kept: list[int] | None) -> None:
    ids, logprobs = candidates(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log(), params(top_p=top_p))
    assert (None if ids is None else ids.tolist()) == kept
    assert float(logprobs.exp().sum()) == pytest.approx(1)


def test_top_p_counts_the_mass_left_by_top_k() -> None:
    ids, _ = candidates(torch.tensor([0.1, 0.4, 0.5], dtype=torch.float64).log(), params(top_k=2, top_p=0.52))
    assert ids is not None
    assert ids.tolist() == [2], "0.5 of the 0.9 that top-k leaves is 0.56"


def test_a_flat_distribution_needs_the_full_sort() -> None:
    ids, logprobs = candidates(torch.zeros(5000), params(top_p=0.5))
    assert ids is not None
    assert len(ids) in (2500, 2501)
    assert float(logprobs.exp().sum()) == pytest.approx(1)


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30), st.floats(0.05, 3), st.integers(-1, 35), st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_candidates_are_the_most_probable_ones(values: list[float], temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor(values)
    ids, logprobs = candidates(logits, params(temperature=temperature, top_k=top_k, top_p=top_p))
    kept = range(len(values)) if ids is None else ids.tolist()
    left_out = set(range(len(values))) - set(kept)
    assert float(logprobs.exp().sum()) == pytest.approx(1)
    # Logits closer than float32 tells apart once they are log-probs may change places.
    assert max((values[token] for token in left_out), default=-math.inf) <= min(values[token] for token in kept) + 1e-5


def test_draws_have_the_stated_frequencies() -> None:
    """Pearson's statistic over 20,000 draws stays under the 99.9 % point of its distribution (5 degrees of freedom: 20.5)."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.5, -0.4, -6.0])
    settings = params(temperature=0.8, top_k=6)
    ids, logprobs = candidates(logits, settings)
    assert ids is not None
    counts = dict.fromkeys(ids.tolist(), 0)
    for position in range(20_000):
        counts[draw(logits, 7, settings, uniform(7, 0, position), "tempered").token] += 1
    expected = dict(zip(ids.tolist(), (logprobs.exp() * 20_000).tolist(), strict=True))
    assert sum((counts[token] - expected[token]) ** 2 / expected[token] for token in counts) < 20.5


def test_the_padding_of_the_embedding_is_never_drawn() -> None:
    logits = torch.tensor([0.0, 0.0, 50.0])
    assert draw(logits, 2, params(temperature=0), 0.5, "tempered").token == 0
    assert {draw(logits, 2, params(), u, "tempered").token for u in (0.0, 0.4, 0.6, 0.999999)} == {0, 1}


def test_ids_without_mass_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    drawn = {draw(logits, 5, params(), u, "tempered").token for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53, 1.0)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(NonFiniteLogits):
        draw(torch.tensor([0.0, bad]), 2, params(temperature=temperature), 0.5, "tempered")


def test_uniform_numbers_depend_on_each_argument() -> None:
    chosen = random.Random(0)
    keys = {(chosen.randrange(-(2**63), 2**63), chosen.randrange(64), chosen.randrange(4096)) for _ in range(2000)}
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_the_best_are_those_of_the_distribution_drawn_from() -> None:
    drawn = draw(LOGITS, 3, params(temperature=0.5), 0.0, "tempered", num_best=2)
    assert drawn.best is not None
    assert [token for token, _ in drawn.best] == [0, 1]
    assert [value for _, value in drawn.best] == pytest.approx([-0.14293163, -2.14293163])
    assert drawn.best[0] == (drawn.token, drawn.logprob)
    filtered = draw(LOGITS, 3, params(temperature=0.5, top_k=2), 0.0, "tempered", num_best=9)
    assert filtered.best is not None
    assert [value for _, value in filtered.best] == pytest.approx([-0.12692801, -2.12692801]), "what was filtered out is not told"
    assert draw(LOGITS, 3, params(), 0.0, "tempered").best is None


@pytest.mark.parametrize(("mode", "temperature"), [("raw", 0.5), ("tempered", 0), ("raw", 0)])
def test_the_best_of_raw_and_greedy_are_the_models_own(mode: LogprobMode, temperature: float) -> None:
    drawn = draw(LOGITS, 3, params(temperature=temperature, top_k=1), 0.0, mode, num_best=3)
    assert drawn.best is not None
    assert [value for _, value in drawn.best] == pytest.approx([-0.40760596, -1.40760596, -2.40760596])
    assert drawn.best[0] == (drawn.token, drawn.logprob)


def test_of_equally_good_ones_the_lower_ids_come_first_and_none_without_mass() -> None:
    drawn = draw(torch.tensor([0.0, 2.0, -math.inf, 2.0, 0.0, 9.0]), 5, params(), 0.0, "tempered", num_best=9)
    assert drawn.best is not None
    assert [token for token, _ in drawn.best] == [1, 3, 0, 4], "nor the padding"


def test_penalties_change_what_is_drawn_and_its_logprob() -> None:
    settings = params(frequency_penalty=0.5, presence_penalty=1.0)
    penalised = torch.log_softmax(torch.tensor([2.0 - 2 * 0.5 - 1.0, 1.0 - 0.5 - 1.0, 0.0]).double(), 0)
    for token in range(3):
        drawn = next(
            drawn
            for step in range(1000)
            if (drawn := draw(LOGITS, 3, settings, step / 1000, "tempered", counts={0: 2, 1: 1}, num_best=3)).token == token
        )
        assert drawn.logprob == pytest.approx(float(penalised[token]))
        assert drawn.best is not None
        assert dict(drawn.best) == {token: pytest.approx(float(value)) for token, value in enumerate(penalised)}
    assert LOGITS.tolist() == [2.0, 1.0, 0.0], "the logits themselves stay"


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_raw_logprob_is_that_before_the_penalties(temperature: float) -> None:
    settings = params(temperature=temperature, logit_bias={2: 100.0})
    drawn = draw(LOGITS, 3, settings, 0.5, "raw", counts={0: 4})
    assert (drawn.token, drawn.logprob) == (2, pytest.approx(-2.40760596))


def test_numbers_for_alternatives_are_none_of_a_sample() -> None:
    drawn = {uniform(1, index, position) for index in range(30) for position in range(30)}
    alternatives = {alternative_uniform(1, position, index) for index in range(30) for position in range(30)}
    assert len(alternatives) == 900
    assert not drawn & alternatives
