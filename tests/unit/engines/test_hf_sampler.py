"""The sampler against transformers and PEFT: same tokens, same log-probs, in any company."""

import json
import math
import warnings
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tinsmith.engines import hf_sampler
from tinsmith.engines.base import Contents, Files, Job
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.engines.sampler_lora import TARGETS
from tinsmith.protocol.errors import InputTokensExceeded, InternalError, NotFound, StateContention, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams, StopReason
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values
from tinsmith.protocol.training import AdamParams, Compute, ComputeOutput, OptimStep
from tinsmith.protocol.training import LoraConfig as TrainedLora
from tinsmith.text.tokenizer import Tokenizer

ALL = list(TARGETS)


@pytest.fixture(scope="module")
def base(tiny_model: BaseModelInfo) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_adapter(tiny_model: BaseModelInfo, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(seed: int, rank: int, targets: list[str], size: float = 0.3) -> Path:
        model = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of tied weights: the adapter of the head is meant for the output side only
            adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, target_modules=targets, lora_dropout=0.0))
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.data = size * torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1])
            directory = tmp_path_factory.mktemp("adapter")
            adapted.save_pretrained(directory, save_embedding_layers=False)
        return directory

    return make


@pytest.fixture(scope="module")
def adapters(make_adapter: Callable[..., Path]) -> dict[str, Path]:
    return {"all": make_adapter(1, 8, ALL), "attn": make_adapter(2, 4, ["q_proj", "v_proj"], 3.0)}


@pytest.fixture
def sampler(tiny_model: BaseModelInfo, adapters: dict[str, Path]) -> HfSampler:
    sampler = HfSampler(tiny_model, "fp32", max_rows=6, max_adapters=2)
    for key, directory in adapters.items():
        sampler.load_adapter(key, files_of(directory))
    return sampler


def files_of(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}


def reference(base: PreTrainedModel, adapter: Path | None, tiny_model: BaseModelInfo) -> PreTrainedModel:
    if adapter is None:
        return base
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, adapter).eval()


def request(prompt: list[int], num_samples: int = 1, adapter: str | None = None, **settings: object) -> Sample:
    extra = {key: settings.pop(key) for key in ("prompt_logprobs", "topk_prompt_logprobs") if key in settings}
    return Sample(
        prompt=ModelInput((TextChunk(array("i", prompt).tobytes()),)),
        params=SamplingParams.model_validate({"seed": 0, "max_tokens": 8, "stop": ()} | settings),
        num_samples=num_samples,
        adapter=adapter,
        **extra,
    )


def prompt(length: int, start: int = 100) -> list[int]:
    return [(start + 37 * index) % 40_000 for index in range(length)]


def finish(sampler: HfSampler) -> dict[str, SampleOutput]:
    outputs: dict[str, SampleOutput] = {}
    while sampler.num_live:
        for ticket, answer in sampler.step():
            assert isinstance(answer, SampleOutput)
            outputs[ticket] = answer
    return outputs


def alone(sampler: HfSampler, sample: Sample) -> SampleOutput:
    sampler.add("alone", sample)
    return finish(sampler)["alone"]


def teacher_forced(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Raw log-probs [T, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


def test_greedy_equals_generate_in_a_ragged_batch_that_requests_join(
    sampler: HfSampler, base: PreTrainedModel, adapters: dict[str, Path], tiny_model: BaseModelInfo
) -> None:
    cases = [(prompt(5), None), (prompt(40, 7), "all"), (prompt(17, 900), "attn"), (prompt(1, 4), "all"), (prompt(300, 11), None)]
    answers: dict[str, SampleOutput | TinsmithError] = {}
    for index, (tokens, adapter) in enumerate(cases):
        sampler.add(str(index), request(tokens, adapter=adapter, temperature=0, max_tokens=20))
        answers.update(sampler.step())  # the next one joins midway
    answers.update(finish(sampler))
    for index, (tokens, adapter) in enumerate(cases):
        model = reference(base, adapters[adapter] if adapter else None, tiny_model)
        with torch.no_grad():
            expected = model.generate(
                input_ids=torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens)),
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=None,
                pad_token_id=0,
            )
        answer = answers[str(index)]
        assert isinstance(answer, SampleOutput)
        assert answer.sequences[0].tokens == expected[0, len(tokens) :].tolist()
        assert answer.sequences[0].stop_reason is StopReason.LENGTH


