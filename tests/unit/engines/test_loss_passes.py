"""What every loss promises on a model: sums that no split changes, clips that stop a gradient or do not, rows that no padding joins."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.unit.engines.datums import array, compute, datum, ints, sparse, tensor
from tests.unit.engines.loss_cases import LOSSES, data_of
from tests.unit.engines.peft import computed, run, state
from tinsmith.engines import passes
from tinsmith.engines.losses import LossTerm
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.training import AdamParams, Compute, ComputeOutput, LoraConfig, OptimStep

LORA = LoraConfig(rank=8, seed=11)
STEP = OptimStep(optimizer=AdamParams(learning_rate=1e-3, eps=1e-6))
LENGTHS = (5, 31, 12, 1, 20, 8, 26, 17)


@pytest.fixture
def engine(peft: PeftEngine) -> PeftEngine:
    for model_id in list(peft._adapters):
        peft.drop_adapter(model_id)
    return peft


def trained(engine: PeftEngine, model_id: str) -> None:
    """An adapter whose B is no longer 0, without a gradient."""
    engine.create_adapter(model_id, LORA)
    run(engine, model_id, compute(data_of("cross_entropy", LENGTHS, 9)), STEP)


def gradient(engine: PeftEngine, *commands: Compute) -> torch.Tensor:
    """[P], of commands that one adapter took one after another."""
    trained(engine, "m")
    answers = run(engine, "m", *commands)
    assert all(isinstance(answer, ComputeOutput) for answer in answers), answers
    grad_P = engine._adapters["m"].grad_P
    assert grad_P is not None
    engine.drop_adapter("m")
    return grad_P


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """1e-5 relative, over all parameters."""
    assert float(expected.norm()) > 0
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_one_call_of_eight_equals_eight_of_one_and_any_micro_batches(engine: PeftEngine, loss_fn: str) -> None:
    data = data_of(loss_fn, LENGTHS)
    whole = gradient(engine, compute(data, loss_fn))
    assert_close(gradient(engine, *(compute([one], loss_fn) for one in data)), whole)
    assert_close(gradient(engine, compute(data[:3], loss_fn), compute(data[3:], loss_fn)), whole)
    for bound in (1, 40, 100_000):
        assert_close(gradient(engine, replace(compute(data, loss_fn), micro_batch_tokens=bound)), whole)


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_forward_and_forward_backward_report_the_same_bits(engine: PeftEngine, loss_fn: str) -> None:
    trained(engine, "m")
    before, command = state(engine, "m"), compute(data_of(loss_fn, LENGTHS), loss_fn)
    forward = computed(engine, "m", replace(command, backward=False))
    assert state(engine, "m") == before
    assert computed(engine, "m", command) == forward
    parts = [computed(engine, "m", replace(command, data=(one,), backward=False)) for one in command.data]
    assert forward.metrics == {"loss:sum": pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-5)}
    for logprobs, part in zip(forward.logprobs, parts, strict=True):
        np.testing.assert_allclose(array(logprobs), array(part.logprobs[0]), rtol=1e-5)


def clipped_everywhere(engine: PeftEngine) -> list[Datum]:
    """r = e where the advantage raises a log-prob, 1 / e where it lowers it."""
    trained(engine, "m")
    targets, advantages = ints([5, 6, 7]), np.array([1, -1, 2])
    plain = datum([4, 5, 6], target_tokens=targets)
    logprobs = array(computed(engine, "m", compute([plain], backward=False)).logprobs[0])
    engine.drop_adapter("m")
    return [datum([4, 5, 6], target_tokens=targets, logprobs=tensor(logprobs - np.sign(advantages)), advantages=tensor(advantages))]


def test_a_batch_that_ppo_clips_everywhere_trains_nothing_and_cispo_trains_on(engine: PeftEngine) -> None:
    data = clipped_everywhere(engine)
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert not gradient(engine, compute(data, "ppo", config=config)).any()
    assert not gradient(engine, compute(data, "ppo")).any()
    assert gradient(engine, compute(data, "cispo", config=config)).any()
    assert gradient(engine, compute(data, "importance_sampling")).any()


def test_a_custom_loss_in_the_client_equals_a_native_one_after_a_step(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """C = sum of l^2: a forward pass with weights 0, then cross_entropy with weights -dC/dl."""
    for model_id in ("client", "native"):
        trained(engine, model_id)
    data = [
        replace(one, loss_fn_inputs=one.loss_fn_inputs | {"weights": tensor(np.zeros(len(one.model_input)))})
        for one in data_of("cross_entropy", LENGTHS)
    ]
    logprobs = [array(values).astype(np.float64) for values in computed(engine, "client", compute(data, backward=False)).logprobs]
    derived = [
        replace(one, loss_fn_inputs=one.loss_fn_inputs | {"weights": tensor(-2 * values)})
        for one, values in zip(data, logprobs, strict=True)
    ]
    surrogate = run(engine, "client", compute(derived), STEP)[0]
    assert isinstance(surrogate, ComputeOutput)
    assert surrogate.metrics["loss:sum"] == pytest.approx(2 * sum(float(values @ values) for values in logprobs), rel=1e-5)

    def squares(logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]) -> LossTerm:
        with torch.enable_grad():
            leaf = logprobs.clone().requires_grad_()
            loss = (leaf**2).sum()
            (grad,) = torch.autograd.grad(loss, [leaf])
        return LossTerm(loss.item(), grad)

    monkeypatch.setattr(passes, "PASSES", {"cross_entropy": partial(passes.pointwise_pass, squares)})
    run(engine, "native", compute(data), STEP)
    found, expected = (engine._adapters[model_id].weights_P for model_id in ("client", "native"))
    assert_close(found, expected)
    assert_close(found - start_of(engine), expected - start_of(engine))


def start_of(engine: PeftEngine) -> torch.Tensor:
    trained(engine, "start")
    weights_P = engine._adapters["start"].weights_P.clone()
    engine.drop_adapter("start")
    return weights_P


def test_sparse_inputs_train_as_dense_ones(engine: PeftEngine) -> None:
    """An unlisted target is token 0, and it may carry weight."""
    targets, weights = [[5, 9], [7, 7], [0, 3]], [[0.75, 0.25], [0.5, 0.0], [-0.5, 1.0]]
    dense = {"target_tokens": ints(targets), "weights": tensor(weights)}
    listed = {"target_tokens": sparse(targets, DType.INT64), "weights": sparse(weights)}
    expected = gradient(engine, compute([datum([1, 2, 3], **dense)]))
    assert expected.any()
    for changed in (listed, dense | {"weights": listed["weights"]}, dense | {"target_tokens": listed["target_tokens"]}):
        assert torch.equal(gradient(engine, compute([datum([1, 2, 3], **changed)])), expected)


def far_from_sampled(lengths: Sequence[int], **extra: float) -> list[Datum]:
    """No advantage anywhere, and sampled log-probs of 0: all that dro has is its penalty."""
    rng = np.random.default_rng(3)
    return [
        datum(
            rng.integers(0, 49000, length).tolist(),
            target_tokens=ints(rng.integers(0, 49000, length)),
            logprobs=tensor(np.zeros(length)),
            advantages=tensor(np.zeros(length)),
            **{key: tensor(np.full(length, value)) for key, value in extra.items()},
        )
        for length in lengths
    ]


def test_padding_adds_nothing_to_the_penalty_of_dro(engine: PeftEngine) -> None:
    trained(engine, "m")
    data = far_from_sampled((3, 40, 1, 17))
    together = computed(engine, "m", replace(compute(data, "dro", backward=False), micro_batch_tokens=100_000))
    expected = sum(0.025 * float(np.sum(array(logprobs).astype(np.float64) ** 2)) for logprobs in together.logprobs)
    assert together.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    engine.drop_adapter("m")
    padded = gradient(engine, replace(compute(data, "dro"), micro_batch_tokens=100_000))
    assert_close(padded, gradient(engine, *(compute([one], "dro") for one in data)))


def test_weights_mask_the_penalty_of_dro(engine: PeftEngine) -> None:
    assert gradient(engine, compute(far_from_sampled((3, 5)), "dro")).any()
    assert not gradient(engine, compute(far_from_sampled((3, 5), weights=0.0), "dro")).any()
    assert not gradient(engine, compute(far_from_sampled((3, 5)), "dro", config={"beta": 0})).any()


@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"cross_entropy"}))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_moves_log_probs_with_the_sign_of_their_advantage(engine: PeftEngine, loss_fn: str, sign: float) -> None:
    trained(engine, "m")
    plain = datum([4, 5, 6], target_tokens=ints([5, 6, 7]))
    forward = compute([plain], backward=False)
    first = computed(engine, "m", forward).logprobs[0]
    mask = {"sequence_ratio_mask": tensor([1, 1, 1])} if loss_fn == "gspo" else {}
    inputs = plain.loss_fn_inputs | {"logprobs": first, "advantages": tensor([sign] * 3)} | mask
    answers = run(engine, "m", compute([replace(plain, loss_fn_inputs=inputs)], loss_fn), STEP)
    assert isinstance(answers[0], ComputeOutput), answers
    change = array(computed(engine, "m", forward).logprobs[0]) - array(first)
    assert (np.sign(change) == sign).all()
