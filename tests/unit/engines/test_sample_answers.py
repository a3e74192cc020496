"""What a sampling engine answers to everything that may be asked: one suite for every engine."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tinsmith.engines.base import SamplingEngine
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.engines.prefixes import PREFILL_CHUNK
from tinsmith.protocol.capabilities import SAMPLING_ENGINES
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values

PROMPT = (7, 8, 9, 10, 11)
LONG = tuple(range(100, 100 + 2 * PREFILL_CHUNK + 1))


@pytest.fixture(scope="module")
def engines(tiny_model: BaseModelInfo) -> Mapping[str, Callable[[], SamplingEngine]]:
    hf = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=1)
    return {"fake": FakeSamplingEngine, "hf": lambda: hf}


@pytest.fixture(params=["fake", "hf"])
def engine(request: pytest.FixtureRequest, engines: Mapping[str, Callable[[], SamplingEngine]]) -> SamplingEngine:
    return engines[request.param]()


def sample(*prompt: int, num_samples: int = 1, params: Mapping[str, object] | None = None, **asked: object) -> Sample:
    tokens = ModelInput((TextChunk(array("i", prompt or PROMPT).tobytes()),))
    settings = SamplingParams.model_validate({"seed": 1, "max_tokens": 6, "stop": (), **(params or {})})
    return replace(Sample(tokens, settings, num_samples, adapter=None), **asked)  # type: ignore[arg-type]


def answer(engine: SamplingEngine, request: Sample, scope: str = "") -> SampleOutput:
    engine.add("t", request, scope)
    while engine.num_live:
        for _, output in engine.step():
            assert isinstance(output, SampleOutput)
            return output
    raise AssertionError("it ended without an answer")


def int64s(*values: int, shape: tuple[int, ...]) -> Tensor:
    return Tensor(DType.INT64, shape, array("q", values).tobytes())


def test_every_engine_is_held_to_this(engines: Mapping[str, Callable[[], SamplingEngine]]) -> None:
    assert engines.keys() == SAMPLING_ENGINES.keys()


def test_nothing_is_told_that_nobody_asked_for(engine: SamplingEngine) -> None:
    output = answer(engine, sample())
    assert (output.prompt_logprobs, output.topk_prompt_logprobs, output.target_prompt_logprobs) == (None, None, None)
    assert (output.prompt_alt_tokens, output.prompt_cache_hit_tokens, output.sequences[0].topk_logprobs) == (None, 0, None)


def test_samples_of_a_seed_are_distinct_and_repeat(engine: SamplingEngine) -> None:
    first = answer(engine, sample(num_samples=6))
    assert first == answer(engine, sample(num_samples=6))
    assert len({tuple(sequence.tokens) for sequence in first.sequences}) == 6
    alone = answer(engine, sample())
    assert alone.sequences[0].tokens == first.sequences[0].tokens


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_best_of_each_sampled_token(engine: SamplingEngine, temperature: float) -> None:
    for sequence in answer(engine, sample(num_samples=2, topk_sample_logprobs=3, params={"temperature": temperature})).sequences:
        assert sequence.topk_logprobs is not None
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for token, logprob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert best is not None
            assert len(best) == 3
            assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
            assert dict(best).get(token, logprob) == logprob
            if temperature == 0:
                assert best[0] == (token, logprob)


def test_targets_of_the_prompts_own_tokens_are_its_logprobs(engine: SamplingEngine) -> None:
    rows = [8, -1, 9, 8, 10, -1, 11, 0]
    output = answer(engine, sample(prompt_logprobs=True, target_prompt_logprobs=int64s(*rows, shape=(4, 2))))
    assert output.target_prompt_logprobs is not None
    assert output.target_prompt_logprobs.shape == (4, 2)
    scored = list(float32_values(output.target_prompt_logprobs.data))
    assert output.prompt_logprobs is not None
    assert scored[0::2] == pytest.approx(output.prompt_logprobs[1:])
    assert (scored[1], scored[5]) == (0.0, 0.0)
    assert scored[3] < 0


def test_the_last_n_are_as_in_a_full_scoring(engine: SamplingEngine) -> None:
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    full, last = answer(engine, sample(**asked)), answer(engine, sample(prompt_logprobs_last_n=2, **asked))
    assert full.prompt_logprobs is not None
    assert full.topk_prompt_logprobs is not None
    assert last.prompt_logprobs == [None] * 3 + full.prompt_logprobs[3:]
    assert last.topk_prompt_logprobs == [None] * 3 + full.topk_prompt_logprobs[3:]
    assert None not in full.prompt_logprobs[1:]


@pytest.mark.parametrize("temperature", [0, 1])
def test_alternatives_repeat_by_seed(engine: SamplingEngine, temperature: float) -> None:
    drawn = answer(engine, sample(prompt_alt_tokens_k=4, params={"temperature": temperature})).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == (4, 4)
    assert drawn == answer(engine, sample(prompt_alt_tokens_k=4, num_samples=3, params={"temperature": temperature})).prompt_alt_tokens
    other = answer(engine, sample(prompt_alt_tokens_k=4, params={"temperature": temperature, "seed": 2})).prompt_alt_tokens
    assert (drawn == other) is (temperature == 0)
    rows = [set(int64_values(drawn.tokens.data)[row * 4 : row * 4 + 4]) for row in range(4)]
    assert all(len(row) == 1 for row in rows) is (temperature == 0)


def test_a_bias_of_100_forces_a_token_and_penalties_drive_it_away(engine: SamplingEngine) -> None:
    free = answer(engine, sample(params={"temperature": 0}))
    token = free.sequences[0].tokens[0]
    forced = answer(engine, sample(params={"temperature": 0, "logit_bias": {token: 100.0}})).sequences[0]
    assert forced.tokens[0] == token
    banned = answer(engine, sample(params={"temperature": 0, "logit_bias": {token: -100.0}})).sequences[0]
    assert token not in banned.tokens


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_there(engine: SamplingEngine) -> None:
    plain = sample(*LONG)
    assert answer(engine, plain, "hits").prompt_cache_hit_tokens == 0
    assert answer(engine, plain, "hits").prompt_cache_hit_tokens == 2 * PREFILL_CHUNK
    assert answer(engine, sample(*LONG, num_samples=3), "hits").prompt_cache_hit_tokens == 2 * PREFILL_CHUNK
    assert answer(engine, sample(*LONG[:-1], 5, 6), "hits").prompt_cache_hit_tokens == 2 * PREFILL_CHUNK
    assert answer(engine, sample(*LONG[:400]), "hits").prompt_cache_hit_tokens == PREFILL_CHUNK
    assert answer(engine, sample(*LONG[: 2 * PREFILL_CHUNK]), "hits").prompt_cache_hit_tokens == PREFILL_CHUNK
    assert answer(engine, sample(1, *LONG[1:]), "hits").prompt_cache_hit_tokens == 0
    assert answer(engine, plain, "another tenant").prompt_cache_hit_tokens == 0


def test_what_is_scored_is_computed(engine: SamplingEngine) -> None:
    answer(engine, sample(*LONG), "scored")
    hits = [
        answer(engine, sample(*LONG, **asked), "scored").prompt_cache_hit_tokens
        for asked in (
            {"prompt_logprobs": True},
            {"prompt_logprobs": True, "prompt_logprobs_last_n": PREFILL_CHUNK},
            {"prompt_logprobs": True, "prompt_logprobs_last_n": PREFILL_CHUNK + 1},
            {"prompt_alt_tokens_k": 1},
        )
    ]
    assert hits == [0, PREFILL_CHUNK, 0, 0]


@pytest.mark.parametrize(
    "asked",
    [{"prompt_logprobs_last_n": 1}, {"target_prompt_logprobs": int64s(1, 2, shape=(2, 1))}, {"params": {"logit_bias": {10**6: 1.0}}}],
)
def test_what_cannot_be_answered_is_refused(engine: SamplingEngine, asked: dict[str, object]) -> None:
    with pytest.raises(ValidationFailed):
        engine.add("t", sample(**asked))  # type: ignore[arg-type]
    assert engine.num_live == 0