@pytest.mark.proves("R12")
@pytest.mark.parametrize("adapter", [None, "all", "attn"])
def test_logprobs_equal_a_teacher_forced_pass(
    sampler: HfSampler, base: PreTrainedModel, adapters: dict[str, Path], tiny_model: BaseModelInfo, adapter: str | None
) -> None:
    tokens = prompt(23)
    sampler.add("crowd", request(prompt(60), num_samples=3, adapter="all", max_tokens=40))
    sampler.add("it", request(tokens, num_samples=2, adapter=adapter, max_tokens=30, prompt_logprobs=True, topk_prompt_logprobs=3))
    output = finish(sampler)["it"]
    model = reference(base, adapters[adapter] if adapter else None, tiny_model)
    for sequence in output.sequences:
        logprobs = teacher_forced(model, tokens + sequence.tokens)
        expected = [float(logprobs[len(tokens) + index - 1, token]) for index, token in enumerate(sequence.tokens)]
        assert sequence.logprobs == pytest.approx(expected, abs=1e-4)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1:] == pytest.approx([float(logprobs[index, token]) for index, token in enumerate(tokens[1:])], abs=1e-4)
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs[0] is None
    assert len(output.topk_prompt_logprobs) == len(tokens)
    for index, row in enumerate(output.topk_prompt_logprobs[1:]):
        best = torch.topk(logprobs[index], 3)
        assert row is not None
        assert [token for token, _ in row] == best.indices.tolist()
        assert [value for _, value in row] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_targets_best_and_alternatives_equal_a_teacher_forced_pass(
    sampler: HfSampler, base: PreTrainedModel, adapters: dict[str, Path], tiny_model: BaseModelInfo
) -> None:
    """Over a prompt of several chunks; alternatives and samples at another temperature than the scores."""
    tokens = prompt(300)
    ids = [[tokens[row + 1], 17 if row % 2 else -1] for row in range(299)]
    targets = Tensor(DType.INT64, (299, 2), array("q", [token for row in ids for token in row]).tobytes())
    asked = replace(
        request(tokens, adapter="all", temperature=0.5, max_tokens=4),
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
        topk_sample_logprobs=2,
    )
    output = alone(sampler, asked)
    model = reference(base, adapters["all"], tiny_model)
    sequence = output.sequences[0]
    raw = teacher_forced(model, tokens + sequence.tokens)
    tempered = torch.log_softmax(raw / 0.5, -1)
    assert output.target_prompt_logprobs is not None
    expected = [0.0 if token == -1 else float(raw[row, token]) for row, pair in enumerate(ids) for token in pair]
    assert list(float32_values(output.target_prompt_logprobs.data)) == pytest.approx(expected, abs=1e-4)
    assert output.prompt_alt_tokens is not None
    drawn = torch.tensor(list(int64_values(output.prompt_alt_tokens.tokens.data))).view(299, 3)
    told = torch.tensor(list(float32_values(output.prompt_alt_tokens.logprobs.data))).view(299, 3)
    torch.testing.assert_close(told, tempered[:299].gather(1, drawn), atol=2e-4, rtol=0)
    assert sequence.topk_logprobs is not None
    for index, best in enumerate(sequence.topk_logprobs):
        top = torch.topk(tempered[299 + index], 2)
        assert best is not None
        assert [token for token, _ in best] == top.indices.tolist()
        assert [value for _, value in best] == pytest.approx(top.values.tolist(), abs=2e-4)


def test_penalties_count_each_sequence_by_itself(sampler: HfSampler, base: PreTrainedModel) -> None:
    """Greedy, against a loop that recomputes everything."""
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
    outputs = alone(sampler, request(prompt(9), num_samples=2, temperature=0, max_tokens=12, **penalties)).sequences
    tokens: list[int] = []
    for _ in range(12):
        logits = teacher_forced(base, prompt(9) + tokens)[-1]
        for token in set(tokens):
            logits[token] -= 0.7 * tokens.count(token) + 0.4
        tokens.append(int(logits.argmax()))
    assert [sequence.tokens for sequence in outputs] == [tokens, tokens]
    free = alone(sampler, request(prompt(9), temperature=0, max_tokens=12)).sequences[0]
    assert len(set(free.tokens)) < len(set(tokens))


def test_an_adapter_changes_the_result_and_its_absence_costs_nothing(sampler: HfSampler) -> None:
    sample = request(prompt(9), temperature=0, max_tokens=2, prompt_logprobs=True)
    plain = alone(sampler, sample)
    adapted = alone(sampler, request(prompt(9), adapter="all", temperature=0, max_tokens=2, prompt_logprobs=True))
    assert plain.prompt_logprobs != adapted.prompt_logprobs
    assert alone(sampler, sample) == plain


