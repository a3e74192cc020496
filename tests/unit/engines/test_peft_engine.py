"""The training engine beside stock PEFT, what repeats bit for bit, and what a refused or failed command leaves behind."""

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import peft as peft_library
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.engines.datums import array, compute, datum, ints, rollout, sparse, supervised, tensor
from tests.unit.engines.peft import computed, refused, run, state
from tinsmith.engines import peft_engine, unembed
from tinsmith.engines.base import Answer, Contents, Job
from tinsmith.engines.lora import Layout
from tinsmith.engines.peft_engine import PeftEngine, UnsupportedBaseModel
from tinsmith.engines.snapshot import read
from tinsmith.protocol.errors import InputTokensExceeded, InternalError, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.training import AdamParams, ComputeOutput, LoraConfig, OptimOutput, OptimStep

ADAM = AdamParams(learning_rate=1e-3, eps=1e-6)
STEP = OptimStep(optimizer=ADAM)
LENGTHS = (5, 31, 12, 1, 20, 8, 26, 17)
LORA = LoraConfig(rank=8, seed=11)


@pytest.fixture
def engine(peft: PeftEngine) -> PeftEngine:
    return peft


@pytest.fixture(autouse=True)
def _empty_slots(engine: PeftEngine) -> None:
    for model_id in list(engine._adapters):
        engine.drop_adapter(model_id)


