"""The builders of engines that compute: what the configuration says reaches them."""

from array import array

import pytest

from tinsmith.config import SamplerConfig
from tinsmith.deployments.base_models import ServedModel
from tinsmith.deployments.torch_engines import sampling_engine
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo


def sampled(model: BaseModelInfo, config: SamplerConfig) -> SampledSequence:
    engine = sampling_engine(ServedModel(info=model, dtype="fp32"), config, threads=1)
    params = SamplingParams(seed=3, max_tokens=3, temperature=0.5, stop=())
    engine.add("t", Sample(ModelInput((TextChunk(array("i", [5, 6]).tobytes()),)), params, num_samples=1, adapter=None))
    while True:
        for _, answer in engine.step():
            assert isinstance(answer, SampleOutput)
            return answer.sequences[0]


def test_the_configured_kind_of_logprobs_reaches_the_sampler(tiny_model: BaseModelInfo) -> None:
    tempered = sampled(tiny_model, SamplerConfig(max_rows=2))
    raw = sampled(tiny_model, SamplerConfig(max_rows=2, logprobs="raw"))
    assert tempered.tokens == raw.tokens
    assert tempered.logprobs != pytest.approx(raw.logprobs)