@pytest.mark.parametrize("length", [hf_sampler.PREFILL_CHUNK - 1, hf_sampler.PREFILL_CHUNK, hf_sampler.PREFILL_CHUNK + 1, 700])
def test_long_prompts_are_prefilled_in_chunks(sampler: HfSampler, base: PreTrainedModel, length: int) -> None:
    tokens = prompt(length)
    sampler.add("long", request(tokens, prompt_logprobs=True, max_tokens=1))
    num_steps = 0
    outputs: dict[str, SampleOutput | TinsmithError] = {}
    while sampler.num_live:
        outputs.update(sampler.step())
        num_steps += 1
    assert num_steps == math.ceil(length / hf_sampler.PREFILL_CHUNK)
    output = outputs["long"]
    assert isinstance(output, SampleOutput)
    assert output.prompt_logprobs is not None
    logprobs = teacher_forced(base, tokens)
    expected = [float(logprobs[index, token]) for index, token in enumerate(tokens[1:])]
    assert output.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_sequences_that_outgrow_the_first_cache_stay_right(sampler: HfSampler, base: PreTrainedModel) -> None:
    sampler.add("long", request(prompt(250), temperature=0, max_tokens=60))
    sampler.add("short", request(prompt(3), temperature=0, max_tokens=60))
    outputs = finish(sampler)
    for ticket, tokens in (("long", prompt(250)), ("short", prompt(3))):
        sequence = outputs[ticket].sequences[0]
        logprobs = teacher_forced(base, tokens + sequence.tokens)
        assert sequence.tokens == logprobs[len(tokens) - 1 : -1].argmax(-1).tolist()
    assert sampler.step() == []


