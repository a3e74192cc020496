"""bf16 on a trained model, not a random one: thirty layers amplify any rounding that is not PEFT's to the full noise of the format.

Measured on SmolLM2: rounding elsewhere than PEFT moves log-probs by 0.05 in the mean, as far as bf16 itself is from float32.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model_cache import smollm2
from tests.unit.engines.datums import array, compute, datum, ints, model_input, tensor
from tinsmith.engines.base import Contents, Job
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import AdamParams, ComputeOutput, LoraConfig, OptimOutput, OptimStep
from tinsmith.text.tokenizer import Tokenizer

Logprobs = npt.NDArray[np.float32]

LESSON = (
    "A tinsmith works thin sheets of metal into things of daily use: lanterns, kettles, gutters and moulds. The sheet is marked from a "
    "paper pattern, cut with hand shears, bent over an iron stake and closed with solder, which has to flow before the tin burns."
)
QUESTIONS = (
    "The old lighthouse keeper climbed the stairs every evening, trimmed the wick, and wrote one line about the weather in his book.",
    "Water boils at a lower temperature on a mountain because the air above it weighs less.",
    "To sort a list, compare neighbours and swap them until a whole pass changes nothing; this is slow, but a child can follow it.",
)


@pytest.fixture(scope="module")
def base() -> BaseModelInfo:
    return smollm2()


@pytest.fixture(scope="module")
def trainer(base: BaseModelInfo) -> PeftEngine:
    return PeftEngine(base, "bf16", max_adapters=1, micro_batch_tokens=1024)


@pytest.fixture(scope="module")
def texts(base: BaseModelInfo) -> list[list[int]]:
    tokenizer = Tokenizer.from_dir(base.path)
    return [tokenizer.encode(text) for text in QUESTIONS]


def next_tokens(tokens: list[int]) -> Datum:
    """Predict each token but the first from those before it."""
    return datum(tokens[:-1], target_tokens=ints(tokens[1:]), weights=tensor([1.0] * (len(tokens) - 1)))


def train(trainer: PeftEngine, lora: LoraConfig, tokens: list[int]) -> None:
    trainer.create_adapter("m", lora)
    for _ in range(2):
        answers = trainer.run(
            [Job("m", 1, compute([next_tokens(tokens)])), Job("m", 2, OptimStep(optimizer=AdamParams(learning_rate=2e-3)))]
        )
        assert isinstance(answers[1], OptimOutput)


def of_trainer(trainer: PeftEngine, texts: list[list[int]]) -> Logprobs:
    (output,) = trainer.run([Job("m", 3, compute([next_tokens(tokens) for tokens in texts], backward=False))])
    assert isinstance(output, ComputeOutput)
    return np.concatenate([array(logprobs) for logprobs in output.logprobs])


def of_sampler(base: BaseModelInfo, files: Mapping[str, bytes], texts: list[list[int]]) -> Logprobs:
    sampler = HfSampler(base, "bf16", max_rows=4, max_adapters=1)
    sampler.load_adapter("m", files)
    for index, tokens in enumerate(texts):
        params = SamplingParams.model_validate({"seed": 0, "max_tokens": 1, "stop": ()})
        sampler.add(str(index), Sample(prompt=model_input(tokens), params=params, num_samples=1, adapter="m", prompt_logprobs=True))
    outputs: dict[str, SampleOutput] = {}
    while sampler.num_live:
        for ticket, answer in sampler.step():
            assert isinstance(answer, SampleOutput)
            outputs[ticket] = answer
    scored = [outputs[str(index)].prompt_logprobs for index in range(len(texts))]
    return np.concatenate([np.array(logprobs[1:], dtype=np.float32) for logprobs in scored if logprobs is not None])


def peft_model(base: BaseModelInfo, folder: Path) -> peft.PeftModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.bfloat16), folder)
    return model.eval()


def of_peft(model: peft.PeftModel, texts: list[list[int]]) -> Logprobs:
    scored: list[Logprobs] = []
    with torch.no_grad():
        for tokens in texts:
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].float()
            scored.append(torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy())
    return np.concatenate(scored)


def mean_gap(left: Logprobs, right: Logprobs) -> float:
    assert left.shape == right.shape
    return float(np.abs(left - right).mean())


@pytest.mark.proves("R12")
@pytest.mark.parametrize("flags", [{}, {"train_unembed": False}])
def test_trainer_and_sampler_round_as_peft_does(
    base: BaseModelInfo, trainer: PeftEngine, texts: list[list[int]], tmp_path: Path, flags: dict[str, bool]
) -> None:
    train(trainer, LoraConfig.model_validate({"rank": 16, "seed": 5} | flags), Tokenizer.from_dir(base.path).encode(LESSON))
    files = dict(trainer.capture("m", Contents.SAMPLER))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    model = peft_model(base, tmp_path)
    expected = of_peft(model, texts)
    trained, sampled = of_trainer(trainer, texts), of_sampler(base, files, texts)
    with model.disable_adapter():
        assert mean_gap(expected, of_peft(model, texts)) > 0.1  # the adapter says something
    assert mean_gap(trained, expected) < 2e-2
    assert mean_gap(sampled, expected) < 2e-2
    assert mean_gap(sampled, trained) < 2e-2
