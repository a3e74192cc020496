"""Chunks of prompts that are used again: the answers have the same bits as without them, and nothing else shares them."""

from array import array
from dataclasses import replace
from typing import Literal

import pytest

from tinsmith.engines.base import Contents, Files, Job
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.engines.prefixes import PREFILL_CHUNK
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import AdamParams, Compute, LoraConfig, OptimStep

TOKENS = [(100 + 37 * index) % 40_000 for index in range(3 * PREFILL_CHUNK)]


def model_input(tokens: list[int]) -> ModelInput:
    return ModelInput((TextChunk(array("i", tokens).tobytes()),))


@pytest.fixture(scope="module")
def adapters(peft: PeftEngine) -> list[Files]:
    """Two that differ in what they have learnt."""
    return [trained(peft, seed) for seed in (1, 2)]


def trained(peft: PeftEngine, seed: int) -> Files:
    model_id = f"m{seed}"
    peft.create_adapter(model_id, LoraConfig(rank=8, seed=seed))
    targets = Tensor(DType.INT64, (16,), array("q", TOKENS[seed : seed + 16]).tobytes())
    data = (Datum(model_input(TOKENS[:16]), {"target_tokens": targets}),)
    peft.run([Job(model_id, 1, Compute(data, "cross_entropy", {}, backward=True))])
    peft.run([Job(model_id, 2, OptimStep(optimizer=AdamParams(learning_rate=0.05)))])
    return peft.capture(model_id, Contents.SAMPLER)


def sample(tokens: list[int], adapter: str | None = None, num_samples: int = 1, **asked: object) -> Sample:
    params = SamplingParams(seed=3, max_tokens=6, stop=())
    return replace(Sample(model_input(tokens), params, num_samples, adapter), **asked)  # type: ignore[arg-type]


def answer(sampler: HfSampler, request: Sample, scope: str = "") -> SampleOutput:
    sampler.add("t", request, scope)
    while sampler.num_live:
        for _, output in sampler.step():
            assert isinstance(output, SampleOutput)
            return output
    raise AssertionError("it ended without an answer")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_answers_have_the_same_bits_with_and_without_the_cache(
    tiny_model: BaseModelInfo, adapters: list[Files], dtype: Literal["fp32", "bf16"]
) -> None:
    cached = HfSampler(tiny_model, dtype, max_rows=4, max_adapters=2)
    uncached = HfSampler(tiny_model, dtype, max_rows=4, max_adapters=2, prompt_cache_bytes=0)
    for sampler in (cached, uncached):
        sampler.load_adapter("a", adapters[0])
    requests = [
        sample(TOKENS[:length], adapter, num_samples)
        for adapter in (None, "a")
        for length, num_samples in ((700, 1), (257, 2), (512, 1), (513, 2), (768, 1), (700, 1))
    ]
    requests += [
        sample(TOKENS[:700], "a", prompt_logprobs=True, prompt_logprobs_last_n=150, topk_prompt_logprobs=2),
        sample([*TOKENS[:512], 5, 6, 7], "a", topk_sample_logprobs=3),
        sample(TOKENS[:700], "a", prompt_logprobs=True),
    ]
    hits = []
    for request in requests:
        ours, expected = answer(cached, request), answer(uncached, request)
        hits.append(ours.prompt_cache_hit_tokens)
        assert expected.prompt_cache_hit_tokens == 0
        assert replace(ours, prompt_cache_hit_tokens=0) == expected
    assert hits == [0, 256, 256, 512, 512, 512] * 2 + [512, 512, 0]


def test_another_adapter_and_another_scope_share_nothing(tiny_model: BaseModelInfo, adapters: list[Files]) -> None:
    sampler = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=2)
    for key, files in zip("ab", adapters, strict=True):
        sampler.load_adapter(key, files)
    asked = [(None, ""), ("a", ""), ("b", ""), (None, "tenant"), ("a", "tenant")]
    first = [answer(sampler, sample(TOKENS[:300], adapter), scope) for adapter, scope in asked]
    assert [output.prompt_cache_hit_tokens for output in first] == [0] * 5
    assert first[0].sequences == first[3].sequences
    assert first[1].sequences == first[4].sequences
    assert len({tuple(output.sequences[0].logprobs) for output in first}) == 3
    again = [answer(sampler, sample(TOKENS[:300], adapter), scope) for adapter, scope in asked]
    assert [output.prompt_cache_hit_tokens for output in again] == [PREFILL_CHUNK] * 5
    assert [output.sequences for output in again] == [output.sequences for output in first]


def test_an_adapter_that_comes_back_finds_its_chunks_and_another_of_its_name_does_not(
    tiny_model: BaseModelInfo, adapters: list[Files]
) -> None:
    sampler = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=1)
    hits = []
    for key, files in (("a", adapters[0]), ("b", adapters[1]), ("a", adapters[0]), ("b", adapters[0]), ("a", adapters[1])):
        sampler.load_adapter(key, files)
        hits.append(answer(sampler, sample(TOKENS[:300], key)).prompt_cache_hit_tokens)
        fresh = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=1)
        fresh.load_adapter(key, files)
        assert answer(sampler, sample(TOKENS[:300], key)).sequences == answer(fresh, sample(TOKENS[:300], key)).sequences
    assert hits == [0, 0, PREFILL_CHUNK, PREFILL_CHUNK, PREFILL_CHUNK]


def test_the_cache_keeps_within_its_bytes(tiny_model: BaseModelInfo) -> None:
    probe = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=1)
    answer(probe, sample(TOKENS[:257]))
    num_bytes = probe._prefixes.num_bytes
    assert num_bytes > 0
    sampler = HfSampler(tiny_model, "fp32", max_rows=4, max_adapters=1, prompt_cache_bytes=2 * num_bytes)
    for first in range(5):
        answer(sampler, sample([first, *TOKENS[1:257]]))
        assert sampler._prefixes.num_bytes <= 2 * num_bytes
    hits = [answer(sampler, sample([first, *TOKENS[1:257]])).prompt_cache_hit_tokens for first in (4, 3, 0)]
    assert hits == [PREFILL_CHUNK, PREFILL_CHUNK, 0]