def test_seeded_samples_are_the_same_alone_and_in_a_crowd(sampler: HfSampler) -> None:
    sample = request(prompt(30), num_samples=2, adapter="attn", seed=42, max_tokens=24, temperature=0.9, top_p=0.95)
    by_itself = alone(sampler, sample)
    for index in range(5):
        sampler.add(
            f"crowd{index}",
            request(prompt(10 + 9 * index, index), adapter=[None, "all", "attn"][index % 3], seed=index, max_tokens=5 + 7 * index),
        )
    sampler.step()
    sampler.add("it", sample)
    in_crowd = finish(sampler)["it"]
    for ours, theirs in zip(by_itself.sequences, in_crowd.sequences, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_a_repeat_is_exact_and_another_seed_is_another_sample(sampler: HfSampler) -> None:
    sample = request(prompt(12), num_samples=3, seed=5, max_tokens=12)
    first = alone(sampler, sample)
    assert alone(sampler, sample) == first
    assert len({tuple(sequence.tokens) for sequence in first.sequences}) == 3
    other = alone(sampler, request(prompt(12), num_samples=3, seed=6, max_tokens=12))
    assert other.sequences[0].tokens != first.sequences[0].tokens


def test_more_samples_than_rows_keep_their_order_and_share_the_prompt(sampler: HfSampler) -> None:
    many = alone(sampler, request(prompt(12), num_samples=15, seed=5, max_tokens=6))
    few = alone(sampler, request(prompt(12), num_samples=3, seed=5, max_tokens=6))
    assert [sequence.tokens for sequence in many.sequences[:3]] == [sequence.tokens for sequence in few.sequences]
    assert len(many.sequences) == 15


@pytest.mark.proves("R68")
def test_a_request_of_many_samples_does_not_keep_others_out(sampler: HfSampler) -> None:
    sampler.add("many", request(prompt(4), num_samples=200, max_tokens=10))
    for _ in range(3):
        sampler.step()
    sampler.add("one", request(prompt(4), max_tokens=10))
    steps = 0
    while not any(ticket == "one" for ticket, _ in sampler.step()):
        steps += 1
    assert steps < 2 * 10 + 10
    sampler.cancel("many")
    assert sampler.num_live == 0


def test_prompt_of_one_token_request_needs_no_row(sampler: HfSampler) -> None:
    sampler.add("score", request(prompt(6), max_tokens=1, prompt_logprobs=True))
    [(ticket, output)] = sampler.step()
    assert ticket == "score"
    assert isinstance(output, SampleOutput)
    assert len(output.sequences[0].tokens) == 1


def test_stop_rules(sampler: HfSampler, tiny_model: BaseModelInfo) -> None:
    free = alone(sampler, request(prompt(8), seed=3, max_tokens=12)).sequences[0]
    tokenizer = Tokenizer.from_dir(tiny_model.path)
    by_id = alone(sampler, request(prompt(8), seed=3, max_tokens=12, stop=(free.tokens[4],))).sequences[0]
    assert by_id.stop_reason is StopReason.STOP
    assert by_id.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert by_id.logprobs == free.logprobs[: len(by_id.tokens)]
    text = tokenizer.decode(free.tokens[2:5])
    by_text = alone(sampler, request(prompt(8), seed=3, max_tokens=12, stop=(text,))).sequences[0]
    assert by_text.stop_reason is StopReason.STOP
    assert by_text.tokens == free.tokens[:5]
    assert len(by_text.logprobs) == 5


def test_the_end_of_sequence_stops_only_where_it_may(tiny_model: BaseModelInfo, sampler: HfSampler) -> None:
    free = alone(sampler, request(prompt(8), temperature=0, max_tokens=4)).sequences[0]
    ending = HfSampler(tiny_model.model_copy(update={"eos_token_ids": (free.tokens[0],)}), "fp32", 2, 1)
    assert alone(ending, request(prompt(8), temperature=0, max_tokens=4, stop=None)).sequences[0].stop_reason is StopReason.STOP
    assert alone(ending, request(prompt(8), temperature=0, max_tokens=4, stop=(5,))).sequences[0].tokens == free.tokens[:1]
    assert alone(ending, request(prompt(8), temperature=0, max_tokens=4, stop=())).sequences[0].tokens == free.tokens


def test_max_tokens_none_goes_up_to_the_context(tiny_model: BaseModelInfo) -> None:
    short = HfSampler(tiny_model.model_copy(update={"max_context": 20}), "fp32", 2, 1)
    assert len(alone(short, request(prompt(12), max_tokens=None)).sequences[0].tokens) == 8
    assert len(alone(short, request(prompt(12), max_tokens=100)).sequences[0].tokens) == 8
    assert len(alone(short, request(prompt(20), max_tokens=None)).sequences[0].tokens) == 1
    with pytest.raises(InputTokensExceeded, match=r"21 tokens, the context of .* is 20"):
        short.add("x", request(prompt(21)))
    assert short.num_live == 0


def test_refusals_leave_nothing(sampler: HfSampler) -> None:
    sampler.add("taken", request(prompt(3)))
    for sample, error, words in [
        (request([]), ValidationFailed, "empty"),
        (request([1, 49152]), ValidationFailed, r"\[0, 49152\)"),
        (request([-1]), ValidationFailed, "token ids"),
        (request(prompt(3), stop=("",)), ValidationFailed, "stop"),
        (request(prompt(3), adapter="none such"), NotFound, "none such"),
    ]:
        with pytest.raises(error, match=words):
            sampler.add("x", sample)
    with pytest.raises(ValidationFailed, match="already"):
        sampler.add("taken", request(prompt(3)))
    assert sampler.num_live == 1
    assert finish(sampler).keys() == {"taken"}


def test_cancel_frees_rows_and_leaves_the_others_alone(sampler: HfSampler) -> None:
    expected = alone(sampler, request(prompt(9), adapter="all", seed=1, max_tokens=16))
    sampler.add("first", request(prompt(5), num_samples=3, adapter="attn", max_tokens=50))
    sampler.add("kept", request(prompt(9), adapter="all", seed=1, max_tokens=16))
    sampler.add("waiting", request(prompt(5), num_samples=9, max_tokens=50))
    sampler.step()
    sampler.step()
    for ticket in ("first", "waiting", "unknown"):
        sampler.cancel(ticket)
    assert sampler.num_live == 1
    kept = finish(sampler)["kept"].sequences[0]
    assert kept.tokens == expected.sequences[0].tokens
    assert kept.logprobs == pytest.approx(expected.sequences[0].logprobs, abs=1e-5)
    assert len(alone(sampler, request(prompt(5), num_samples=6)).sequences) == 6, "all rows are free again"


def test_a_frozen_adapter_stays_as_it_was(sampler: HfSampler, make_adapter: Callable[..., Path], adapters: dict[str, Path]) -> None:
    sample = request(prompt(15), adapter="all", temperature=0, max_tokens=10)
    before = alone(sampler, sample)
    sampler.load_adapter("all", files_of(make_adapter(99, 8, ALL)))
    assert alone(sampler, sample) == before


def test_the_least_recently_used_idle_adapter_makes_room(sampler: HfSampler, make_adapter: Callable[..., Path]) -> None:
    third = files_of(make_adapter(3, 2, ["o_proj"]))
    sampler.add("busy", request(prompt(3), adapter="all", max_tokens=30))
    sampler.add("busy too", request(prompt(3), adapter="attn", max_tokens=30))
    with pytest.raises(StateContention, match="max_adapters"):
        sampler.load_adapter("third", third)
    sampler.cancel("busy too")
    sampler.load_adapter("third", third)
    assert [sampler.has_adapter(key) for key in ("all", "attn", "third")] == [True, False, True]
    finish(sampler)
    assert alone(sampler, request(prompt(3), adapter="third")).sequences


def edited(
    files: Files, config: dict[str, object] | None = None, tensors: Callable[[dict[str, torch.Tensor]], None] | None = None
) -> Files:
    settings = json.loads(files["adapter_config.json"]) | (config or {})
    weights = load(files["adapter_model.safetensors"])
    if tensors is not None:
        tensors(weights)
    return {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": save(weights)}


def swap(key: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({f"base_model.model.{key}.weight": value})


def drop(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        del weights[f"base_model.model.{key}.weight"]

    return edit


def grow(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor *= 1e30


@pytest.mark.proves("R11")
def test_an_adapter_that_does_not_fit_is_refused_and_leaves_no_trace(sampler: HfSampler, adapters: dict[str, Path]) -> None:
    good = files_of(adapters["all"])
    layer = "model.layers.0.self_attn.q_proj.lora_A"
    wrong: list[tuple[Files, str]] = [
        ({"adapter_config.json": good["adapter_config.json"]}, "both needed"),
        (dict(good) | {"adapter_config.json": b"{"}, "no JSON"),
        (dict(good) | {"adapter_model.safetensors": good["adapter_model.safetensors"][:-100]}, "cannot be read"),
        (edited(good, {"r": 0}), "r: "),
        (edited(good, {"peft_type": "IA3"}), "not LORA"),
        (edited(good, {"use_rslora": True}), "rsLoRA"),
        (edited(good, {"rank_pattern": {"q_proj": 3}}), "rank_pattern"),
        (edited(good, {"target_modules": ["q_proj", "embed_tokens"]}), "embed_tokens"),
        (edited(good, {"target_modules": ["cross.q_proj"]}), "cross.q_proj"),
        (edited(good, {"target_modules": ["q_proj"]}), "belongs to no layer"),
        (edited(good, {"r": 4}), "needs floats"),
        (edited(good, None, swap(layer, torch.zeros(8, 65))), "needs floats"),
        (edited(good, None, swap(layer, torch.zeros(8, 64, dtype=torch.int64))), "needs floats"),
        (edited(good, None, swap(layer, torch.full((8, 64), math.nan))), "not finite"),
        (edited(good, None, drop(layer)), "missing"),
    ]
    sampler.load_adapter("all", good)
    for files, words in wrong:
        with pytest.raises(ValidationFailed, match=words):
            sampler.load_adapter("new", files)
        assert not sampler.has_adapter("new")
    assert sampler.has_adapter("attn"), "nothing was evicted for a refused adapter"


def test_a_diverged_adapter_fails_its_own_requests_only(sampler: HfSampler, make_adapter: Callable[..., Path]) -> None:
    expected = alone(sampler, request(prompt(9), seed=1, max_tokens=12))
    huge = edited(files_of(make_adapter(5, 2, ["down_proj", "v_proj"])), None, grow)
    sampler.load_adapter("huge", huge)
    sampler.add("good", request(prompt(9), seed=1, max_tokens=12))
    sampler.add("bad", request(prompt(9), num_samples=2, adapter="huge", max_tokens=12))
    sampler.add("scored", request(prompt(300), adapter="huge", prompt_logprobs=True))
    answers: dict[str, SampleOutput | TinsmithError] = {}
    while sampler.num_live:
        answers.update(sampler.step())
    assert isinstance(answers["bad"], ValidationFailed)
    assert isinstance(answers["scored"], ValidationFailed)
    assert answers["good"] == expected
    assert alone(sampler, request(prompt(9), seed=1, max_tokens=12)) == expected


def test_logits_that_break_while_decoding(sampler: HfSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler.add("base", request(prompt(4), num_samples=2))
    sampler.add("adapted", request(prompt(4), num_samples=2, adapter="all"))
    forward = sampler._forward

    def broken(*args: object) -> torch.Tensor:
        return forward(*args) * (math.nan if args[-1] == 1 and args[2] is not None else 1.0)

    sampler.step()
    monkeypatch.setattr(sampler, "_forward", broken)
    answers = dict(sampler.step())
    assert isinstance(answers["base"], InternalError)
    assert isinstance(answers["adapted"], ValidationFailed)
    monkeypatch.undo()
    assert sampler.num_live == 0
    assert alone(sampler, request(prompt(4))).sequences


def test_the_raw_switch(tiny_model: BaseModelInfo, base: PreTrainedModel) -> None:
    raw = HfSampler(tiny_model, "fp32", 2, 1, logprobs="raw")
    sequence = alone(raw, request(prompt(5), temperature=0.5, top_k=20)).sequences[0]
    logprobs = teacher_forced(base, prompt(5) + sequence.tokens)
    assert sequence.logprobs == pytest.approx([float(logprobs[4 + index, token]) for index, token in enumerate(sequence.tokens)], abs=1e-4)


def test_bf16_stays_close_to_fp32(tiny_model: BaseModelInfo, base: PreTrainedModel, adapters: dict[str, Path]) -> None:
    half = HfSampler(tiny_model, "bf16", 4, 1)
    half.load_adapter("all", files_of(adapters["all"]))
    output = alone(half, request(prompt(60), adapter="all", prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    logprobs = teacher_forced(reference(base, adapters["all"], tiny_model), prompt(60))
    gaps = [
        abs(ours - float(logprobs[index, token]))
        for index, (ours, token) in enumerate(zip(output.prompt_logprobs[1:], prompt(60)[1:], strict=True))
        if ours is not None
    ]
    assert sum(gaps) / len(gaps) < 2e-2


def test_a_model_without_tokenizer_serves_all_but_stop_strings(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(tiny_model.path) / name)
    bare = HfSampler(tiny_model.model_copy(update={"path": str(tmp_path)}), "fp32", 2, 1)
    assert bare.max_rows == 2
    bare.ping()
    assert alone(bare, request(prompt(3))).sequences
    with pytest.raises(ValidationFailed, match="need a tokenizer"):
        bare.add("x", request(prompt(3), stop=("a",)))


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"sliding_window": 128}, False),
        ({"sliding_window": 128, "use_sliding_window": False}, True),
        ({"attn_logit_softcapping": 50.0}, False),
    ],
)
def test_models_with_another_attention_are_refused(settings: dict[str, object], fits: bool) -> None:
    config = LlamaConfig(num_hidden_layers=2)
    for name, value in settings.items():
        setattr(config, name, value)
    if fits:
        hf_sampler._check_attention(config)
    else:
        with pytest.raises(ValueError, match="plain causal attention"):
            hf_sampler._check_attention(config)


@pytest.mark.parametrize("flags", [{}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}])
def test_a_trained_adapter_scores_as_its_trainer_does(tiny_model: BaseModelInfo, flags: dict[str, bool]) -> None:
    trainer = PeftEngine(tiny_model, "fp32", max_adapters=1, micro_batch_tokens=1024)
    trainer.create_adapter("m", TrainedLora(rank=8, seed=3, **flags))
    tokens = prompt(40)
    targets = Tensor(DType.INT64, (39,), array("q", tokens[1:]).tobytes())
    data = (Datum(ModelInput((TextChunk(array("i", tokens[:-1]).tobytes()),)), {"target_tokens": targets}),)
    step = [
        Job("m", 1, Compute(data, "cross_entropy", {}, backward=True)),
        Job("m", 2, OptimStep(optimizer=AdamParams(learning_rate=1e-2))),
    ]
    for _ in range(3):
        trainer.run(step)
    [scored] = trainer.run([Job("m", 3, Compute(data, "cross_entropy", {}, backward=False))])
    assert isinstance(scored, ComputeOutput)
    sampler = HfSampler(tiny_model, "fp32", 2, 1)
    sampler.load_adapter("m", trainer.capture("m", Contents.SAMPLER))
    output = alone(sampler, request(tokens, adapter="m", prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1:] == pytest.approx(list(float32_values(scored.logprobs[0].data)), abs=1e-4)
    plain = alone(sampler, request(tokens, prompt_logprobs=True))
    assert sum(output.prompt_logprobs[1:]) > sum(plain.prompt_logprobs[1:]) + 1