def examples(loss_fn: str, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [supervised(rng, length) if loss_fn == "cross_entropy" else rollout(rng, length) for length in lengths]


def trained(engine: PeftEngine, model_id: str, lora: LoraConfig = LORA) -> None:
    """An adapter whose B is no longer 0, with moments and an unspent gradient."""
    engine.create_adapter(model_id, lora)
    answers = run(engine, model_id, compute(examples("cross_entropy", seed=9)), STEP, compute(examples("cross_entropy", seed=10)))
    assert not any(isinstance(answer, TinsmithError) for answer in answers), answers


class Oracle:
    """Stock PEFT and torch.optim.AdamW, started from an adapter's captured folder."""

    def __init__(self, engine: PeftEngine, model_id: str, base: BaseModelInfo, folder: Path) -> None:
        for name, content in engine.capture(model_id, Contents.SAMPLER).items():
            (folder / name).write_bytes(content)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            self.model = peft_library.PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32), folder, is_trainable=True
            )
        self.model.eval()
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trainable, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay
        )

    def logprobs(self, one: Datum) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([one.model_input.tokens])).logits[0].float()
        targets = torch.from_numpy(np.frombuffer(one.loss_fn_inputs["target_tokens"].data, dtype="<i8").copy())
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    def loss(self, data: Sequence[Datum], loss_fn: str) -> torch.Tensor:
        total = torch.zeros(())
        for one in data:
            inputs = {key: torch.from_numpy(array(value).copy()) for key, value in one.loss_fn_inputs.items() if key != "target_tokens"}
            logprobs = self.logprobs(one)
            if loss_fn == "cross_entropy":
                total = total - (inputs["weights"] * logprobs).sum()
            else:
                total = total - (torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()
        return total

    def tensors(self, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """By their names in the engine's files."""
        return {
            name.replace(".default.", "."): parameter.grad if gradients else parameter.data
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def factors(engine: PeftEngine, model_id: str, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    adapter = engine._adapters[model_id]
    buffer = adapter.grad_P if gradients else adapter.weights_P
    assert buffer is not None
    found: dict[str, torch.Tensor] = {}
    for placement in adapter.layout.trained:
        for letter, view in zip("AB", placement.views(buffer), strict=True):
            found[f"base_model.model.{placement.site.name}.lora_{letter}.weight"] = view
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Relative L2 error: 1e-5 over all tensors, and 1e-3 for each, since a small one may be what cancellation left of large terms."""
    assert set(found) == set(expected)
    errors = {name: float((found[name] - values).norm()) for name, values in expected.items()}
    norms = {name: float(values.norm()) for name, values in expected.items()}
    assert math.hypot(*errors.values()) <= 1e-5 * math.hypot(*norms.values())
    for name, error in errors.items():
        assert error <= 1e-3 * norms[name], f"{name}: {error} of {norms[name]}"


MODULES = [
    {"train_mlp": False, "train_unembed": False},
    {"train_attn": False, "train_unembed": False},
    {"train_attn": False, "train_mlp": False},
    {},
]


@pytest.mark.proves("R12")
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
@pytest.mark.parametrize(("flags", "rank"), [(MODULES[0], 4), (MODULES[1], 32), (MODULES[2], 8), (MODULES[3], 1), (MODULES[3], 32)])
def test_training_equals_stock_peft(
    engine: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path, flags: dict[str, bool], rank: int, loss_fn: str
) -> None:
    engine.create_adapter("m", LoraConfig.model_validate({"rank": rank, "seed": 3} | flags))
    oracle = Oracle(engine, "m", tiny_model, tmp_path)
    for step in range(3):
        data = examples(loss_fn, seed=step)
        output = computed(engine, "m", compute(data, loss_fn))
        loss = oracle.loss(data, loss_fn)
        loss.backward()
        assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        assert_close(factors(engine, "m", gradients=True), oracle.tensors(gradients=True))
        run(engine, "m", STEP)
        oracle.optimizer.step()
        oracle.optimizer.zero_grad()
    assert_close(factors(engine, "m"), oracle.tensors())
    for name, values in oracle.tensors().items():
        torch.testing.assert_close(factors(engine, "m")[name], values, rtol=0, atol=1e-5)


@pytest.mark.proves("R12")
def test_logprobs_equal_those_of_peft_after_training(engine: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    trained(engine, "m")
    oracle = Oracle(engine, "m", tiny_model, tmp_path)
    data = examples("importance_sampling")
    output = computed(engine, "m", compute(data, "importance_sampling", backward=False))
    for one, logprobs in zip(data, output.logprobs, strict=True):
        torch.testing.assert_close(torch.from_numpy(array(logprobs).copy()), oracle.logprobs(one), rtol=1e-5, atol=1e-5)


def test_a_fresh_adapter_is_the_base_model(engine: PeftEngine, tiny_model: BaseModelInfo) -> None:
    engine.create_adapter("m", LORA)
    one = examples("cross_entropy")[1]
    output = computed(engine, "m", compute([one], backward=False))
    base = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32)
    with torch.no_grad():
        logits = base(input_ids=torch.tensor([one.model_input.tokens])).logits[0]
    targets = torch.from_numpy(np.frombuffer(one.loss_fn_inputs["target_tokens"].data, dtype="<i8").copy())
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(array(output.logprobs[0]).copy()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_forward_and_forward_backward_report_the_same_bits(engine: PeftEngine, loss_fn: str) -> None:
    trained(engine, "m")
    before = state(engine, "m")
    forward = computed(engine, "m", compute(examples(loss_fn), loss_fn, backward=False))
    assert state(engine, "m") == before
    assert computed(engine, "m", compute(examples(loss_fn), loss_fn)) == forward
    assert state(engine, "m") != before


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_one_call_of_eight_equals_eight_of_one(engine: PeftEngine, loss_fn: str) -> None:
    data = examples(loss_fn)
    for model_id in ("whole", "split"):
        engine.create_adapter(model_id, LORA)
        run(engine, model_id, compute(examples("cross_entropy", seed=9)), STEP)
    whole = computed(engine, "whole", compute(data, loss_fn))
    parts = [computed(engine, "split", compute([one], loss_fn)) for one in data]
    assert whole.metrics["loss:sum"] == pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-5)
    for logprobs, part in zip(whole.logprobs, parts, strict=True):
        np.testing.assert_allclose(array(logprobs), array(part.logprobs[0]), rtol=1e-5, atol=1e-5)
    assert_close(factors(engine, "split", gradients=True), factors(engine, "whole", gradients=True))


@pytest.mark.parametrize("budget", [1, 7, 40, 100_000])
def test_micro_batches_do_not_change_the_result(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    for model_id in ("usual", "other"):
        engine.create_adapter(model_id, LORA)
    data = examples("cross_entropy")
    usual = computed(engine, "usual", compute(data))
    monkeypatch.setattr(engine, "_micro_batch_tokens", budget)
    other = computed(engine, "other", compute(data))
    assert other.metrics["loss:sum"] == pytest.approx(usual.metrics["loss:sum"], rel=1e-5)
    assert_close(factors(engine, "other", gradients=True), factors(engine, "usual", gradients=True))


@pytest.mark.parametrize("max_rows", [1, 3, 24])
def test_chunks_of_logits_do_not_change_the_result(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
    """Also those that cut an example: its logits are then computed a second time for the backward pass."""
    rng = np.random.default_rng(5)
    data = [supervised(rng, 20, num_targets=3), supervised(rng, 7), supervised(rng, 9, num_targets=2)]
    for model_id in ("usual", "other"):
        engine.create_adapter(model_id, LORA)
    usual = computed(engine, "usual", compute(data))
    monkeypatch.setattr(unembed, "MAX_LOGITS", max_rows * 49152)
    other = computed(engine, "other", compute(data))
    for logprobs, expected in zip(other.logprobs, usual.logprobs, strict=True):
        np.testing.assert_allclose(array(logprobs), array(expected), rtol=1e-5)
    assert_close(factors(engine, "other", gradients=True), factors(engine, "usual", gradients=True))


def test_datums_of_different_ranks_share_a_command_and_sparse_equals_dense(engine: PeftEngine) -> None:
    engine.create_adapter("m", LORA)
    targets, weights = [[5, 9], [7, 7], [0, 3]], [[0.75, 0.25], [0.5, 0.0], [0.0, 1.0]]
    dense = datum([1, 2, 3], target_tokens=ints(targets), weights=tensor(weights))
    listed = datum([1, 2, 3], target_tokens=sparse(targets, DType.INT64), weights=sparse(weights))
    flat = datum([4, 5], target_tokens=ints([5, 6]))
    output = computed(engine, "m", compute([dense, flat, listed], backward=False))
    assert [logprobs.shape for logprobs in output.logprobs] == [(3, 2), (2,), (3, 2)]
    assert output.logprobs[0] == output.logprobs[2]
    assert array(output.logprobs[0])[1, 0] == array(output.logprobs[0])[1, 1]
    total = (np.array(weights) * array(output.logprobs[0])).sum() * 2 + array(output.logprobs[1]).sum()
    assert output.metrics == {"loss:sum": pytest.approx(-total, rel=1e-5)}


def test_logprobs_are_real_where_nothing_trains(engine: PeftEngine) -> None:
    engine.create_adapter("m", LORA)
    weighted = datum([1, 2], target_tokens=ints([2, 3]))
    silent = datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([0, 0]))
    output = computed(engine, "m", compute([weighted, silent]))
    np.testing.assert_array_equal(array(output.logprobs[0]), array(output.logprobs[1]))


def test_a_zero_gradient_counts_as_accumulated(engine: PeftEngine) -> None:
    trained(engine, "m")
    run(engine, "m", STEP)
    before = state(engine, "m")
    silent = compute([datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([0, 0]))])
    assert computed(engine, "m", silent).metrics == {"loss:sum": 0.0}
    assert run(engine, "m", STEP) == [OptimOutput({"unclipped_grad_l2:mean": 0.0})]
    assert state(engine, "m")["adapter_model.safetensors"] != before["adapter_model.safetensors"]  # momentum


def test_a_step_with_nothing_accumulated_succeeds_and_changes_nothing(engine: PeftEngine) -> None:
    trained(engine, "m")
    run(engine, "m", STEP)
    before = state(engine, "m")
    assert run(engine, "m", STEP) == [OptimOutput({})]
    assert state(engine, "m") == before


def test_the_first_gradient_of_a_is_exactly_0_and_moves_nothing(engine: PeftEngine) -> None:
    """B is 0 then; an eps as small as the default would make a full step of any noise."""
    engine.create_adapter("m", LORA)
    start = {name: values.clone() for name, values in factors(engine, "m").items()}
    run(engine, "m", compute(examples("cross_entropy")))
    gradients = factors(engine, "m", gradients=True)
    assert all(values.any() == ("lora_B" in name) for name, values in gradients.items())
    run(engine, "m", OptimStep(optimizer=AdamParams()))
    for name, values in factors(engine, "m").items():
        assert torch.equal(values, start[name]) == ("lora_A" in name)


def test_positive_advantages_raise_logprobs_and_negative_ones_lower_them(engine: PeftEngine) -> None:
    for sign in (1.0, -1.0):
        engine.create_adapter("m", LORA)
        inputs = {"target_tokens": ints([5, 6, 7]), "advantages": tensor([sign] * 3)}
        first = computed(engine, "m", compute([datum([4, 5, 6], logprobs=tensor([-10.8] * 3), **inputs)], "importance_sampling"))
        again = compute([datum([4, 5, 6], logprobs=first.logprobs[0], **inputs)], "importance_sampling")
        run(engine, "m", STEP)
        change = array(computed(engine, "m", again).logprobs[0]) - array(first.logprobs[0])
        assert (np.sign(change) == sign).all()


def test_two_interleaved_adapters_equal_their_solo_runs(engine: PeftEngine) -> None:
    configs = {"a": LoraConfig(rank=4, seed=1), "b": LoraConfig(rank=16, seed=2, train_mlp=False)}
    commands = {
        "a": [compute(examples("cross_entropy", seed=1)), STEP, compute(examples("cross_entropy", seed=2)), STEP],
        "b": [compute(examples("importance_sampling", seed=3), "importance_sampling"), STEP] * 2,
    }
    solo = {}
    for model_id, lora in configs.items():
        engine.create_adapter(model_id, lora)
        solo[model_id] = (run(engine, model_id, *commands[model_id]), state(engine, model_id))
        engine.drop_adapter(model_id)
    for model_id, lora in configs.items():
        engine.create_adapter(model_id, lora)
    answers: dict[str, list[Answer]] = {"a": [], "b": []}
    for seq, pair in enumerate(zip(commands["a"], commands["b"], strict=True), start=1):
        for model_id, answer in zip("ab", engine.run([Job("a", seq, pair[0]), Job("b", seq, pair[1])]), strict=True):
            answers[model_id].append(answer)
    for model_id in configs:
        assert (answers[model_id], state(engine, model_id)) == solo[model_id]


def test_a_restored_snapshot_continues_bit_for_bit(engine: PeftEngine) -> None:
    trained(engine, "m")
    files = engine.capture("m", Contents.SNAPSHOT)
    rest = [STEP, compute(examples("cross_entropy", seed=4)), STEP]
    straight = (run(engine, "m", *rest), state(engine, "m"))
    engine.restore("m", LORA, files)
    assert state(engine, "m") == files
    assert (run(engine, "m", *rest), state(engine, "m")) == straight


def test_a_checkpoint_loads_with_and_without_its_optimizer(engine: PeftEngine) -> None:
    trained(engine, "source")
    files = engine.capture("source", Contents.CHECKPOINT)
    for optimizer, step in ((True, 1), (False, 0)):
        trained(engine, "m", LORA.model_copy(update={"seed": 99}))
        engine.load("m", files, optimizer=optimizer)
        after = state(engine, "m")
        assert after["adapter_model.safetensors"] == files["adapter_model.safetensors"]
        assert json.loads(after["train_state.json"]) == {"schema_version": 1, "step": step, "accumulated": False}
        assert (after["train_state.safetensors"] == files["train_state.safetensors"]) is optimizer


@pytest.mark.proves("R11")
@pytest.mark.parametrize("damage", ["truncated", "rank"])
def test_a_failed_load_leaves_no_trace(engine: PeftEngine, damage: str) -> None:
    trained(engine, "m")
    trained(engine, "other", LORA.model_copy(update={"rank": 8 if damage == "truncated" else 4}))
    files = dict(engine.capture("other", Contents.CHECKPOINT))
    if damage == "truncated":
        files["train_state.safetensors"] = files["train_state.safetensors"][:-1]
    before = state(engine, "m")
    forward = compute(examples("cross_entropy"), backward=False)
    logprobs = computed(engine, "m", forward)
    with pytest.raises(ValidationFailed):
        engine.load("m", files, optimizer=True)
    with pytest.raises(ValidationFailed):
        engine.restore("m", LORA, files)
    assert state(engine, "m") == before
    assert computed(engine, "m", forward) == logprobs
    with pytest.raises(ValidationFailed):
        engine.restore("new", LORA, files)
    assert sorted(engine._adapters) == ["m", "other"]
    engine.create_adapter("new", LORA)


GOOD = datum([1, 2, 3], target_tokens=ints([2, 3, 4]))
RL = {"target_tokens": ints([2, 3, 4]), "logprobs": tensor([-10.8] * 3), "advantages": tensor([1, 1, 1])}
BAD: list[tuple[str, Datum | None, dict[str, float | str]]] = [
    ("cross_entropy", None, {}),  # no datums
    ("cross_entropy", datum([], target_tokens=ints([])), {}),
    ("cross_entropy", datum([1, 2]), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 3]), mask=tensor([1, 1])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 3, 4])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([[1, 1], [1, 1]])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, -100])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 49152])), {}),
    ("cross_entropy", datum([1, 49152], target_tokens=ints([2, 3])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=tensor([2, 3])), {}),
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([np.nan, 0])), {}),
    ("cross_entropy", datum([1] * 2049, target_tokens=ints([1] * 2049)), {}),
    ("cross_entropy", GOOD, {"temperature": 1.0}),
    ("cross_entropy", GOOD, {"temperature": "warm"}),
    ("unknown_loss", GOOD, {}),
    ("importance_sampling", datum([1, 2, 3], **RL | {"target_tokens": ints([[2], [3], [4]])}), {}),
    ("importance_sampling", datum([1, 2, 3], **RL | {"advantages": tensor([1, 1])}), {}),
    ("importance_sampling", datum([1, 2, 3], **RL | {"logprobs": tensor([0, -np.inf, 0])}), {}),
    ("importance_sampling", datum([1, 2, 3], **RL | {"logprobs": tensor([-1000, 0, 0])}), {}),  # the ratio overflows
    ("cross_entropy", datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([3e38, 3e38])), {}),  # the loss overflows
]


@pytest.mark.proves("R10")
@pytest.mark.parametrize(("loss_fn", "bad", "config"), BAD)
def test_an_invalid_command_leaves_weights_moments_and_gradient_alone(
    engine: PeftEngine, loss_fn: str, bad: Datum | None, config: dict[str, float | str]
) -> None:
    trained(engine, "m")
    before = state(engine, "m")
    good = datum([1, 2, 3], **RL) if loss_fn == "importance_sampling" else GOOD
    data = [good, bad] if bad else []
    for backward in (True, False):
        answer = refused(engine, "m", compute(data, loss_fn, backward=backward, config=config))
        assert answer.category == "user"
        assert state(engine, "m") == before
    clean = compute(examples("cross_entropy"))
    expected = [run(engine, "m", clean, STEP), state(engine, "m")]
    engine.restore("m", LORA, before)
    assert [run(engine, "m", clean, STEP), state(engine, "m")] == expected


def test_the_datum_whose_loss_overflows_is_named(engine: PeftEngine) -> None:
    engine.create_adapter("m", LORA)
    bad = datum([1, 2, 3], **RL | {"logprobs": tensor([-1000, 0, 0])})
    answer = refused(engine, "m", compute([datum([1, 2, 3], **RL), bad], "importance_sampling"))
    assert isinstance(answer, ValidationFailed)
    assert answer.message == (
        "data[1]: importance_sampling: the loss or its gradient is not finite; check weights, advantages and log-probs, or load an earlier "
        "checkpoint if the model has diverged"
    )


def test_a_model_that_diverged_refuses_to_train_and_can_still_be_saved(engine: PeftEngine) -> None:
    trained(engine, "m")
    (answer,) = run(engine, "m", OptimStep(optimizer=AdamParams(learning_rate=1e30)))  # the weights are finite, what they compute is not
    assert isinstance(answer, OptimOutput)
    before = state(engine, "m")
    assert isinstance(refused(engine, "m", compute([GOOD])), ValidationFailed)
    assert state(engine, "m") == before
    engine.restore("m", LORA, before)
    assert state(engine, "m") == before


def test_a_refusal_does_not_stop_the_other_jobs(engine: PeftEngine) -> None:
    engine.create_adapter("m", LORA)
    answers = run(engine, "m", compute([]), compute([GOOD]), compute([datum([1] * 2049, target_tokens=ints([1] * 2049))]), STEP)
    assert [type(answer) for answer in answers] == [ValidationFailed, ComputeOutput, InputTokensExceeded, OptimOutput]
    assert isinstance(run(engine, "gone", STEP)[0], NotFound)


def test_slots_are_bounded_and_reusable(engine: PeftEngine) -> None:
    assert engine.capacity == 8
    for number in range(8):
        engine.create_adapter(f"m{number}", LORA)
    engine.create_adapter("m0", LORA)  # in place of the one of that id
    with pytest.raises(InternalError, match="all 8 adapter slots are taken"):
        engine.create_adapter("m8", LORA)
    engine.drop_adapter("m3")
    engine.drop_adapter("m3")
    engine.create_adapter("m8", LORA)


def test_an_impossible_config_takes_no_slot(engine: PeftEngine) -> None:
    with pytest.raises(ValidationFailed):
        engine.create_adapter("m", LORA.model_copy(update={"train_attn": False, "train_mlp": False, "train_unembed": False}))
    with pytest.raises(NotFound):
        engine.capture("m", Contents.SAMPLER)


def test_ping_answers(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ping()
    monkeypatch.setattr(torch, "ones", torch.zeros)
    with pytest.raises(InternalError, match="8 x 1 = 0"):
        engine.ping()


def test_bf16_stays_close_and_keeps_float32_masters(tiny_model: BaseModelInfo, engine: PeftEngine) -> None:
    short = PeftEngine(tiny_model, "bf16", max_adapters=1, micro_batch_tokens=64)
    assert (short.dtype, engine.dtype) == ("bf16", "fp32")
    for one in (short, engine):
        trained(one, "m")
    data = examples("cross_entropy")
    exact, rough = (computed(one, "m", compute(data, backward=False)) for one in (engine, short))
    gaps = [np.abs(array(left) - array(right)).mean() for left, right in zip(exact.logprobs, rough.logprobs, strict=True)]
    assert np.mean(gaps) < 2e-2
    kept = read(short.capture("m", Contents.SNAPSHOT), Layout.of(short._sites, LORA), optimizer=True)
    assert kept.weights_P.dtype == torch.float32
    assert not torch.equal(kept.weights_P, kept.weights_P.bfloat16().float())
    assert kept.grad_P is not None
    overlap = torch.cosine_similarity(kept.grad_P, engine._adapters["m"].grad_P, dim=0)
    assert float(overlap) > 0.99


@pytest.mark.parametrize(("ratio", "expected"), [(2.0, torch.bfloat16), (1.1, torch.float32), (0.3, torch.float32)])
def test_auto_takes_bf16_only_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, ratio: float, expected: torch.dtype) -> None:
    monkeypatch.setattr(peft_engine, "_best_time_s", lambda dtype: ratio if dtype is torch.float32 else 1.0)
    assert peft_engine._probe_dtype(torch.device("cpu")) is expected


def test_auto_measures(tiny_model: BaseModelInfo) -> None:
    assert PeftEngine(tiny_model, "auto", max_adapters=1, micro_batch_tokens=64).dtype in ("fp32", "bf16")


def write_variant(base: BaseModelInfo, folder: Path, **changed: object) -> BaseModelInfo:
    for path in Path(base.path).iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | changed))
    return base.model_copy(update={"path": str(folder)})


def test_a_model_that_changes_its_logits_is_refused(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    scaled = write_variant(
        tiny_model,
        tmp_path,
        architectures=["GraniteForCausalLM"],
        model_type="granite",
        logits_scaling=0.01,
    )
    with pytest.raises(UnsupportedBaseModel, match="changes its logits"):
        PeftEngine(scaled, "fp32", max_adapters=1, micro_batch_tokens=64)


def test_a_mixture_of_experts_is_refused(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    mixture = write_variant(tiny_model, tmp_path, num_experts=4)
    with pytest.raises(UnsupportedBaseModel, match="mixtures of experts"):
        PeftEngine(mixture, "fp32", max_adapters=1, micro_batch_tokens=64)
